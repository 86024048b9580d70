"""Which experts each token of a generation went to, collected while it decodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from megappo.engines.native.ranks import DecodingRanks
from megappo.engines.native.schedule import Step
from megappo.engines.rollout import Completion
from megappo.models.router import Routing
from megappo.models.routing import EXPERT_DTYPE, NO_EXPERT
from megappo.parallel.collectives import max_over


class ExpertRecorder:
    """Collects the choices of one `generate`. A rank has those of its stage's layers and, under sequence parallelism,
    of its part of a step's tokens; the ranks of the model copy join theirs at the end."""

    def __init__(self, routing: Routing, ranks: DecodingRanks) -> None:
        self._routing = routing
        self._ranks = ranks
        self._layers: dict[int, Tensor] = {}
        self._steps: list[Tensor] = []
        self._num_rows = 0
        self._prompts: dict[int, list[int]] = {}
        self._rows: dict[int, list[int]] = {}

    def __call__(self, layer: int, experts: Tensor) -> None:
        """A router's choice for this rank's tokens of the step, [tokens, top_k]."""
        self._layers[layer] = experts

    def end_step(self, step: Step, num_tokens: int) -> None:
        """Says whose the tokens of the step's forward were, `num_tokens` with padding; before any is drawn."""
        moe, ranks = self._routing.moe, self._ranks
        table = torch.full((num_tokens, len(self._routing.layers), moe.top_k), NO_EXPERT, dtype=EXPERT_DTYPE)
        share = num_tokens // ranks.sequence_alignment
        first = ranks.place * share if ranks.sequence_alignment > 1 else 0
        for layer, experts in self._layers.items():
            table[first : first + share, layer] = experts.to("cpu", EXPERT_DTYPE)
        self._layers = {}
        self._steps.append(table)
        row = self._num_rows
        for sequence in step.decoding:
            # A fork shares the prompt's prefill, and decodes the prompt's last token itself.
            shared = self._prompts[sequence.prompt][: len(sequence.prompt_ids) - 1]
            self._rows.setdefault(sequence.index, list(shared)).append(row)
            row += 1
        for sequence in step.prefilling:
            own = list(range(row, row + len(sequence.prompt_ids)))
            self._prompts[sequence.prompt] = own
            self._rows[sequence.index] = list(own)
            row += len(own)
        self._num_rows += num_tokens

    def completed(self, completions: Mapping[int, Completion]) -> dict[int, Completion]:
        """Those of the completions that it recorded, with `routed_experts`, by request; a collective call over the
        ranks of the model copy. The last token was drawn and never computed: it has no experts."""
        table = torch.cat(self._steps).to(self._ranks.device, torch.int32)
        table = max_over(self._ranks.copy_group, self._ranks.device)(table).to("cpu", EXPERT_DTYPE)
        last = table.new_full((1, *table.shape[1:]), NO_EXPERT)
        return {
            index: dataclasses.replace(completion, routed_experts=torch.cat([table[self._rows[index]], last]))
            for index, completion in completions.items()
            if index in self._rows
        }
