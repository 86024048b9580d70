"""The one batch of a step: named tensors over sequences, stored flat.

Cutting it into micro-batches is in `micro.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.experience.sample import RolloutSample

# The phase of `fit()` that fills each optional field: the message of a field that is read too early.
FILLED_BY = {
    "scores": "the reward phase",
    "token_scores": "the reward phase",
    "old_log_probs": "the old log-prob phase",
    "routed_experts": "the rollout or the old log-prob phase (actor.router_replay)",
    "ref_log_probs": "the reference phase (actor.use_kl_loss or algorithm.use_kl_in_reward)",
    "ref_kl": "the reference phase (algorithm.kl_penalty full)",
    "values": "the value phase",
    "baseline_scores": "the reward phase (algorithm.adv_estimator remax)",
    "token_rewards": "the advantage phase",
    "advantages": "the advantage phase",
    "returns": "the advantage phase (estimators with a critic)",
    "loss_weights": "the advantage phase (algorithm.rollout_correction.rollout_is)",
}
PER_SEQUENCE = ("positions", "scores", "baseline_scores")
"""Fields with one number a sequence."""


class NotFilledError(RuntimeError):
    """A field of the batch was read before the phase that fills it."""


@dataclass(frozen=True)
class ExperienceBatch:
    """Sequences of one step, or of one minibatch of it, on this data-parallel rank.

    Per-token fields are flat `[tokens]`, sequence after sequence, prompt before response, aligned to the token they
    describe: `old_log_probs[t]` is log p(token_ids[t] | tokens before t); `values[t]` is V before token t is
    produced. Fields that are filled later are None until then; read them with `get`, which says who fills them.

    Example, two sequences of 3 + 2 and 1 + 3 tokens:
    `cu_seqlens` 0 5 9 · `response_mask` 0 0 0 1 1 0 1 1 1.

    Shapes: `token_ids` [tokens] int64 · `response_mask` [tokens] bool · `cu_seqlens` [B + 1] int64 ·
    `positions` [B] int64, place in the step's global batch · `rollout_log_probs` [tokens] · `scores` [B] ·
    `token_scores` [tokens], rewards of single response tokens, which are added to where the score lands ·
    `old_log_probs`, `ref_log_probs`, `values`, `token_rewards`, `advantages`, `returns` [tokens] · `ref_kl` [tokens],
    exact KL of the old policy to the reference · `baseline_scores` [B], the whole reward of the greedy response to
    the same prompt ·
    `loss_weights` [tokens], factors of the policy loss; floats are float32 · `routed_experts` [tokens, layers with
    experts, top_k] int16, the experts that each token went to, -1 where nothing was recorded.
    """

    token_ids: Tensor
    response_mask: Tensor
    cu_seqlens: Tensor
    positions: Tensor
    rollout_log_probs: Tensor
    scores: Tensor | None = None
    token_scores: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    ref_kl: Tensor | None = None
    values: Tensor | None = None
    baseline_scores: Tensor | None = None
    token_rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    loss_weights: Tensor | None = None
    routed_experts: Tensor | None = None

    @classmethod
    def from_samples(cls, samples: Sequence[RolloutSample]) -> ExperienceBatch:
        """Batches trajectories in the order given."""
        batch = cls.from_sequences(
            [(*sample.prompt.token_ids, *sample.response_ids) for sample in samples],
            [len(sample.prompt.token_ids) for sample in samples],
            [sample.position for sample in samples],
        )
        log_probs = [value for sample in samples for value in sample.rollout_log_probs]
        batch.rollout_log_probs[batch.response_mask] = torch.tensor(log_probs, dtype=torch.float32)
        own = [value for sample in samples for value in sample.mask or (True,) * len(sample.response_ids)]
        batch.response_mask[batch.response_mask.clone()] = torch.tensor(own, dtype=torch.bool)
        experts = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
        if experts:
            assert len(experts) == len(samples), "all samples of a step have their experts, or none"
            batch = batch.fill(routed_experts=torch.cat(experts))
        return batch

    @classmethod
    def from_sequences(
        cls, token_ids: Sequence[Sequence[int]], response_starts: Sequence[int], positions: Sequence[int]
    ) -> ExperienceBatch:
        """Batches sequences of any origin: tokens from `response_starts` on are responses, rollout log-probs are 0."""
        lengths = torch.tensor([len(tokens) for tokens in token_ids], dtype=torch.int64)
        flat = torch.tensor([token for tokens in token_ids for token in tokens], dtype=torch.int64)
        mask = [
            place >= start
            for tokens, start in zip(token_ids, response_starts, strict=True)
            for place in range(len(tokens))
        ]
        return cls(
            token_ids=flat,
            response_mask=torch.tensor(mask, dtype=torch.bool),
            cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            positions=torch.tensor(positions, dtype=torch.int64),
            rollout_log_probs=torch.zeros(len(flat), dtype=torch.float32),
        )

    @property
    def num_sequences(self) -> int:
        return len(self.positions)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_nothing(self) -> bool:
        """One token and no response: all that a micro-batch without sequences has (`cut.nothing_like`)."""
        return self.num_tokens == 1 and not bool(self.response_mask.any())

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [B]."""
        return self.cu_seqlens.diff()

    def get(self, name: str) -> Tensor:
        """The field `name`; raises NotFilledError with the phase that fills it where it is still None."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise NotFilledError(f"batch.{name} is not there yet: it is filled by {FILLED_BY[name]}")
        return value

    def fill(self, **fields: Tensor) -> ExperienceBatch:
        """A batch with more fields filled; shapes are checked against this one's."""
        for name, value in fields.items():
            expected = (self.num_sequences,) if name in PER_SEQUENCE else (self.num_tokens,)
            shape = tuple(value.shape[:1] if name == "routed_experts" else value.shape)
            assert shape == expected, f"{name} has shape {shape}, the batch needs {expected}"
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def rows(self, start: int, stop: int) -> ExperienceBatch:
        """Sequences start … stop - 1 as views on the same storage."""
        low, high = int(self.cu_seqlens[start]), int(self.cu_seqlens[stop])
        fields: dict[str, Tensor | None] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "cu_seqlens":
                fields[field.name] = value[start : stop + 1] - low
            elif field.name in PER_SEQUENCE:
                fields[field.name] = value[start:stop] if value is not None else None
            else:
                fields[field.name] = value[low:high] if value is not None else None
        return ExperienceBatch(**fields)  # type: ignore[arg-type]

    def taken(self, rows: Sequence[int]) -> ExperienceBatch:
        """The sequences with those numbers, in that order."""
        tokens, numbers = self.token_places(rows), torch.tensor(rows, dtype=torch.int64)
        fields: dict[str, Tensor | None] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            index = numbers if field.name in PER_SEQUENCE else tokens
            fields[field.name] = None if value is None or field.name == "cu_seqlens" else value[index]
        fields["cu_seqlens"] = torch.nn.functional.pad(self.lengths[numbers].cumsum(0), (1, 0))
        return ExperienceBatch(**fields)  # type: ignore[arg-type]

    def token_places(self, rows: Sequence[int]) -> Tensor:
        """Where the tokens of the sequences with those numbers stand among [tokens], one sequence after another."""
        places = torch.arange(self.num_tokens)
        ends = self.cu_seqlens.tolist()
        return torch.cat([places[ends[row] : ends[row + 1]] for row in rows] or [places[:0]])

    def padded(self, flat: Tensor, length: int | None = None) -> Tensor:
        """[tokens, …] → [B, T, …] right-padded with zeros, T the longest sequence unless `length` says more."""
        width = int(self.lengths.max()) if length is None else length
        view = flat.new_zeros((self.num_sequences, width, *flat.shape[1:]))
        view[self.is_token(width)] = flat
        return view

    def flat(self, view: Tensor) -> Tensor:
        """[B, T, …] → [tokens, …]: the inverse of `padded`; padding is dropped without being read."""
        return view[self.is_token(view.shape[1])]

    def is_token(self, length: int) -> Tensor:
        """[B, T] bool: which places of the padded view hold a token."""
        return torch.arange(length)[None, :] < self.lengths[:, None]
