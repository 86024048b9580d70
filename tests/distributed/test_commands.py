"""`convert`, `generate` and `evaluate` on layouts of experts and copies: the same bits, tokens, scores."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config.layout import LayoutConfig
from megappo.config.load import load_experiment
from megappo.config.requests import Command, ConvertRequest, EvaluateRequest, GenerateRequest, Request
from megappo.config.rollout import EvaluationSampling
from tests.support.parity import read_folder
from tests.support.ranks import run_ranks
from tests.support.runs import write_run_experiment
from tests.support.tiny_models import FamilyName, tiny_model, tiny_tokenizer

WORLD = 4
MODELS: tuple[FamilyName, ...] = ("qwen3_moe", "deepseek_v3", "mixtral")
SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = {
    "ep2": {"ep": 2},
    "tp2-ep2": {**SP, "ep": 2},
    "pp2-ep2": {"pp": 2, "ep": 2},
    "tp2-ep2-etp2": {**SP, "ep": 2, "etp": 2},
}
QUICK = {"qwen3_moe": ("ep2", "tp2-ep2-etp2"), "deepseek_v3": ("tp2-ep2", "pp2-ep2"), "mixtral": ("pp2-ep2", "ep2")}
"""Model → layout that writes a checkpoint, layout that reads it; tests marked `slow` have them all."""
ALL = [(model, pair) for model in MODELS for pair in pairwise([*LAYOUTS, next(iter(LAYOUTS))])]
PROMPTS = ("1+2=", "a", "seven times eight? ", "add 31 and 12: ", "zz")
GENERATED: dict[str, tuple[FamilyName, dict[str, Any]]] = {
    "tp2-dp2": ("deepseek_v3", {"tp": 2}),
    "dp4": ("qwen3_moe", {}),  # two prompts for one replica, one for each other
    "ep2": ("qwen3_moe", {"ep": 2}),  # two replicas
    "ep4": ("qwen3_moe", {"ep": 4}),
    "tp2-ep2-etp2": ("qwen3_moe", LAYOUTS["tp2-ep2-etp2"]),
    "pp2-ep2": ("mixtral", LAYOUTS["pp2-ep2"]),
    "tp2-ep2": ("deepseek_v3", LAYOUTS["tp2-ep2"]),
}
"""On four ranks: name, model, layout."""
GREEDY: dict[str, Any] = {"sampling": EvaluationSampling(), "apply_chat_template": False}
REPLICAS = {"dp4": "4 replicas of 1 rank", "ep2": "2 replicas of 2 ranks", "ep4": "1 replica of 4 ranks"}
Printed = dict[str, list[dict[str, str]]]
"""What each rank printed, by the name of the request."""
EVALUATED = {"dp4": {}, "ep2": {"ep": 2}}
REFUSED = ("too long", "answers of classifier", "answers of judge")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands")
    write_run_experiment(root)
    for family in MODELS:
        tiny_tokenizer(tiny_model(root / family, family, max_shard_size="40KB"))
    tiny_tokenizer(tiny_model(root / "classifier", tied=True, value_head=True))
    (root / "held_out.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "answer": "3"}) + "\n" for text in PROMPTS)
    )
    return root


def carried_out(folder: Path, nproc: int, requests: dict[str, Request]) -> Printed:
    """What each rank printed, by the name of the request."""
    file = folder / f"requests-{nproc}.json"
    named = {name: (Command.of(one).value, one.model_dump(mode="json")) for name, one in requests.items()}
    file.write_text(json.dumps(named))
    found: Printed = run_ranks("tests.distributed.programs.commands", "--requests", file, nproc=nproc)
    return found


def conversions(folder: Path, cases: Iterable[tuple[str, tuple[str, str]]]) -> dict[str, ConvertRequest]:
    """To a checkpoint and back, by the name of the folder that is written."""
    requests = {}
    for model, (writes, reads) in cases:
        to, back = folder / f"{model} {writes}", folder / f"{model} {writes} {reads}"
        layouts = [LayoutConfig.model_validate(LAYOUTS[name]) for name in (writes, reads)]
        requests[to.name] = ConvertRequest(source=str(folder / model), target=str(to), layout=layouts[0])
        requests[back.name] = ConvertRequest(source=str(to), target=str(back), layout=layouts[1])
    return requests


def generation(folder: Path, model: str, layout: dict[str, Any], **settings: Any) -> GenerateRequest:
    sampling = EvaluationSampling(n=2, temperature=0.8)
    values: dict[str, Any] = {"prompts": PROMPTS, "sampling": sampling, "max_tokens": 8, "as_json": True} | settings
    return GenerateRequest(model=str(folder / model), layout=LayoutConfig.model_validate(layout), seed=5, **values)


def evaluation(folder: Path, layout: dict[str, Any]) -> EvaluateRequest:
    words = [f"model.path={folder}/mixtral", "reward.parts=[{name: right, kind: exact_match}]"]
    words += [f"layout.{name}={json.dumps(value)}" for name, value in layout.items()]
    return EvaluateRequest(config=load_experiment(folder / "experiment.yaml", words), model=str(folder / "mixtral"))


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Printed:
    """It answers the held-out prompts too, and so says which answers to three of the five are right."""
    requests: dict[str, Request] = {model: generation(folder, model, {}) for model in MODELS}
    found = carried_out(folder, 1, requests | {"greedy": generation(folder, "mixtral", {}, **GREEDY)})
    rows = [{"prompt": row["prompt"], "answer": row["response"]} for row in answers(found["greedy"])]
    for row in rows[1:3]:
        row["answer"] += "?"
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


@pytest.fixture(scope="module")
def many_ranks(folder: Path, one_rank: Printed) -> Printed:
    requests: dict[str, Request] = {**conversions(folder, QUICK.items())}
    requests |= {f"generated {name}": generation(folder, model, one) for name, (model, one) in GENERATED.items()}
    requests |= {"generated one idle": generation(folder, "mixtral", {}, **GREEDY | {"prompts": PROMPTS[:3]})}
    requests |= {"too long": generation(folder, "qwen3_moe", {}, prompts=("a", "b", "c", "d" * 600))}
    requests |= {f"evaluated {name}": evaluation(folder, one) for name, one in EVALUATED.items()}
    for source, target, layout in (("classifier", "judge", {"pp": 2}), ("judge", "classifier again", {"tp": 2})):
        requests[target] = ConvertRequest(
            source=str(folder / source), target=str(folder / target), layout=LayoutConfig.model_validate(layout)
        )
        requests[f"answers of {source}"] = generation(folder, source, layout)
    return carried_out(folder, WORLD, requests)


def told(printed: Printed, requests: dict[str, ConvertRequest]) -> list[str]:
    """What rank 0 printed of each conversion."""
    return [printed[name][0]["out"] for name in requests]


def differing(found: Path, model: Path) -> list[str]:
    """What a folder has otherwise than the model's own: names of tensors, of which it lacks none, and of its keys in
    config.json."""
    ours, theirs = read_folder(found), read_folder(model)
    assert len(theirs) > 10, "the comparison has lost its contents"
    names = sorted(ours.keys() | theirs.keys())
    other = [name for name in names if not (name in ours and name in theirs and same_bits(ours[name], theirs[name]))]
    configs = [json.loads((folder / "config.json").read_text()) for folder in (found, model)]
    return other + [key for key in sorted(configs[0] | configs[1]) if configs[0].get(key) != configs[1].get(key)]


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("model", MODELS)
def test_weights_go_to_a_checkpoint_and_back_to_the_bit(folder: Path, many_ranks: Printed, model: str) -> None:
    requests = conversions(folder, [(model, QUICK[model])])
    to, back = requests.values()
    assert told(many_ranks, requests) == [f"{one.source} → {one.target}\n" for one in (to, back)]
    assert differing(Path(back.target), folder / model) == []


@pytest.fixture(scope="module")
def all_conversions(folder: Path) -> Printed:
    (folder / "all").mkdir()
    for model in MODELS:
        (folder / "all" / model).symlink_to(folder / model)
    return carried_out(folder, WORLD, {**conversions(folder / "all", ALL)})


@pytest.mark.slow
@pytest.mark.parametrize(("model", "pair"), ALL)
def test_every_layout_writes_and_reads_every_model(
    folder: Path, all_conversions: Printed, model: str, pair: tuple[str, str]
) -> None:
    requests = conversions(folder / "all", [(model, pair)])
    to, back = requests.values()
    assert told(all_conversions, requests) == [f"{one.source} → {one.target}\n" for one in (to, back)]
    assert differing(Path(back.target), folder / model) == []


def answers(printed: list[dict[str, str]]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed[0]["out"].splitlines()]


@pytest.mark.parametrize("name", [*GENERATED, "one idle"])
def test_answers_are_those_of_one_rank_in_the_order_of_the_prompts(
    one_rank: Printed, many_ranks: Printed, name: str
) -> None:
    ours, prompts = answers(many_ranks[f"generated {name}"]), [text for text in PROMPTS for _ in range(2)]
    if name == "one idle":
        expected, prompts = answers(one_rank["greedy"])[:3], list(PROMPTS[:3])
    else:
        expected = answers(one_rank[GENERATED[name][0]])
    assert [row["prompt"] for row in ours] == [row["prompt"] for row in expected] == prompts
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine["token_ids"] == theirs["token_ids"] and mine["response"] == theirs["response"]
        assert (mine["sample"], mine["finish_reason"]) == (theirs["sample"], theirs["finish_reason"])
        assert mine["log_prob"] == pytest.approx(theirs["log_prob"], abs=1e-4)
    assert len({tuple(row["token_ids"]) for row in ours}) >= 3, "the comparison has lost its contents"


@pytest.mark.parametrize("name", EVALUATED)
def test_scores_are_those_of_one_rank_of_prompts_that_are_shared_unevenly(many_ranks: Printed, name: str) -> None:
    scores = json.loads(many_ranks[f"evaluated {name}"][0]["out"].splitlines()[-1])
    assert scores["eval/held_out/exact_match"] == scores["eval/held_out/reward"] == pytest.approx(3 / 5, rel=1e-12)


def test_one_rank_of_all_speaks(many_ranks: Printed) -> None:
    for name, (first, *others) in many_ranks.items():
        assert first["err"].startswith("reading "), name
        if name not in REFUSED:
            assert first["out"], name
            assert others == [{"out": "", "err": "", "mistake": ""}] * len(others), name
    for name, replicas in REPLICAS.items():
        shown = many_ranks[f"generated {name}"][0]["err"].splitlines()
        assert shown[-1] == f"generating 10 responses in {replicas} …"
    assert many_ranks["evaluated ep2"][0]["err"].endswith("evaluating in 2 replicas of 2 ranks …\n")
    assert "on 4 ranks = pp 1 × dp 4 × tp 1, experts: ep 2 × etp 1 …" in many_ranks["generated ep2"][0]["err"]


def test_a_prompt_that_is_too_long_is_told_by_its_number_on_every_rank(
    many_ranks: Printed,
) -> None:
    said = {rank["mistake"] for rank in many_ranks["too long"]}
    assert len(said) == 1 and said.pop().startswith("prompt 6 has 6")


def test_a_classifier_becomes_the_checkpoint_of_a_reward_model_and_comes_back_to_the_bit(
    folder: Path, many_ranks: Printed
) -> None:
    """Tied, so that a language model would miss none of its tensors, and lose the head."""
    assert many_ranks["judge"][0]["out"] == f"{folder}/classifier → {folder}/judge\n"
    assert (folder / "judge" / "reward_model").is_dir() and not (folder / "judge" / "actor").exists()
    found, expected = read_folder(folder / "classifier again"), read_folder(folder / "classifier")
    assert found.keys() == expected.keys() and expected["score.weight"].shape == (1, 32)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    config = json.loads((folder / "classifier again" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]


@pytest.mark.parametrize(
    ("source", "what"),
    [("classifier", "a sequence classifier (it has score.weight)"), ("judge", "a reward model's checkpoint")],
)
def test_a_reward_model_answers_no_prompts(many_ranks: Printed, folder: Path, source: str, what: str) -> None:
    for rank in many_ranks[f"answers of {source}"]:
        assert rank["mistake"].startswith(f"{folder}/{source}: {what}")
        assert "a policy is needed here; score with it: a part of kind model in reward.parts" in rank["mistake"]
