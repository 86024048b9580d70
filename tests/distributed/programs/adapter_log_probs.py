"""Log-probs [b, s, vocabulary] of random tokens by the actor that a run begins with, on any layout."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.load import load_experiment
from megappo.errors import DataError
from megappo.parallel.mesh import start_mesh
from megappo.trainer.roles import RoleBuilder
from tests.distributed.programs.offload import main
from tests.support.adapters import random_tokens


def run_once(file: str, overrides: list[str]) -> object:
    """Nested lists, or the message of what the folder of the adapters is refused with."""
    config = load_experiment(file, overrides)
    mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
    try:
        model = RoleBuilder(config, mesh).actor(1).model
        tokens = random_tokens()
        with torch.no_grad():
            logits = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
        parts = [torch.empty_like(logits) for _ in range(mesh.tp)]
        dist.all_gather(parts, logits.contiguous(), group=mesh.tp_group)
        return torch.cat(parts, -1).log_softmax(-1).tolist()
    except DataError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main(run_once)
