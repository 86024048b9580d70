"""`megappo validate` refuses what ranks would refuse when they build the models."""

import json
import shlex
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.models.families.published import PUBLISHED
from tests.support.experiments import write_experiment

MOE, DENSE = "qwen3-30b-a3b", "qwen2.5-0.5b"
SELECTIVE, MODULES = "model.recompute_granularity=selective", "model.recompute_modules"
NOTHING = "'%s.lora={rank: 4, target_modules: [query]}'"


@pytest.mark.parametrize(
    ("shape", "overrides", "told"),
    [
        (MOE, f"{SELECTIVE} {MODULES}=[mlp]", f"{MODULES}: mlp, but all layers of this model have experts"),
        (MOE, f"{SELECTIVE} {MODULES}=[shared_experts]", f"{MODULES}: shared_experts, but this model has none"),
        (DENSE, NOTHING % "model", "model.lora.target_modules: 'query' names no projection"),
        (DENSE, NOTHING % "critic", "critic.lora.target_modules: 'query' names no projection"),
        ("deepseek-v3", "layout.pp=61", "layout.pp: 61 makes stage 0 of layers 0 to 0, none of which has experts"),
        (DENSE, f"{SELECTIVE} {MODULES}=[core_attn] model.lora.rank=4 critic.lora.rank=4", None),
        ("deepseek-v3", "layout.pp=1", None),
    ],
)
def test_models_that_cannot_be_built_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str, overrides: str, told: str | None
) -> None:
    file = write_experiment(tmp_path)
    (tmp_path / "model" / "config.json").write_text(json.dumps(PUBLISHED[shape]))
    code = main.main(["validate", str(file), *shlex.split(overrides)])
    captured = capsys.readouterr()
    assert code == (0 if told is None else 2), captured.err
    assert told is None or f"error: {told}" in captured.err


@pytest.mark.parametrize("with_reference", ["trainer.kind=dpo", "actor.use_kl_loss=true"])
def test_a_reference_of_its_own_is_a_model_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], with_reference: str
) -> None:
    file = write_experiment(tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"intermediate_size": 97}))
    words = [str(file), "layout.tp=3", with_reference]
    assert main.main(["validate", *words]) == 0, capsys.readouterr().err
    assert main.main(["validate", *words, f"ref.path={tmp_path}/other"]) == 2
    assert "12 attention heads, 3 KV heads (or is no multiple of them) and 97 " in capsys.readouterr().err


def test_feed_forward_rows_are_divided_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_experiment(tmp_path, intermediate_size=97)
    assert main.main(["validate", str(file), "layout.tp=3"]) == 2
    told = (
        "layout.tp: 3 does not divide this model's 12 attention heads, 3 KV heads (or is no multiple of them) and 97 "
    )
    assert told in capsys.readouterr().err
