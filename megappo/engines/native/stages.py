"""A step's way over the pipeline stages, and the draw of its tokens, which every rank of the model copy learns.

The order of communication is the same on all ranks: hidden states from stage to stage, logits to the drawing rank,
tokens to all. Sends wait for nobody, so that a stage goes on to the next group of sequences. Nothing crosses
data-parallel ranks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.engines.native.noise import uniform
from megappo.engines.native.ranks import DecodingRanks
from megappo.engines.native.sampling import Draw, draw
from megappo.engines.native.schedule import GeneratedSequence
from megappo.engines.native.tokens import StepTokens
from megappo.engines.rollout import SamplingParams


class Pipeline:
    """Runs this rank's stage, or its virtual ones, between the ranks of the stages before and after.

    `round_length`: how often it is run before the first group of sequences, whose tokens are known then, has its turn
    again: no more sends than that are under way.
    """

    def __init__(self, ranks: DecodingRanks, round_length: int) -> None:
        self._ranks = ranks
        self._round_length = round_length
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def run(self, chunk: GPTModel, tokens: StepTokens) -> Tensor | None:
        """Takes hidden states from the stage before and hands its own to the next: the stages go round the ranks.

        Of the model's last stage the logits [rows, padded vocabulary / tp], None of the others.
        """
        if not chunk.pre_process:
            chunk.set_input_tensor(self._received(chunk, tokens))
        # The attention mask is not read: CachedAttention knows from the step who sees what.
        output = chunk(tokens.token_ids[None], tokens.positions[None], None)
        if chunk.post_process:
            return output[0]  # type: ignore[no-any-return]
        self._send(output.contiguous())
        return None

    def _received(self, chunk: GPTModel, tokens: StepTokens) -> Tensor:
        ranks, config = self._ranks, chunk.config
        length = len(tokens.token_ids) // ranks.sequence_alignment
        dtype = config.pipeline_dtype or config.params_dtype
        hidden = torch.empty(length, 1, config.hidden_size, dtype=dtype, device=ranks.device)
        group, rank = self._neighbour(-1)
        work = dist.irecv(hidden, src=rank, group=group)
        assert work is not None, "this rank is in its pipeline group"
        work.wait()
        return hidden

    def _send(self, hidden: Tensor) -> None:
        if len(self._sends) == self._round_length:
            self._sends.popleft()[0].wait()  # it arrived long ago: its group has drawn since
        group, rank = self._neighbour(1)
        work = dist.isend(hidden, dst=rank, group=group)
        assert work is not None, "this rank is in its pipeline group"
        self._sends.append((work, hidden))

    def _neighbour(self, offset: int) -> tuple[ProcessGroup, int]:
        """The rank of the stage before (-1) or after (1), and the group that messages to and from it go through.

        From the last rank round to the first they have a group of their own: NCCL carries out the messages of two ranks
        in one group in the order of their calls, which is another one on each of two stages that send to each other.
        """
        ranks = self._ranks
        place, size = ranks.stage + offset, ranks.pp_group.size()
        group = ranks.pp_group if 0 <= place < size else ranks.copy_group
        return group, dist.get_global_rank(ranks.pp_group, place % size)

    def finish(self) -> None:
        """Waits until everything has been received; also after an error, or the ranks behind would wait for ever."""
        while self._sends:
            self._sends.popleft()[0].wait()


@dataclass(frozen=True)
class PendingDraw:
    """Token ids and log-probs [rows, 2] on their way to all ranks; `work` is None where they are there."""

    drawn: Tensor
    work: dist.Work | None

    def result(self) -> Draw:
        """Waits for them; tensors on the CPU."""
        if self.work is not None:
            self.work.wait()
        drawn = self.drawn.cpu()
        return Draw(drawn[:, 0].long(), drawn[:, 1].float())


def draw_on_all_ranks(
    logits: Tensor | None,
    sequences: Sequence[GeneratedSequence],
    sampling: SamplingParams,
    vocab_size: int,
    ranks: DecodingRanks,
    *,
    in_background: bool,
) -> PendingDraw:
    """Draws one token for each of `sequences`, once, and tells all ranks of the model copy.

    `logits` is `Pipeline.run`'s answer. Columns from `vocab_size` on, which pad the vocabulary, are never drawn.
    `in_background`: a rank does not wait for what is drawn on another one before `PendingDraw.result`.
    """
    # Gloo carries what is on the CPU, so that tokens under way never stand before hidden states in a queue of NCCL's.
    device = torch.device("cpu") if in_background else ranks.device
    drawn = torch.empty(len(sequences), 2, dtype=torch.float64, device=device)
    whole = _gathered(logits, ranks) if logits is not None else None
    if whole is not None:
        noise = uniform([each.noise_key for each in sequences], [len(each.token_ids) for each in sequences])
        result = draw(whole[:, :vocab_size], noise, sampling)
        # One message for both: float64 holds a token id and a float32 exactly.
        drawn = torch.stack([result.token_ids.double(), result.log_probs.double()], dim=1).to(device)
    work = None
    if ranks.copy_group.size() > 1:
        work = dist.broadcast(drawn, src=ranks.drawing_rank, group=ranks.copy_group, async_op=in_background)
    return PendingDraw(drawn, work)


def _gathered(logits: Tensor, ranks: DecodingRanks) -> Tensor | None:
    """[rows, padded vocabulary / tp] on each TP rank → [rows, padded vocabulary] on the drawing rank, else None."""
    size = ranks.tp_group.size()
    if size == 1:
        return logits
    shards = [torch.empty_like(logits) for _ in range(size)] if ranks.tp_group.rank() == 0 else None
    dist.gather(logits.contiguous(), shards, group=ranks.tp_group, group_dst=0)
    return torch.cat([shards[index] for index in ranks.tp_order], dim=1) if shards is not None else None
