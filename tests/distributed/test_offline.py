"""Supervised training, reward models and DPO: every layout gives the one-rank curve; values are transformers'."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.distributed.programs.offline import ANSWERS
from tests.support.parity import largest_difference
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model, tiny_tokenizer

EXPERIMENT = """\
model: {{path: {folder}/policy, dtype: float32, layers: torch}}
data:
  train_files: [{folder}/pairs.jsonl]
  val_files: [{folder}/held_out.jsonl]
  train_batch_size: 4
  max_prompt_length: 40
  max_response_length: 12
  response_key: chosen
actor: {{ppo_micro_batch_size_per_gpu: 2, optim: {{lr: 1.0e-3}}}}
dpo: {{beta: 0.2}}
trainer: {{run_dir: {folder}/unused, total_steps: 4, save_last: false, export_hf: true}}
observe: {{tensorboard: false, console: false}}
"""
KINDS = {
    "sft": "trainer.kind=sft,data.val_files=[]",
    "reward_model": "trainer.kind=reward_model,model.path={folder}/classifier",
    "dpo": "trainer.kind=dpo",
}
IPO = "trainer.kind=dpo,dpo.loss_type=ipo,trainer.total_steps=1,trainer.export_hf=false"
PACKED = "model.use_remove_padding=true"
TWO_RANKS = {
    "dp2": "",
    "tp2": f"layout.tp=2,layout.sequence_parallel=true,{PACKED}",
    "pp2": f"layout.pp=2,{PACKED}",
    "dp2-fsdp": "actor.fsdp.enable=true,ref.fsdp.enable=true",
}
CONTEXT_RANKS = {"cp2": "layout.cp=2", "cp2-a2a": f"layout.cp=2,model.cp_comm_type=a2a,{PACKED}"}
EIGHT_RANKS = {
    "tp2-pp2-dp2": "layout.tp=2,layout.pp=2,layout.sequence_parallel=true,actor.ppo_micro_batch_size_per_gpu=1"
}
MEASURED = ("time/", "perf/", "wall_time")
CURVE_LIMIT = 1e-5
WEIGHT_LIMIT = 1e-3


class Results:
    """What the program left: `told[name]`, and folders."""

    def __init__(self, folder: Path, told: dict[str, Any]) -> None:
        self.folder = folder
        self.told = told

    def curve(self, name: str) -> list[dict[str, float]]:
        return [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in self.told[name]]


def pairs(first: int, count: int) -> list[dict[str, str]]:
    numbers = range(first, first + count)
    return [
        {"prompt": "add " * (1 + n % 3) + str(n), "chosen": str(n + 1) * (1 + n % 2), "rejected": "no" * (1 + n % 4)}
        for n in numbers
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    tiny_tokenizer(tiny_model(folder / "policy", "qwen3", tied=True))
    tiny_tokenizer(tiny_model(folder / "classifier", "llama", value_head=True, seed=1))
    for name, first, count in (("pairs", 0, 14), ("held_out", 50, 5)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(first, count)))
    (folder / "experiment.yaml").write_text(EXPERIMENT.format(folder=folder))
    return folder


def run(folder: Path, runs: dict[str, str], nproc: int) -> Results:
    words = [f"{name}={overrides}" for name, overrides in runs.items()]
    told = run_ranks(
        "tests.distributed.programs.offline", "--config", folder / "experiment.yaml", "--folder", folder,
        "--runs", *words, nproc=nproc,
    )  # fmt: skip
    return Results(folder, told)


def runs_of(folder: Path, layout: str, overrides: str) -> dict[str, str]:
    return {
        f"{kind}-{layout}": ",".join(filter(None, [settings.format(folder=folder), overrides]))
        for kind, settings in KINDS.items()
    }


@pytest.fixture(scope="module")
def one(folder: Path) -> Results:
    runs = runs_of(folder, "one", "") | {"ipo-one": IPO}
    tiny_model(folder / "larger", "qwen3", vocab_size=192, seed=2)
    runs["dpo-larger"] = f"trainer.kind=dpo,ref.path={folder}/larger,trainer.total_steps=1"
    # The same run in two parts, the second of which goes on from the first one's checkpoint.
    parts = KINDS["reward_model"].format(folder=folder)
    runs["parts"] = f"{parts},trainer.total_steps=2,trainer.save_last=true,trainer.export_hf=false"
    runs["parts+resumed"] = f"{parts},trainer.resume=auto,trainer.save_last=true"
    runs |= {
        "score:classifier": "",
        "score:reward_model-one/run/hf/latest": "",
        "score:parts/run/checkpoints/latest": "",
    }
    return run(folder, runs, 1)


@pytest.fixture(scope="module")
def two(folder: Path, one: Results) -> Results:
    runs: dict[str, str] = {}
    for layout, overrides in TWO_RANKS.items():
        runs |= runs_of(folder, layout, overrides)
    runs["score:classifier"] = ""
    return run(folder, runs, 2)


def assert_same(results: Results, one: Results, kind: str, layout: str) -> None:
    ours, reference = results.curve(f"{kind}-{layout}"), one.curve(f"{kind}-one")
    assert [line["step"] for line in ours] == [line["step"] for line in reference]
    for mine, expected in zip(ours, reference, strict=True):
        assert mine.keys() == expected.keys()
        for name, value in expected.items():
            if kind == "dpo" and mine["step"] <= 1 and name.endswith("accuracy"):
                continue  # policy and reference are the same: rounding decides
            assert mine[name] == pytest.approx(value, rel=CURVE_LIMIT, abs=CURVE_LIMIT), (name, mine["step"])
    name = "classifier" if kind == "reward_model" else "policy"
    folders = (one.folder / f"{kind}-{which}" / "run" / "hf" / "latest" for which in (layout, "one"))
    worst = largest_difference(*folders, origin=one.folder / name)
    assert worst.relative <= WEIGHT_LIMIT, worst


@pytest.mark.parametrize("layout", TWO_RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_curve_of_one(two: Results, one: Results, kind: str, layout: str) -> None:
    assert_same(two, one, kind, layout)


@pytest.mark.slow
def test_eight_ranks_give_the_curve_of_one(folder: Path, one: Results) -> None:
    (layout, overrides) = next(iter(EIGHT_RANKS.items()))
    eight = run(folder, runs_of(folder, layout, overrides), 8)
    for kind in KINDS:
        assert_same(eight, one, kind, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", CONTEXT_RANKS)
def test_context_parallel_ranks_give_the_curve_of_one(folder: Path, one: Results, layout: str) -> None:
    two = run(folder, runs_of(folder, layout, CONTEXT_RANKS[layout]) | {"score:classifier": "layout.cp=2"}, 2)
    for kind in KINDS:
        assert_same(two, one, kind, layout)
    assert two.told["score:classifier"]["scores"] == pytest.approx(one.told["score:classifier"]["scores"], abs=1e-5)


def test_a_resumed_run_gives_the_curve_of_a_whole_one(one: Results) -> None:
    whole, resumed = one.curve("reward_model-one"), one.curve("parts+resumed")
    # The first part evaluates after its last step, the whole run does not.
    trained = [{key: value for key, value in line.items() if not key.startswith("eval/")} for line in resumed]
    assert trained[3:] == [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in whole[3:]]
    assert resumed[-1] == whole[-1]


def test_a_model_that_has_learned_nothing_is_indifferent(one: Results) -> None:
    """At the first step, policy and reference are the same: the loss is log 2, IPO's is 1 / (2 β)²."""
    first = one.curve("dpo-one")[1]
    assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["dpo/margin"] == pytest.approx(0.0, abs=1e-6)
    assert one.curve("ipo-one")[1]["dpo/loss"] == pytest.approx(1 / 0.4**2, rel=1e-5)
    assert one.curve("dpo-one")[0]["eval/held_out/loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_preferences_are_learned(one: Results) -> None:
    for kind in ("reward_model", "dpo"):
        before, *_, after = one.curve(f"{kind}-one")
        assert after["eval/held_out/loss"] < before["eval/held_out/loss"] - 0.02
        assert after[f"{kind}/grad_norm"] > 0


@torch.no_grad()
@pytest.mark.parametrize(("name", "start"), [("dpo-one", "policy"), ("dpo-larger", "larger")])
def test_dpo_evaluates_as_transformers_does(one: Results, name: str, start: str) -> None:
    """The exported policy and the reference, in float64; the larger reference has 192 tokens, the policy 128."""
    policy, reference = (language_model(one.folder / path) for path in (f"{name}/run/hf/latest", start))
    differences = []
    for row in pairs(50, 5):
        sums = [
            float(response_log_prob(model, one.folder, row["prompt"], row[key]))
            for key in ("chosen", "rejected")
            for model in (policy, reference)
        ]
        differences.append((sums[0] - sums[1]) - (sums[2] - sums[3]))
    margins = 0.2 * torch.tensor(differences)
    assert_evaluation(one.curve(name)[-1], margins)


@torch.no_grad()
def test_a_reward_model_scores_as_transformers_does(one: Results, two: Results) -> None:
    folder = one.folder / "reward_model-one" / "run" / "hf" / "latest"
    scores = [[hf_score(folder, row["prompt"], row[key]) for row in pairs(50, 5)] for key in ("chosen", "rejected")]
    assert_evaluation(one.curve("reward_model-one")[-1], torch.tensor(scores[0]) - torch.tensor(scores[1]))
    for name, path in (("classifier", one.folder / "classifier"), ("reward_model-one/run/hf/latest", folder)):
        expected = [hf_score(path, question, answer) for question, answer, _ in ANSWERS if len(answer) < 600]
        expected.insert(3, -9.0)
        told = one.told[f"score:{name}"]
        assert told["scores"] == pytest.approx(expected, abs=1e-5)
        assert told["failed"] == ["the conversation has 620 tokens, the reward model was made for 512"]
    assert two.told["score:classifier"]["scores"] == pytest.approx(one.told["score:classifier"]["scores"], abs=1e-5)
    # A checkpoint of the run is the folder that it exports.
    checkpoint = one.told["score:parts/run/checkpoints/latest"]["scores"]
    assert checkpoint == pytest.approx(one.told["score:reward_model-one/run/hf/latest"]["scores"], abs=1e-5)


def assert_evaluation(line: dict[str, float], margins: torch.Tensor) -> None:
    assert line["eval/held_out/margin"] == pytest.approx(float(margins.mean()), abs=1e-5)
    assert line["eval/held_out/loss"] == pytest.approx(float(-logsigmoid(margins).mean()), abs=1e-5)
    assert line["eval/held_out/accuracy"] == pytest.approx(float((margins > 0).double().mean()))


def language_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def response_log_prob(model: Any, folder: Path, prompt: str, response: str) -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    text = f"user: {prompt}\nassistant: "  # the template of tests/support/tiny_models.py
    start = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = [*start, *tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    chosen = log_probs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return chosen[len(start) - 1 :].sum()


def hf_score(folder: Path, question: str, answer: str) -> float:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    return float(model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0, 0])


@pytest.mark.slow
def test_dpo_from_an_adapter_begins_at_ln_2_against_the_merged_model(folder: Path) -> None:
    """PEFT's adapter and its merge; against the model without adapters, as is warned of, it begins elsewhere."""
    peft = pytest.importorskip("peft")
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj"]))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(generator=generator)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "merged")
    words = f"{KINDS['dpo']},model.lora.rank=2,model.lora.adapter_path={folder}/adapter"
    words += ",model.lora.target_modules=[q_proj],trainer.total_steps=1,trainer.export_hf=false"
    results = run(folder, {"merged": f"{words},ref.path={folder}/merged", "plain": words}, 1)
    (merged,), (plain,) = ([line for line in results.told[name] if line["step"] == 1] for name in ("merged", "plain"))
    assert merged["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(plain["dpo/loss"] - math.log(2)) > 1e-2
