"""Rules across sections: each message, and that what is allowed passes."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

from pathlib import Path

import pytest

from megappo.cli.model_arguments import model_facts
from megappo.config.checks import check_experiment, data_parallel_size, require_sound
from megappo.config.load import load_experiment
from megappo.config.problem import Severity
from megappo.errors import ConfigError
from tests.support.experiments import small_experiment, write_experiment


def found(folder: Path, *overrides: str, world_size: int | None = None, more: str = "", **model: object) -> list[str]:
    """`error …` and `warning …` lines of the small experiment."""
    config = load_experiment(write_experiment(folder, more, **model), overrides)
    return [f"{problem.severity.value} {problem.text()}" for problem in check_experiment(config, world_size)]


def test_the_small_experiment_is_sound(tmp_path: Path) -> None:
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["reward=null"], "error reward: is missing, and trainer.kind ppo learns from it"),
        (["trainer.total_steps=null"], "error trainer.total_steps: the length of the run is missing"),
        (["actor.ppo_mini_batch_size=5"], "error actor.ppo_mini_batch_size: 5: does not divide data.train_batch_size 12; nearest that can: 4 or 6"),
        (["actor.ppo_mini_batch_size=64"], "error actor.ppo_mini_batch_size: 64: does not divide data.train_batch_size 12; nearest that can: 12"),
        (["layout.dp=4"], "error actor.ppo_mini_batch_size: 6: times rollout.n 1 gives 6 sequences, which don't divide over dp 4; nearest that can: 4 or 12"),
        (["layout.dp=5"], "error data.train_batch_size: 12: times rollout.n 1 gives 12 sequences, which don't divide over dp 5; nearest that can: 10 or 15"),
        (["actor.ppo_micro_batch_size_per_gpu=4"], "error actor.ppo_micro_batch_size_per_gpu: 4: does not divide the 6 sequences that a minibatch has on each of 1 data-parallel ranks; nearest that can: 3 or 6"),
        (["critic.ppo_mini_batch_size=8"], "error critic.ppo_mini_batch_size: 8: does not divide data.train_batch_size 12; nearest that can: 6 or 12"),
        (["critic.ppo_micro_batch_size_per_gpu=4"], "error critic.ppo_micro_batch_size_per_gpu: 4: does not divide the 6 sequences"),
        (["critic.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=3"], "error actor.ppo_micro_batch_size_per_gpu: 3: does not divide the 2 sequences"),
        (["trainer.kind=sft", "layout.dp=5"], "error data.train_batch_size: 12: does not divide over dp 5; nearest that can: 10 or 15"),
        (["trainer.kind=sft", "actor.ppo_micro_batch_size_per_gpu=5"], "error actor.ppo_micro_batch_size_per_gpu: 5: does not divide the 12 sequences of a step on each of 1 data-parallel ranks; nearest that can: 4 or 6"),
        (["layout.sequence_parallel=true"], "error layout.sequence_parallel: true: shards activations over the tensor-parallel ranks, and layout.tp is 1"),
        (["layout.tp=5"], "error layout.tp: 5: does not divide the 12 attention heads (3 KV heads) of"),
        (["layout.tp=4"], "nearest that can: 3 or 6"),  # 12 heads divide, 3 KV heads neither divide nor are divided
        (["layout.pp=4"], "error layout.pp: 4: does not divide the 6 layers of"),
        (["layout.tp=3", "rollout.tensor_model_parallel_size=2"], "error rollout.tensor_model_parallel_size: 2: replicas of 2 ranks can't be laid over tp 3 · pp 1 · dp 1 without cutting a shard unevenly; possible: 1, 3"),
        (["layout.dp=2", "rollout.tensor_model_parallel_size=4"], "error rollout.tensor_model_parallel_size: 4: replicas of 4 ranks can't be laid over tp 1 · pp 1 · dp 2 without cutting a shard unevenly; possible: 1, 2"),
        (["layout.dp=4", "actor.ppo_mini_batch_size=12", "rollout.tensor_model_parallel_size=4"], "error rollout.tensor_model_parallel_size: 4: does not divide the 12 attention heads (3 KV heads) of"),
        (["rollout.pipeline_micro_batches=2"], "error rollout.pipeline_micro_batches: 2: layout.pp is 1, so that there are no stages for groups to follow each other through; 1, or leave it out"),
        (["rollout.pipeline_micro_batches=2", "rollout.engine=vllm"], "error rollout.pipeline_micro_batches: 2: cuts steps of the native engine, and rollout.engine is vllm, whose replicas have no stages; leave it out"),
        (["rollout.pipeline_micro_batches=2", "layout.pp=2", "rollout.tensor_model_parallel_size=1"], "error rollout.pipeline_micro_batches: 2: replicas in a layout of their own (rollout.tensor_model_parallel_size, layout.ep over 1) have no stages for groups to follow each other through; 1, or leave it out"),
        (["rollout.pipeline_micro_batches=3", "layout.pp=2", "rollout.max_num_seqs=2"], "error rollout.pipeline_micro_batches: 3: each group needs a sequence, and rollout.max_num_seqs is 2; 2 or less"),
        (["hybrid.weights=load"], 'warning hybrid.weights: "load": does nothing, for rollout.engine is native, which always takes the shards; leave it out'),
        (["data.max_response_length=49"], "error data.max_response_length: 49: with data.max_prompt_length 16 a sequence has 65 tokens"),
        (["data.max_response_length=49"], "at most 48"),
        (["data.train_files=[nowhere/a.jsonl]"], 'error data.train_files.0: "nowhere/a.jsonl": there is no folder nowhere; give a JSONL'),
        (["data.val_files=[a.jsonl]"], 'error data.val_files.0: "a.jsonl": there is no such file in'),
        (["model.path=nowhere"], 'error model.path: "nowhere": there is no such folder'),
        (["critic.path=nowhere"], 'error critic.path: "nowhere": there is no such folder'),
        (["critic.path=nowhere", "algorithm.adv_estimator=rloo", "rollout.n=2"], 'warning critic.path: "nowhere": is never read'),
        (["ref.path=nowhere", "actor.use_kl_loss=true"], 'error ref.path: "nowhere": there is no such folder'),
        (["model.tokenizer_path=nowhere"], 'error model.tokenizer_path: "nowhere": there is no such file'),
        (["trainer.resume=nowhere"], 'error trainer.resume: "nowhere": there is no such file'),
        (["reward.parts.0.kind=function"], "error reward.parts.0.function: is missing, and kind function needs it; for example my_rewards:short_answer"),
        (["reward.parts.0.function=a:b"], 'error reward.parts.0.function: "a:b": kind exact_match takes no function'),
        (["reward.parts=[{name: a, kind: function, function: a.b}]"], 'error reward.parts.0.function: "a.b": has to be of the form module:function'),
        (["reward.parts=[{name: a, kind: gsm8k}, {name: a, kind: exact_match}]"], 'error reward.parts.1.name: "a": another part has this name; for example a_1'),
        (["data.answer_key=null"], 'error reward.parts.0.kind: "exact_match": kind exact_match compares with an answer, and data.answer_key is null'),
        (["data.system_prompt=hi", "data.apply_chat_template=false"], 'error data.system_prompt: "hi": needs a chat template'),
        (["data.prompt_template=Q"], 'error data.prompt_template: "Q": has no place for the prompt; for example "Q: {prompt}"'),
        (["actor.optim.lr_warmup_steps=9", "actor.optim.lr_decay_steps=9", "actor.optim.lr_scheduler_type=cosine"], "error actor.optim.lr_warmup_steps: 9: the rate would still rise"),
        (["data.seed=4294967296"], "error data.seed: 4294967296: has to be less than 2^32; for example 0"),
        (["critic.optim.betas=[1.5, 0.9]"], "error critic.optim.betas: [1.5, 0.9]: a decay rate has to be at least 0 and less than 1; for example [0.9, 0.95]"),
        (["actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"], "warning actor.use_kl_loss: true: KL counts twice"),
        (["algorithm.kl_ctrl.type=adaptive"], 'warning algorithm.kl_ctrl.type: "adaptive": does nothing'),
        (["ref.path=nowhere"], 'warning ref.path: "nowhere": the reference is never read'),
        (["actor.loss_scale_length=9"], "warning actor.loss_scale_length: 9: does nothing, for actor.loss_agg_mode and critic.loss_agg_mode are token-mean; set a mode to seq-mean-token-sum-norm, or leave the length out"),
        (["trainer.test_freq=1"], "warning trainer.test_freq: 1: does nothing, for data.val_files is empty"),
        (["trainer.kind=sft", "reward=null", "data.val_files=['hub:a/b']"], 'warning data.val_files: ["hub:a/b"]: held-out prompts are answered and scored'),
        (["trainer.evaluation.n=4"], "warning trainer.evaluation.n: 4: all responses to a prompt will be the same"),
    ],
)  # fmt: skip
def test_each_rule(tmp_path: Path, overrides: list[str], expected: str) -> None:
    lines = found(tmp_path, *overrides)
    assert len(lines) == 1, lines
    assert expected in lines[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["layout.tp=3"],
        ["layout.tp=6"],  # more ranks than KV heads, in equal parts
        ["layout.tp=12", "layout.sequence_parallel=true"],
        ["layout.pp=3", "layout.dp=2"],
        ["rollout.n=2", "layout.dp=12"],
        ["data.max_response_length=48"],
        ["data.train_files=['hub:openai/gsm8k:main@train']"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k3+", "algorithm.kl_ctrl.type=adaptive"],
        ["critic.ppo_mini_batch_size=3", "critic.ppo_micro_batch_size_per_gpu=3"],
        ["trainer.kind=sft", "reward=null", "actor.ppo_mini_batch_size=5"],
        ["actor.log_prob_micro_batch_size_per_gpu=5"],  # the last of a pass without an update may be smaller
    ],
)
def test_what_is_allowed(tmp_path: Path, overrides: list[str]) -> None:
    assert found(tmp_path, *overrides) == []


def test_split_of_a_saved_data_set(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    assert found(tmp_path, f"data.train_files=['{tmp_path}/saved@train']") == []
    (missing,) = found(tmp_path, f"data.train_files=['{tmp_path}/other@train']")
    assert "there is no such file" in missing


def test_critic_and_reference_know_the_actors_tokens(tmp_path: Path) -> None:
    def other(name: str, vocab_size: int) -> str:
        write_experiment(tmp_path, vocab_size=vocab_size)
        (tmp_path / "model").rename(tmp_path / name)
        return f"{name}.path={tmp_path}/{name}"

    larger, smaller = other("critic", 101), other("ref", 99)
    assert found(tmp_path, larger, vocab_size=100) == []
    (problem,) = found(tmp_path, larger, smaller, "actor.use_kl_loss=true", vocab_size=100)
    assert problem.startswith("error ref.path: ")
    assert "its vocabulary has 99 tokens, and it has to read the 100 of model.path" in problem


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "kl",
    [
        ["actor.use_kl_loss=true", "actor.kl_loss_type=full"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full"],
    ],
)
def test_an_exact_kl_needs_a_reference_with_as_many_tokens(tmp_path: Path, kl: list[str], shared: bool) -> None:
    """`shared`: the critic starts from the same folder, which is read once."""
    write_experiment(tmp_path, vocab_size=101)
    (tmp_path / "model").rename(tmp_path / "larger")
    larger = [f"ref.path={tmp_path}/larger", *([f"critic.path={tmp_path}/larger"] if shared else [])]
    (problem,) = found(tmp_path, *larger, *kl, vocab_size=100)
    assert problem.startswith("error ref.path: ")
    assert "its vocabulary has 101 tokens, and an exact KL (full) needs the 100 of model.path" in problem
    assert "take an estimator such as low_var_kl for actor.kl_loss_type and algorithm.kl_penalty" in problem
    assert found(tmp_path, *larger, *kl, vocab_size=101) == []
    estimated = [word.replace("=full", "=low_var_kl") for word in kl]
    assert found(tmp_path, *larger, *estimated, vocab_size=100) == []


def test_world_size(tmp_path: Path) -> None:
    assert found(tmp_path, "layout.tp=3", world_size=6) == []
    (odd,) = found(tmp_path, "layout.tp=3", world_size=4)
    assert "layout.tp: 3: tp 3 · pp 1 = 3 ranks hold a copy of the model, which does not divide 4 ranks" in odd
    assert (
        "start another number of ranks (nearest that can: 3 or 6), or set another tp (nearest that can: 2 or 4)" in odd
    )
    (other,) = found(tmp_path, "layout.dp=3", world_size=2)
    assert "layout.dp: 3: tp 1 · pp 1 · dp 3 = 3 ranks, and 2 are started; set it to 2, or leave it out" in other
    (uneven,) = found(tmp_path, world_size=4)  # dp follows from the world
    assert "6 sequences, which don't divide over dp 4" in uneven
    config = small_experiment(tmp_path, "layout.tp=3")
    assert [data_parallel_size(config, size) for size in (None, 3, 12)] == [None, 1, 4]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "the folder has no config.json"),
        ("{", "its config.json is not JSON"),
        ('{"model_type": "gpt2"}', "has model_type 'gpt2', which megappo does not build; the families are llama, qwen2, qwen3"),
        ("[]", "has model_type None"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "num_attention_heads 0"),
    ],
)  # fmt: skip
def test_model_folders(tmp_path: Path, content: str | None, expected: str) -> None:
    config = small_experiment(tmp_path)
    file = tmp_path / "model" / "config.json"
    file.unlink() if content is None else file.write_text(content)
    (line,) = [problem.text() for problem in check_experiment(config)]
    assert line.startswith("model.path: ") and expected in line


def test_a_folder_of_adapters_is_no_model(tmp_path: Path) -> None:
    """As `trainer.export_hf` writes it; commands that read a model say the same of it."""
    config = small_experiment(tmp_path)
    folder = tmp_path / "model"
    (folder / "config.json").rename(folder / "adapter_config.json")
    (line,) = [problem.text() for problem in check_experiment(config)]
    reason = "the folder holds low-rank adapters alone, and no model; give a whole model: megappo convert --merged"
    assert reason in line
    with pytest.raises(ConfigError, match=f"--model {folder}: {reason}"):
        model_facts("--model", str(folder))


def test_errors_come_before_warnings_and_raise_together(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "algorithm.kl_ctrl.type=adaptive", "layout.pp=4", "layout.tp=5")
    severities = [problem.severity for problem in check_experiment(config)]
    assert severities == [Severity.ERROR, Severity.ERROR, Severity.WARNING]
    with pytest.raises(ConfigError, match=r"2 mistakes[\s\S]*layout.tp: 5[\s\S]*layout.pp: 4") as caught:
        require_sound(config)
    assert "adaptive" not in str(caught.value)


def test_generation_sizes_that_depend_on_dp_wait_until_it_is_known(tmp_path: Path) -> None:
    overrides = ["rollout.tensor_model_parallel_size=3", "actor.ppo_mini_batch_size=12"]
    assert found(tmp_path, *overrides) == []
    assert found(tmp_path, *overrides, world_size=3) == []
    (problem,) = found(tmp_path, *overrides, world_size=2)
    assert "replicas of 3 ranks can't be laid over tp 1 · pp 1 · dp 2" in problem


@pytest.mark.parametrize(
    ("overrides", "own"),
    [
        ([], False),
        (["layout.tp=3", "rollout.tensor_model_parallel_size=3"], False),
        (["layout.tp=3", "rollout.tensor_model_parallel_size=1"], True),
        (["layout.pp=2"], False),
        (["layout.pp=2", "rollout.tensor_model_parallel_size=1"], True),
        (["layout.ep=2", "layout.dp=2"], True),
    ],
)
def test_when_the_native_engine_needs_a_layout_of_its_own(overrides: list[str], own: bool, tmp_path: Path) -> None:
    assert small_experiment(tmp_path, *overrides).generates_in_own_layout is own
