"""One step's forward over the pipeline stages, and the draw of its tokens, which every rank of the model copy learns.

The order of communication is the same on all ranks: hidden states from stage to stage, logits to the drawing rank,
tokens to all. Nothing crosses data-parallel ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megappo.engines.native.noise import uniform
from megappo.engines.native.sampling import Draw, draw
from megappo.engines.native.schedule import GeneratedSequence
from megappo.engines.native.tokens import StepTokens
from megappo.engines.rollout import SamplingParams
from megappo.parallel.mesh import Mesh


def local_logits(model: GPTModel, mesh: Mesh, tokens: StepTokens) -> Tensor | None:
    """Runs this rank's stage; on the last stage the logits [rows, padded vocabulary / tp], None on the others."""
    if not mesh.is_first_stage:
        length = len(tokens.token_ids) // mesh.sequence_alignment
        config = model.config
        dtype = config.pipeline_dtype or config.params_dtype
        hidden = torch.empty(length, 1, config.hidden_size, dtype=dtype, device=mesh.device)
        dist.recv(hidden, group=mesh.pp_group, group_src=mesh.pp_rank - 1)
        model.set_input_tensor(hidden)
    # The attention mask is not read: CachedAttention knows from the step who sees what.
    output = model(tokens.token_ids[None], tokens.positions[None], None)
    if mesh.is_last_stage:
        return output[0]  # type: ignore[no-any-return]
    dist.send(output.contiguous(), group=mesh.pp_group, group_dst=mesh.pp_rank + 1)
    return None


def draw_on_all_ranks(
    logits: Tensor | None,
    sequences: Sequence[GeneratedSequence],
    sampling: SamplingParams,
    vocab_size: int,
    mesh: Mesh,
) -> Draw:
    """Draws one token for each of `sequences`, once, and tells all ranks of the model copy; tensors on the CPU.

    `logits` is `local_logits`' answer. Columns from `vocab_size` on, which pad the vocabulary, are never drawn.
    """
    drawn = torch.empty(len(sequences), 2, dtype=torch.float64, device=mesh.device)
    whole = _gathered(logits, mesh) if logits is not None else None
    if whole is not None:
        noise = uniform([each.noise_key for each in sequences], [len(each.token_ids) for each in sequences])
        result = draw(whole[:, :vocab_size], noise, sampling)
        # One message for both: float64 holds a token id and a float32 exactly.
        drawn = torch.stack([result.token_ids.double(), result.log_probs.double()], dim=1)
    if mesh.tp * mesh.pp > 1:
        dist.broadcast(drawn, src=_drawing_rank(mesh), group=mesh.model_parallel_group)
    drawn = drawn.cpu()
    return Draw(drawn[:, 0].long(), drawn[:, 1].float())


def _drawing_rank(mesh: Mesh) -> int:
    """Global rank that draws for this model copy: the first TP rank of the last stage."""
    return int(mesh.grid[-1, mesh.dp_rank, 0])


def _gathered(logits: Tensor, mesh: Mesh) -> Tensor | None:
    """[rows, padded vocabulary / tp] on each TP rank → [rows, padded vocabulary] on the first, None on the others."""
    if mesh.tp == 1:
        return logits
    shards = [torch.empty_like(logits) for _ in range(mesh.tp)] if mesh.tp_rank == 0 else None
    dist.gather(logits.contiguous(), shards, group=mesh.tp_group, group_dst=0)
    return torch.cat(shards, dim=1) if shards is not None else None
