"""Runs of an actor and a critic with experts: their models, and runs that go on from what other runs saved."""

from collections.abc import Mapping
from pathlib import Path

from tests.support.checkpoints import same_bits, saved_tensors
from tests.support.runs import learning
from tests.support.tiny_models import tiny_model, tiny_tokenizer


def expert_models(folder: Path) -> dict[str, Path]:
    """Actor and critic, with a shared expert and its gate, biases, and expert weights that do not sum to 1."""
    actor = tiny_model(folder / "actor", "qwen2_moe", tied=True)
    critic = tiny_model(folder / "critic", "qwen2_moe", tied=True, value_head=True, seed=1)
    return {"actor": tiny_tokenizer(actor), "critic": tiny_tokenizer(critic)}


def resuming(folder: Path, named: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Overrides of runs in `folder`. `named`: name → (its own overrides, the run whose second step it goes on from)."""
    return {
        name: f"{overrides},trainer.resume={folder / source / 'run' / 'checkpoints' / 'step-000002'}"
        for name, (overrides, source) in named.items()
    }


def assert_third_step_is_the_same(whole: Path, resumed: Path) -> list[str]:
    """Of runs of three steps, and of the third alone: the same metrics, weights and optimizer state to the bit.
    Returns the names of the tensors."""
    (ours,), expected = learning(resumed), learning(whole)[2]
    assert len(ours) > 20 and ours == expected
    tensors, theirs = (saved_tensors(run / "checkpoints" / "step-000003") for run in (resumed, whole))
    assert same_bits(tensors, theirs)
    return list(theirs)
