"""tools/gpu_multi.sh with a stand-in nvidia-smi and a stand-in Python: each part's commands, the table, the limits."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.load import load_experiment
from megappo.config.problem import Severity
from megappo.engines.hybrid.layout_text import parse_layout
from tests.support.ranks import ROOT
from tests.support.tools import load_tool

NVIDIA_SMI = """#!/bin/sh
case "$1" in
    --list-gpus) for gpu in $(seq "$GPUS"); do echo "GPU $gpu"; done ;;
    *) for gpu in $(seq "$GPUS"); do echo "Some GPU"; done ;;
esac
"""
# The time limit is the real one where asked; all else writes down what it was asked, and does what DO says of it.
PYTHON = f"""#!/bin/sh
if [ "$1" = tools/limited.py ]; then
    [ -z "$REAL_LIMIT" ] || exec {sys.executable} "$@"
    shift 2
    exec "$@"
fi
printf '%s %s\\n' "$CUDA_VISIBLE_DEVICES" "$*" >>"$ASKED"
case "$*" in
    *"-m pytest"*) echo "3 passed in 5.00s" ;;
    *) echo "summary: figures of $1" ;;
esac
for word in "$@"; do
    case "$word" in trainer.run_dir=*)
        mkdir -p "${{word#*=}}"
        echo '{{ "state": "done" }}' >"${{word#*=}}/status.json" ;;
    esac
done
eval "$DO"
"""


@dataclass(frozen=True)
class Called:
    code: int
    out: str
    err: str
    commands: list[list[str]]
    """Of each: the visible GPUs, then the words."""
    table: str

    def of(self, *words: str) -> list[list[str]]:
        """The commands that have all of these words."""
        return [command for command in self.commands if set(words) <= set(command)]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    for name, text in {"bin/nvidia-smi": NVIDIA_SMI, "bin/python": PYTHON}.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    for name in ("model/config.json", "data/train.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    return tmp_path


KNOBS = ("CUDA_VISIBLE_DEVICES", "PARTS", "LIMIT", "MEGAPPO_RANKS_PER_GPU")


def environment(scratch: Path, gpus: int, do: str = ":", **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in KNOBS}
    return kept | {
        "PATH": f"{scratch / 'bin'}:{os.environ['PATH']}", "PYTHON": str(scratch / "bin" / "python"), "DO": do,
        "GPUS": str(gpus), "ASKED": str(scratch / "asked"), "OUT": str(scratch / "out"),
        "MODEL": str(scratch / "model"), "DATA": str(scratch / "data"),
    } | more  # fmt: skip


def call(scratch: Path, gpus: int, *arguments: str, do: str = ":", **more: str) -> Called:
    ended = subprocess.run(
        ["tools/gpu_multi.sh", *arguments], cwd=ROOT, env=environment(scratch, gpus, do, **more),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    asked, table = scratch / "asked", scratch / "out" / "table.md"
    commands = [shlex.split(line) for line in asked.read_text().splitlines()] if asked.exists() else []
    asked.unlink(missing_ok=True)
    return Called(ended.returncode, ended.stdout, ended.stderr, commands, table.read_text() if table.exists() else "")


def after(command: list[str], option: str) -> list[str]:
    """The words between an option and the next one."""
    rest = command[command.index(option) + 1 :]
    return rest[
        : next(
            (place for place, word in enumerate(rest) if word.startswith("--") or re.match(r"[a-z]+\.[\w.]+=", word)),
            len(rest),
        )
    ]


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_all_parts(scratch: Path, gpus: int) -> None:
    called = call(scratch, gpus)
    everything = ",".join(map(str, range(gpus)))
    assert called.code == 0, called.out + called.err
    rows = re.findall(r"^\| ([\w.-]+) \| \d+ \| 0 \| (.+) \|$", called.table, re.MULTILINE)
    assert [name for name, _ in rows] == [
        "shape-1.5b", "shape-7b", "shape-30b", "tests-vllm", "tests", "parity", "lost", "switch", "switch-experts",
        "step-one", "lora-one", "learn-one", "step", "lora", "vllm", "experts", "learn-dp", "learn-pp", "learn",
    ]  # fmt: skip
    assert dict(rows)["parity"] == "3 passed in 5.00s" and dict(rows)["step"] == "figures of tools/bench_step.py"
    assert f"# {gpus} GPUs:  {gpus} Some GPU" in called.table and called.out.strip() == called.table.strip()
    # One GPU's runs, some of them side by side, see a GPU of their own each; all other parts see all.
    singles = [command for command in called.commands if command[0] != everything]
    assert sorted((command[0], command[1]) for command in singles) == [
        *[("0", "tools/bench_step.py")] * 2, *[("0", "tools/bench_vllm.py")] * 3, ("1", "-m")
    ]  # fmt: skip
    check_shapes(called)
    for command in called.of("tools/bench_step.py"):
        check_layouts(command, scratch, gpus)
    for command in called.of("tools/bench_reshard.py"):
        check_switches(command, gpus)
    check_learning(called, gpus)


def check_shapes(called: Called) -> None:
    words = ["--utilization", "0.15", "--tokens", "64", "--rounds", "200", "--seconds", "210"]
    commands = called.of("tools/bench_vllm.py", *words)
    assert [after(command, "--shape") for command in commands] == [["qwen2.5-1.5b"], ["qwen2.5-7b"], ["qwen3-30b-a3b"]]
    assert [after(command, "--cores") if "--cores" in command else [] for command in commands] == [["2"], [], []]


def test_one_gpu_shows_what_needs_no_second(scratch: Path) -> None:
    called = call(scratch, 1)
    assert called.code == 0, called.out + called.err
    rows = re.findall(r"^\| ([\w.-]+) \| \d+ \| 0 \| (.+) \|$", called.table, re.MULTILINE)
    assert [name for name, _ in rows] == ["shape-1.5b", "shape-7b", "shape-30b", "tests-vllm", "tests", "experts"]
    assert {command[0] for command in called.commands} == {"0"}
    check_shapes(called)
    (experts,) = called.of("tools/bench_step.py", "--experts", "16", "rollout.tensor_model_parallel_size=1")
    check_layouts(experts, scratch, 1)
    assert after(experts, "--layouts") == ["ep=1,dp=1"]
    tested = [command for command in called.commands if "pytest" in command]
    assert [[word for word in command if word.startswith("tests/")] for command in tested] == [
        ["tests/gpu/test_vllm.py"], ["tests/gpu", "tests/gpu/test_vllm.py", "tests/gpu/test_many_gpus.py"]
    ]  # fmt: skip
    for command in tested:
        assert all((ROOT / word).exists() for word in command if word.startswith("tests/"))
    assert tested[1].count("--ignore") == 2


def check_layouts(command: list[str], scratch: Path, gpus: int) -> None:
    """Every layout of whole steps is one that the experiment takes, on all GPUs, or on the one to compare with."""
    bench, given = load_tool("bench_step"), command[2:]
    layouts, shape = after(command, "--layouts"), after(command, "--shape")[0]
    overrides = [word for word in given if "=" in word and word not in layouts and "." in word]
    options = bench.argparse.Namespace(
        shape=shape, prompts=32, **{
            name: int(after(command, f"--{name}")[0]) if f"--{name}" in command else None
            for name in ("layers", "experts")
        }, lengths=[64, 32], micro_batch=8, steps=3,
        overrides=overrides,
    )  # fmt: skip
    file = scratch / shape / "experiment.yaml"
    if not file.exists():
        assert bench.random_run.write_experiment(scratch / shape, options) == file
    used = {bench.num_ranks(layout) for layout in layouts}
    assert used <= {1, gpus} and (command[0] != "0" or used == {1})
    for layout in layouts:
        config = load_experiment(file, [*bench.words_of(options, layout), f"trainer.run_dir={scratch}/run"])
        problems = check_experiment(config, bench.num_ranks(layout))
        errors = [problem.text({}) for problem in problems if problem.severity is Severity.ERROR]
        assert not errors, (layout, errors)


def check_switches(command: list[str], gpus: int) -> None:
    cases = [word for word in command if re.fullmatch(r"[\d@ep-]+:[\d,]+", word)]
    assert len(cases) >= 1
    for case in cases:
        layout, _, sizes = case.partition(":")
        grid = parse_layout(layout)
        assert grid.world_size == gpus and all(gpus % int(size) == 0 for size in sizes.split(","))
        if "qwen2.5-1.5b" in command:  # 28 layers, 12 heads
            assert 28 % grid.pp == 0 and 12 % grid.tp == 0 and all(12 % int(size) == 0 for size in sizes.split(","))


def check_learning(called: Called, gpus: int) -> None:
    """Three runs of the same steps, each with all sizes of its layout, and their comparison."""
    runs = called.of("megappo", "train", "yaml/gsm8k_smollm2_gpu.yaml")
    sizes = [{word for word in run if word.startswith("layout.") and "split" not in word} for run in runs]
    assert sizes == [{"layout.tp=1", f"layout.pp={pp}", f"layout.dp={dp}"} for pp, dp in ((1, 1), (1, gpus), (gpus, 1))]
    for run in runs:
        words = [word for word in run if "=" in word and not word.startswith("model.path")]
        config = load_experiment(ROOT / "yaml" / "gsm8k_smollm2_gpu.yaml", words)
        assert (config.data.train_batch_size, config.rollout.n, config.trainer.total_steps) == (64, 8, 20)
    (compared,) = called.of("tools/compare_runs.py")
    assert [Path(word).name for word in compared[2:5]] == ["one", "dp", "pp"]


def test_parts_alone_and_a_second_call(scratch: Path) -> None:
    assert [command[1] for command in call(scratch, 2, PARTS="switch").commands] == ["tools/bench_reshard.py"] * 2
    later = call(scratch, 2, "2", "pp=2", PARTS="step", SHAPE="tiny-qwen3")
    (step,) = later.commands
    assert after(step, "--layouts") == ["tp=1", "pp=2"] and after(step, "--shape") == ["tiny-qwen3"]
    assert "| switch |" in later.table and "| step |" in later.table  # what an earlier call has shown stays
    first, again = (call(scratch, 2, PARTS="learn") for _ in range(2))
    assert len(first.of("train")) == 3 and not again.of("train") and again.of("tools/compare_runs.py")


def test_a_part_that_fails_or_hangs_is_told_and_the_others_go_on(scratch: Path) -> None:
    do = 'case "$*" in *reshard*experts*|*a3b*) echo "no such GPU"; exit 7 ;; *"-k lost"*) echo half; sleep 60 ;; esac'
    called = call(scratch, 2, do=do, PARTS="lost switch", LIMIT="2", REAL_LIMIT="1")
    assert called.code == 2
    rows = dict(re.findall(r"^\| ([\w.-]+) \| \d+ \| (\d+ \| .+) \|$", called.table, re.MULTILINE))
    assert rows["lost"].startswith("124 | cut off after 2 s<br>") and rows["switch-experts"].startswith("7 |")
    assert rows["switch"] == "0 | figures of tools/bench_reshard.py"
    assert "no such GPU" in called.table and "half" in (scratch / "out" / "lost.log").read_text()


def test_the_table_leaves_out_what_says_nothing(scratch: Path) -> None:
    bar = r"printf 'Loading: 0%%| 0/5 [?, ?it/s]\rLoading: 100%%| 5/5 [00:01<00:00, 5.1it/s]\nbytes 7\nWARNING later\n'"
    called = call(scratch, 2, PARTS="switch", do=bar)
    section = called.table[called.table.index("## switch\n") : called.table.index("## switch-experts\n")]
    assert section == "## switch\n\n```\nsummary: figures of tools/bench_reshard.py\nbytes 7\n```\n\n"


def test_experts_are_generated_without_graphs_where_graphs_fail(scratch: Path) -> None:
    words = ["--shape", "qwen3-30b-a3b", "--experts", "16", "--layers", "12", "ep=2,dp=2", "rollout.engine=vllm"]
    words += ["rollout.gpu_memory_utilization=0.4"]
    called = call(scratch, 2, PARTS="experts")
    (graphs,) = called.of("tools/bench_step.py", *words, "rollout.tensor_model_parallel_size=2")
    assert called.code == 0 and "rollout.enforce_eager=true" not in graphs and "| experts-eager |" not in called.table
    assert after(graphs, "--metrics") == [
        "hybrid/bytes_aliased", "hybrid/bytes_copied", "hybrid/probe_diff_mean", "rollout/log_prob_diff_mean"
    ]  # fmt: skip
    called = call(scratch, 2, PARTS="experts", do='case "$*" in *enforce_eager=true*) ;; *) exit 9 ;; esac')
    assert called.code == 1 and len(called.of("tools/bench_step.py")) == 2
    assert len(called.of("tools/bench_step.py", *words, "rollout.enforce_eager=true")) == 1
    assert re.search(r"^\| experts \| \d+ \| 9 \|", called.table, re.MULTILINE)
    assert re.search(r"^\| experts-eager \| \d+ \| 0 \| figures of", called.table, re.MULTILINE)


@pytest.mark.parametrize("do", ["sleep 60", 'echo "ep=2,dp=2: cut off after 270 s"; exit 1'])
def test_experts_that_were_cut_off_are_not_tried_again_without_graphs(scratch: Path, do: str) -> None:
    called = call(scratch, 2, do=f'case "$*" in *bench_step*) {do} ;; esac', PARTS="experts", LIMIT="2", REAL_LIMIT="1")
    assert called.code == 1 and len(called.of("tools/bench_step.py")) == 1 and "experts-eager" not in called.table


def test_ranks_that_share_a_gpu_show_what_does_not_depend_on_it(scratch: Path) -> None:
    called = call(scratch, 1, "2", MEGAPPO_RANKS_PER_GPU="2")
    assert called.code == 0, called.out + called.err
    rows = re.findall(r"^\| ([\w.-]+) \| \d+ \| 0 \| (.+) \|$", called.table, re.MULTILINE)
    assert [name for name, _ in rows] == [
        "parity", "lost", "switch", "switch-experts", "learn-one", "vllm", "experts", "learn-dp", "learn-pp", "learn"
    ]  # fmt: skip
    assert called.table.startswith("# 2 ranks that share GPUs:  1 Some GPU")
    assert {command[0] for command in called.commands} == {"0"}
    check_learning(called, 2)
    of_vllm = called.of("tools/bench_step.py", "rollout.engine=vllm", "rollout.gpu_memory_utilization=0.15")
    assert [after(command, "--layouts") for command in of_vllm] == [["tp=2,sequence_parallel=true"], ["ep=2,dp=2"]]
    assert [after(command, "--steps") for command in of_vllm] == [["10"], ["2"]]
    assert not [command for command in of_vllm if "--flat-mib" in command]  # of the whole GPU, not of a rank


def test_without_model_or_data_learning_is_told_as_missing(scratch: Path) -> None:
    called = call(scratch, 2, PARTS="learn", DATA=str(scratch / "elsewhere"))
    assert called.code == 1 and not called.commands and "not run: " in called.table


def test_a_signal_ends_what_runs_and_leaves_the_table(scratch: Path) -> None:
    process = subprocess.Popen(
        ["tools/gpu_multi.sh"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(scratch, 2, do='echo $$ >"$OUT/pid.$$"; sleep 60', PARTS="single", REAL_LIMIT="1"),
    )  # fmt: skip
    end = time.monotonic() + 60
    while len(pids := list((scratch / "out").glob("pid.*"))) < 2:  # step-one and learn-one, side by side
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "| step-one | - | - | interrupted" in out
    assert not [pid for pid in pids if Path("/proc", pid.suffix[1:]).exists()]


@pytest.mark.parametrize(
    ("gpus", "parts", "why"),
    [
        (1, "step", "step needs two GPUs or more, and was given 1; for one there are: shapes tests experts"),
        (0, "shapes", "needs a GPU, and was given 0"),
        (2, "stepp", "there is no part stepp"),
    ],
)
def test_refused(scratch: Path, gpus: int, parts: str, why: str) -> None:
    called = call(scratch, gpus, PARTS=parts)
    assert called.code == 2 and why in called.err and not called.commands
