"""The command line: what it prints, its exit codes, what it asks of the ranks; and that it imports no torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import yaml
from megappo.cli import convert, evaluate, generate, main, train
from megappo.config.layout import LayoutConfig
from megappo.config.requests import Command, ConvertRequest, EvaluateRequest, GenerateRequest, Request, TrainRequest
from megappo.errors import ExitCode
from megappo.launcher.failure import read_failure
from tests.support.experiments import make_checkpoint, write_experiment

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 12}
ROOT = Path(__file__).resolve().parents[2]


class Asked:
    """Stands in for the ranks: keeps what was asked of them."""

    def __init__(self, code: ExitCode = ExitCode.DONE) -> None:
        self.code = code
        self.request: Request | None = None
        self.num_ranks = 0
        self.settings: dict[str, object] = {}

    def __call__(self, request: Request, num_ranks: int, **settings: object) -> ExitCode:
        self.request, self.num_ranks, self.settings = request, num_ranks, settings
        return self.code


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    stand_in = Asked()
    for command in (train, evaluate, convert, generate):
        monkeypatch.setattr(command, "run_on_ranks", stand_in)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return stand_in


def typed(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line."""
    code = main.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_validate_prints_the_split_and_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_experiment(tmp_path, "algorithm:\n  kl_ctrl: {type: adaptive}\n")
    code, out, err = typed(capsys, "validate", file, "rollout.n=4")
    assert code == 0
    assert "step    12 prompts × 4 responses = 48 sequences" in out and "this is the split for dp 1" in out
    assert out.endswith(f"{file} is valid\n")
    assert err.startswith(f'warning: algorithm.kl_ctrl.type: "adaptive" ({file}:17): does nothing')
    code, out, _ = typed(capsys, "validate", file, "rollout.n=4", "--nproc", 2)
    assert "2 data-parallel ranks have 24 sequences each" in out and "this is the split for" not in out


def test_validate_refuses_with_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_experiment(tmp_path)
    code, out, err = typed(capsys, "validate", file, "layout.tp=5")
    assert (code, out) == (ExitCode.BAD_INPUT, "")
    assert err.startswith("error: layout.tp: 5 (command line): does not divide the 12 attention heads")
    code, _, err = typed(capsys, "validate", file, "--nproc", 4)
    assert code == ExitCode.BAD_INPUT
    assert err.startswith(f"error: actor.ppo_mini_batch_size: 6 ({file}:9): times rollout.n 1 gives 6 sequences")


def test_validate_is_quick_and_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from megappo.cli.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy', 'megatron', 'datasets'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    command = [sys.executable, "-c", program, "validate", str(write_experiment(tmp_path))]
    seconds = []
    for _ in range(2):  # the first may have to compile
        before = os.times().children_user
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        seconds.append(os.times().children_user - before)
    assert result.returncode == 0, result.stderr
    assert min(seconds) < 1.0


def test_show_config_is_complete_and_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_experiment(tmp_path)
    code, out, _ = typed(capsys, "show-config", file, "actor.optim.lr=3e-6")
    assert code == 0
    shown = yaml.safe_load(out)
    assert shown["actor"]["optim"]["lr"] == 3e-6 and shown["rollout"]["temperature"] == 1.0
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert typed(capsys, "show-config", again)[1] == out


def test_train_asks_for_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    file = write_experiment(tmp_path)
    words = ("train", file, "layout.tp=3", "--nproc", 6, "trainer.num_threads=2", "--resume", "trainer.seed=4")
    assert typed(capsys, *words) == (0, "", "")
    assert isinstance(asked.request, TrainRequest) and asked.num_ranks == 6
    config = asked.request.config
    assert (config.trainer.resume, config.trainer.seed, config.layout.tp) == ("auto", 4, 3)
    assert asked.settings["num_threads"] == 2 and asked.settings["log_folder"] == tmp_path / "runs" / "test" / "logs"
    typed(capsys, "train", file, "layout.tp=3", "layout.dp=2")
    assert asked.num_ranks == 6
    typed(capsys, "train", file, "layout.tp=3")
    assert asked.num_ranks == 3
    asked.code = ExitCode.STOPPED_AFTER_SAVING
    assert typed(capsys, "train", file)[0] == 75


def test_resume_goes_on_from_a_named_checkpoint_until_the_run_has_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked
) -> None:
    """Slurm's script types --resume before the user's words, and a requeued job types them again."""
    file = write_experiment(tmp_path)
    other = make_checkpoint(tmp_path / "elsewhere", 9)
    (tmp_path / "stages.yaml").write_text(f"stages: {{only: {{base: {file.name}}}}}")
    runs = [(file, tmp_path / "runs" / "test"), (tmp_path / "stages.yaml", tmp_path / "runs" / "test" / "only")]
    for experiment, run_dir in runs:
        words = ("train", "--resume", experiment, f"trainer.resume={other}")
        assert typed(capsys, *words)[0] == 0
        assert isinstance(asked.request, TrainRequest) and asked.request.config.trainer.resume == str(other)
        make_checkpoint(run_dir / "checkpoints", 5)
        assert typed(capsys, *words)[0] == 0
        assert asked.request.config.trainer.resume == "auto"
    # A kill between the last file of a save and its name: the run has a checkpoint of its own.
    for experiment, run_dir in runs:
        newest = run_dir / "checkpoints" / "step-000005"
        newest.rename(newest.with_name("step-000005.partial"))
        assert typed(capsys, "train", "--resume", experiment, f"trainer.resume={other}")[0] == 0
        assert asked.request.config.trainer.resume == "auto" and newest.is_dir()


def test_train_checks_the_world_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_experiment(tmp_path)
    code, _, err = typed(capsys, "train", file, "layout.tp=3", "--nproc", 4)
    assert code == ExitCode.BAD_INPUT and "3 ranks hold a copy of the model, which does not divide 4 ranks" in err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code, _, err = typed(capsys, "train", file, "layout.tp=3")
    assert code == ExitCode.BAD_INPUT and "this machine has 2 GPUs" in err
    assert asked.request is None


def test_run_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    file = write_experiment(tmp_path)
    code, _, err = typed(capsys, "train", file, f"trainer.run_dir={file}/run")
    assert code == ExitCode.BAD_INPUT and asked.request is None
    assert err == (
        f"error: trainer.run_dir: {file}/run can't be written to (Not a directory: {file}/run/logs); give another "
        "folder, for example runs/test\n"
    )


def test_rank_of_torchrun_tells_a_mistake_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megappo", "train", str(write_experiment(tmp_path)), "layout.tp=5"]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TMPDIR": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | world | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert sorted(map(bool, said)) == [False, True]
    assert max(said).startswith("error: 2 mistakes in the configuration:\n  - layout.tp: 5 (command line)")


def test_what_ctrl_c_leaves(tmp_path: Path) -> None:
    assert train.tell_last_checkpoint(tmp_path) == f"{tmp_path} has no checkpoint yet"
    (tmp_path / "checkpoints" / "step-000005").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000005" / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints" / "latest").symlink_to("step-000005")
    expected = f"the last checkpoint is {tmp_path}/checkpoints/step-000005; go on from it with --resume"
    assert train.tell_last_checkpoint(tmp_path) == expected


def test_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    file = write_experiment(tmp_path)
    code, _, err = typed(capsys, "evaluate", file)
    assert code == ExitCode.BAD_INPUT and "error: data.val_files: is empty" in err
    val = f"data.val_files=[{tmp_path}/train.jsonl]"
    assert "has no checkpoint to evaluate; name a model with --model PATH" in typed(capsys, "evaluate", file, val)[2]
    assert "there is no such folder" in typed(capsys, "evaluate", file, val, "--model", tmp_path / "none")[2]
    assert typed(capsys, "evaluate", file, val, "--checkpoint", tmp_path / "model")[0] == 0
    assert isinstance(asked.request, EvaluateRequest) and asked.request.model == f"{tmp_path}/model"


def test_evaluate_lays_options_over_the_layout_and_asks_nothing_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked
) -> None:
    """Steps of 12 prompts in minibatches of 6 divide over 5 ranks nowhere; held-out prompts need not."""
    file = write_experiment(tmp_path, **EXPERTS)
    words = ("evaluate", file, f"data.val_files=[{tmp_path}/train.jsonl]", "--model", tmp_path / "model")
    assert typed(capsys, *words, "--dp", 5) == (0, "", "")
    assert isinstance(asked.request, EvaluateRequest) and asked.num_ranks == 5
    assert typed(capsys, *words, "--tp", 3, "--sequence-parallel", "--ep", 2)[0] == 0
    assert isinstance(asked.request, EvaluateRequest) and asked.num_ranks == 6
    layout = asked.request.config.layout
    assert (layout.tp, layout.ep, layout.etp, layout.dp, layout.sequence_parallel) == (3, 2, None, None, True)
    for options, expected in (
        (("--ep", 3), "--ep 3: does not divide the 8 experts of "),
        (("--ep", 2, "--nproc", 3), "--ep 2: times etp 1 does not divide the tp 1 · dp 3 = 3 ranks of a stage"),
        (("--tp", 3), "every rank would send them the same tokens; add it, or set --tp to 1\n"),
        (("layout.tp=5",), "layout.tp: 5 (command line): does not divide the 12 attention heads"),
    ):
        code, _, err = typed(capsys, *words, *options)
        assert code == ExitCode.BAD_INPUT and expected in err, err


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    write_experiment(tmp_path)
    source = tmp_path / "model"
    words = ("convert", "--from", source, "--to", tmp_path / "new", "--tp", 3, "--pp", 2, "--dtype", "float32")
    assert typed(capsys, *words)[0] == 0
    assert asked.num_ranks == 6
    assert asked.request == ConvertRequest(
        source=str(source), target=f"{tmp_path}/new", layout=LayoutConfig(tp=3, pp=2, dp=1), dtype="float32"
    )
    for words, expected in (
        (("--from", tmp_path / "none", "--to", tmp_path / "new"), "there is no such folder"),
        (("--from", source, "--to", source / "config.json" / "new"), "can't be made (File exists: "),
        (
            ("--from", source, "--to", tmp_path / "new", "--merged"),
            "is a Hugging Face folder, which has no adapters to",
        ),
        (("--from", source, "--to", tmp_path), "exists and is not empty; give a new folder"),
        (("--from", source, "--to", tmp_path / "new", "--tp", 4), "--tp 4: does not divide the 12 attention heads"),
        (("--from", source, "--to", tmp_path / "new", "--pp", 4), "--pp 4: does not divide the 6 layers"),
        (("--from", source, "--to", tmp_path / "new", "--ep", 2), "--ep 2: is for experts, and "),
    ):
        code, _, err = typed(capsys, "convert", *words)
        assert code == ExitCode.BAD_INPUT and expected in err


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ("--ep 2", LayoutConfig(ep=2, dp=2)),
        ("--ep 2 --tp 3", LayoutConfig(tp=3, ep=2, dp=2, sequence_parallel=True)),
        ("--ep 8 --tp 3 --etp 3", LayoutConfig(tp=3, ep=8, etp=3, dp=8, sequence_parallel=True)),
        ("--pp 2 --ep 4 --dp 8", LayoutConfig(pp=2, ep=4, dp=8)),
        ("--dp 3 --tp 3", LayoutConfig(tp=3, dp=3)),
    ],
)
def test_layout_of_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked, options: str, layout: LayoutConfig
) -> None:
    """The fewest ranks that hold all experts, unless told; the same of a checkpoint, which has the configuration of
    its model."""
    write_experiment(tmp_path, **EXPERTS)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model").symlink_to(tmp_path / "model")
    for source in ("model", "checkpoint"):
        words = ("convert", "--from", tmp_path / source, "--to", tmp_path / "new", *options.split())
        assert typed(capsys, *words) == (0, "", "")
        assert isinstance(asked.request, ConvertRequest) and asked.request.layout == layout
        assert asked.num_ranks == layout.model_parallel_size * layout.dp
    assert typed(capsys, "generate", "--model", tmp_path / "model", "--prompt", "a", *options.split())[0] == 0
    assert isinstance(asked.request, GenerateRequest) and asked.request.layout == layout
    flag = layout.tp > 1
    words = ("generate", "--model", tmp_path / "model", "--prompt", "a", *options.split(), "--sequence-parallel")
    assert typed(capsys, *words)[0] == (ExitCode.DONE if flag else ExitCode.BAD_INPUT)
    assert not flag or asked.request.layout == layout.model_copy(update={"sequence_parallel": True})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--ep 3", "--ep 3: does not divide the 8 experts of {source}; nearest that can: 2 or 4"),
        ("--etp 5", "--etp 5: does not divide the 12 rows (moe_intermediate_size) of an expert of {source}; nearest"),
        ("--ep 4 --dp 6", "--ep 4: times etp 1 does not divide the tp 1 · dp 6 = 6 ranks of a stage; nearest that can"),
        (
            "--sequence-parallel",
            "--sequence-parallel: shards activations over the tensor-parallel ranks, and --tp is 1; leave it out, or "
            "set --tp to 2\n",
        ),
        ("--ep 3 --pp 4", "2 mistakes in the configuration:\n  - --pp 4: does not divide the 6 layers of {source}; "),
    ],
)  # fmt: skip
def test_layout_that_does_not_divide_is_told_by_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked, options: str, expected: str
) -> None:
    write_experiment(tmp_path, **EXPERTS)
    source = tmp_path / "model"
    code, _, err = typed(capsys, "generate", "--model", source, "--prompt", "a", *options.split())
    assert code == ExitCode.BAD_INPUT and asked.request is None
    assert err.startswith(f"error: {expected.format(source=source)}"), err


def test_ranks_that_were_started_set_the_copies_or_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun or srun with launch/env.sh; rank 0 of a world that does not fit tells it."""
    write_experiment(tmp_path, **EXPERTS)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8"), ("TMPDIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    words = ("generate", "--model", tmp_path / "model", "--prompt", "a")
    assert typed(capsys, *words, "--pp", 2, "--ep", 2) == (0, "", "")
    assert isinstance(asked.request, GenerateRequest) and asked.request.layout == LayoutConfig(pp=2, ep=2, dp=4)
    assert asked.num_ranks == 8
    for options, expected in (
        (("--pp", 3), "tp 1 · pp 3 = 3 ranks hold a copy of the model, which does not divide 8 ranks; start another"),
        (("--dp", 4), "--dp 4: tp 1 · pp 1 · dp 4 = 4 ranks, and 8 are started; set it to 8, or leave it out"),
    ):
        monkeypatch.setenv("MEGAPPO_FAILURE_DIR", str(tmp_path / options[0]))
        failure = Path(tmp_path / options[0])
        failure.mkdir()
        assert typed(capsys, *words, *options)[0] == ExitCode.BAD_INPUT
        told = read_failure(failure)
        assert told is not None and expected in told.message


def test_too_few_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_experiment(tmp_path, **EXPERTS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code, _, err = typed(capsys, "convert", "--from", tmp_path / "model", "--to", tmp_path / "new", "--ep", 4)
    assert code == ExitCode.BAD_INPUT and asked.request is None
    assert "layout tp 1 · pp 1 · dp 4: needs 4 ranks, and this machine has 2 GPUs; start at most 2" in err


def test_tasks_of_srun_that_have_not_joined_are_refused_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_experiment(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    for task, expected in ((0, "error: srun started 4 tasks that know nothing of each other"), (3, "")):
        monkeypatch.setenv("SLURM_PROCID", str(task))
        code, _, err = typed(capsys, "generate", "--model", tmp_path / "model", "--prompt", "a", "--dp", 4)
        assert code == ExitCode.BAD_INPUT and err.startswith(expected) and bool(err) == bool(expected)


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    write_experiment(tmp_path)
    model = ("generate", "--model", tmp_path / "model")
    words = (*model, "--prompt", "1+2=", "3+4=", "--n", 2, "--temperature", 0.5, "--top-k", 5, "--max-tokens", 8)
    assert typed(capsys, *words, "--seed", 3, "--no-chat-template", "--json")[0] == 0
    request = asked.request
    assert isinstance(request, GenerateRequest) and request.prompts == ("1+2=", "3+4=")
    assert (request.sampling.n, request.sampling.temperature, request.sampling.top_k) == (2, 0.5, 5)
    assert (request.max_tokens, request.seed, request.apply_chat_template, request.as_json) == (8, 3, False, True)
    code, _, err = typed(capsys, *model, "--prompt", "a", "--top-p", 2)
    assert code == ExitCode.BAD_INPUT and "--top-p 2.0: input should be less than or equal to 1" in err
    (tmp_path / "latin.txt").write_bytes(b"a\xe9")
    code, _, err = typed(capsys, *model, "--prompts", tmp_path / "latin.txt")
    assert code == ExitCode.BAD_INPUT and "latin.txt: not UTF-8 text (byte 1: " in err
    (tmp_path / "separator.jsonl").write_text('{"prompt": "a\u2028b"}\n')
    assert typed(capsys, *model, "--prompts", tmp_path / "separator.jsonl")[0] == 0
    assert isinstance(asked.request, GenerateRequest) and asked.request.prompts == ("a\u2028b",)
    for name, content, expected in (
        ("p.txt", "a\n\nb\n", None),
        ("bom.txt", "\ufeffa\r\nb\r\n", None),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n', None),
        ("empty.txt", "\n", "empty.txt: holds no prompt"),
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt"\n', "bad.jsonl:2: is not JSON"),
        ("key.jsonl", '{"text": "a"}\n', 'key.jsonl:1: {"text": "a"} has no string under "prompt"'),
    ):
        (tmp_path / name).write_text(content)
        code, _, err = typed(capsys, *model, "--prompts", tmp_path / name)
        assert (code, err) == (0, "") if expected is None else (code == ExitCode.BAD_INPUT and expected in err)
        assert isinstance(asked.request, GenerateRequest)
        assert expected is not None or asked.request.prompts == ("a", "b")
    assert "there is no such file" in typed(capsys, *model, "--prompts", tmp_path / "none.txt")[2]


def test_requests_survive_the_way_to_the_ranks(tmp_path: Path) -> None:
    request = GenerateRequest(model="m", prompts=("ü\n", "b"))
    assert Command.of(request) is Command.GENERATE
    assert Command.GENERATE.request.model_validate_json(request.model_dump_json()) == request


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train", "f.yaml", "--nprocs-per-node", "2"], "unrecognized arguments: --nprocs-per-node"),
        (["train", "f.yaml", "--nproc", "0"], "0 is less than 1"),
        (["convert", "--from", "a"], "--to"),
        (["generate", "--model", "m"], "--prompt"),
    ],
)
def test_words_that_are_no_command(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(words)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


def test_missing_file_has_no_traceback() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "megappo", "train", "none.yaml"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr == (
        "error: none.yaml does not exist; give the path of an experiment file such as yaml/demo_cpu.yaml\n"
    )
