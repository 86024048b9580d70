"""The rows of tests/gpu/test_many_gpus.py, which need GPUs to be run, are the settings that their names say."""

from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.experiment import ExperimentConfig
from megappo.config.load import load_experiment
from megappo.config.problem import Severity
from tests.gpu.test_many_gpus import EXPERT_LAYOUTS, LAYOUTS, MODELS, TE_SIZES, rows
from tests.support.parity import write_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for kind, roles in MODELS.items():
        found[kind] = folder = tmp_path_factory.mktemp(kind)
        for role, (family, settings) in roles.items():
            tiny_tokenizer(tiny_model(folder / role, family, num_layers=2, **settings))
            tiny_tokenizer(tiny_model(folder / f"te-{role}", family, num_layers=2, **settings, **TE_SIZES[kind]))
    return found


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_rows_are_what_they_say(folders: dict[str, Path], kind: str, size: int) -> None:
    layouts, folder = (LAYOUTS if kind == "dense" else EXPERT_LAYOUTS)[size], folders[kind]
    file = write_experiment(folder, folder / "actor", folder / "critic")
    found = rows(layouts, folder, with_te=True)
    assert list(found) == [name + end for end in ("", "-bf16", "-te") for name in layouts]
    assert list(rows(layouts, folder, with_te=False)) == list(found)[: 2 * len(layouts)]
    for name, text in found.items():
        config = loaded(file, text)
        dtype, layers, actor = ("float32", "torch", "actor") if name in layouts else ("bfloat16", "torch", "actor")
        if name.endswith("-te"):
            layers, actor = "te", "te-actor"
        assert (config.model.dtype, config.model.layers, Path(config.model.path).name) == (dtype, layers, actor)
        assert Path(str(config.critic.path)).name == actor.replace("actor", "critic")
        assert config.layout == loaded(file, layouts[name.removesuffix("-bf16").removesuffix("-te")]).layout
        errors = [problem.text({}) for problem in check_experiment(config, size) if problem.severity is Severity.ERROR]
        assert not errors, (name, errors)


def loaded(file: Path, text: str) -> ExperimentConfig:
    return load_experiment(file, [*filter(None, text.split(",")), "trainer.run_dir=run"])
