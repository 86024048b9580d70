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
from megappo.engines.native.ranks import DecodingRanks
from megappo.engines.native.sampling import Draw, draw
from megappo.engines.native.schedule import GeneratedSequence
from megappo.engines.native.tokens import StepTokens
from megappo.engines.rollout import SamplingParams
from megappo.models.chunks import StageModel, chunks_of


def local_logits(model: StageModel, ranks: DecodingRanks, tokens: StepTokens) -> Tensor | None:
    """Runs this rank's stage, or its virtual ones in turn; on the rank of the last stage the logits [rows, padded
    vocabulary / tp], None on the others."""
    for chunk in chunks_of(model):
        logits = _chunk_logits(chunk, ranks, tokens)
    return logits


def _chunk_logits(model: GPTModel, ranks: DecodingRanks, tokens: StepTokens) -> Tensor | None:
    """Takes hidden states from the stage before and hands its own to the next: the stages go round the ranks."""
    if not model.pre_process:
        length = len(tokens.token_ids) // ranks.sequence_alignment
        config = model.config
        dtype = config.pipeline_dtype or config.params_dtype
        hidden = torch.empty(length, 1, config.hidden_size, dtype=dtype, device=ranks.device)
        dist.recv(hidden, group=ranks.pp_group, group_src=(ranks.stage - 1) % ranks.pp_group.size())
        model.set_input_tensor(hidden)
    # The attention mask is not read: CachedAttention knows from the step who sees what.
    output = model(tokens.token_ids[None], tokens.positions[None], None)
    if model.post_process:
        return output[0]  # type: ignore[no-any-return]
    dist.send(output.contiguous(), group=ranks.pp_group, group_dst=(ranks.stage + 1) % ranks.pp_group.size())
    return None


def draw_on_all_ranks(
    logits: Tensor | None,
    sequences: Sequence[GeneratedSequence],
    sampling: SamplingParams,
    vocab_size: int,
    ranks: DecodingRanks,
) -> Draw:
    """Draws one token for each of `sequences`, once, and tells all ranks of the model copy; tensors on the CPU.

    `logits` is `local_logits`' answer. Columns from `vocab_size` on, which pad the vocabulary, are never drawn.
    """
    drawn = torch.empty(len(sequences), 2, dtype=torch.float64, device=ranks.device)
    whole = _gathered(logits, ranks) if logits is not None else None
    if whole is not None:
        noise = uniform([each.noise_key for each in sequences], [len(each.token_ids) for each in sequences])
        result = draw(whole[:, :vocab_size], noise, sampling)
        # One message for both: float64 holds a token id and a float32 exactly.
        drawn = torch.stack([result.token_ids.double(), result.log_probs.double()], dim=1)
    if ranks.copy_group.size() > 1:
        dist.broadcast(drawn, src=ranks.drawing_rank, group=ranks.copy_group)
    drawn = drawn.cpu()
    return Draw(drawn[:, 0].long(), drawn[:, 1].float())


def _gathered(logits: Tensor, ranks: DecodingRanks) -> Tensor | None:
    """[rows, padded vocabulary / tp] on each TP rank → [rows, padded vocabulary] on the drawing rank, else None."""
    size = ranks.tp_group.size()
    if size == 1:
        return logits
    shards = [torch.empty_like(logits) for _ in range(size)] if ranks.tp_group.rank() == 0 else None
    dist.gather(logits.contiguous(), shards, group=ranks.tp_group, group_dst=0)
    return torch.cat([shards[index] for index in ranks.tp_order], dim=1) if shards is not None else None
