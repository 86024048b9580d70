"""The replay buffer: finished sequences, bounded, drawn from with the policy filtration of PF-PPO (arXiv 2409.06957).

Every rank holds the same sequences, so that all of them draw alike. When a step draws is in `trainer/replay.py`.
"""

from __future__ import annotations

import dataclasses
import io
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy
import torch

from megappo.experience.batch import ExperienceBatch

Filtration = Literal["uniform", "power", "max_min", "max_random"]

IN_MEMORY = ":memory:"
RECOMPUTED = ("values", "token_rewards", "advantages", "returns", "loss_weights")
"""Fields that depend on the critic and the KL coefficient of the step that trains: not kept."""
BEST_OF_GROUP, OTHER_OF_GROUP = 0.4, 0.1
"""Weights of filtration `max_random`."""


@dataclass(frozen=True)
class StoredSequence:
    """One finished sequence: its batch of one row as bytes, and what it is drawn by.

    `step` made it, `group` numbers its prompt among all steps' prompts, `score` is its score and its tokens' rewards
    together: all that it is worth.
    """

    step: int
    group: int
    score: float
    content: bytes


class ReplayBuffer:
    """At most `size` sequences, the oldest leave first; kept in memory, or in the SQLite file `path`.

    A file is this process's alone and starts empty; what survives the process is in `save`.
    """

    def __init__(self, size: int, filtration: Filtration, power: float, seed: int, path: Path | None = None) -> None:
        self._size = size
        self._filtration = filtration
        self._power = power
        self._seed = seed
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        self._rows = sqlite3.connect(path or IN_MEMORY, isolation_level=None)
        # What a crash loses is read again from the checkpoint.
        self._rows.execute("PRAGMA synchronous = OFF")
        self._rows.execute(
            "CREATE TABLE IF NOT EXISTS sequences "
            "(id INTEGER PRIMARY KEY, step INTEGER, prompt INTEGER, score REAL, content BLOB)"
        )

    def __len__(self) -> int:
        (count,) = self._rows.execute("SELECT count(*) FROM sequences").fetchone()
        return int(count)

    def push(self, sequences: Sequence[StoredSequence]) -> None:
        """Adds sequences in their order; the oldest beyond `size` leave."""
        (newest,) = self._rows.execute("SELECT coalesce(max(id), -1) FROM sequences").fetchone()
        rows = [
            (newest + 1 + place, one.step, one.group, one.score, one.content) for place, one in enumerate(sequences)
        ]
        self._rows.execute("BEGIN")
        self._rows.executemany("INSERT INTO sequences VALUES (?, ?, ?, ?, ?)", rows)
        self._rows.execute("DELETE FROM sequences WHERE id <= ?", (newest + len(rows) - self._size,))
        self._rows.execute("COMMIT")

    def draw(self, count: int, step: int) -> list[int]:
        """Ids of `count` draws with replacement, by (seed, step) alone; none where no sequence has a weight."""
        rows = self._rows.execute("SELECT id, prompt, score FROM sequences ORDER BY id").fetchall()
        if not rows:
            return []
        ids, groups, scores = zip(*rows, strict=True)
        weights = filtration_weights(self._filtration, self._power, scores, groups)
        return [ids[place] for place in multinomial(weights, count, self._seed, step)]

    def read(self, identity: int) -> StoredSequence:
        row = self._rows.execute("SELECT step, prompt, score, content FROM sequences WHERE id = ?", (identity,))
        return StoredSequence(*row.fetchone())

    def save(self, path: Path) -> None:
        """Writes all sequences to an SQLite file."""
        with sqlite3.connect(path) as target:
            self._rows.backup(target)
        target.close()

    def load(self, path: Path) -> None:
        """Replaces all sequences by those of a saved file; a smaller `size` keeps the newest."""
        source = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        source.backup(self._rows)
        source.close()
        self.push(())

    def close(self) -> None:
        self._rows.close()


def filtration_weights(
    filtration: Filtration, power: float, scores: Sequence[float], groups: Sequence[int]
) -> numpy.ndarray:
    """Weight of each sequence in a draw, [N] float64, before they are normalised.

    Of equal scores in a group the first is its highest, and its lowest.
    """
    values = numpy.asarray(scores, dtype=numpy.float64)
    if filtration == "uniform":
        return numpy.ones_like(values)
    if filtration == "power":
        weights: numpy.ndarray = numpy.abs(values) ** power
        return weights
    members: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    highest = [max(places, key=lambda place: (values[place], -place)) for places in members.values()]
    if filtration == "max_random":
        weights = numpy.full_like(values, OTHER_OF_GROUP)
        weights[highest] = BEST_OF_GROUP
        return weights
    weights = numpy.zeros_like(values)
    weights[highest] = 1.0
    weights[[min(places, key=lambda place: (values[place], place)) for places in members.values()]] = 1.0
    return weights


def multinomial(weights: numpy.ndarray, count: int, seed: int, step: int) -> list[int]:
    """`count` places drawn with replacement in proportion to `weights`; none where all of them are 0."""
    cumulative = numpy.cumsum(weights)
    if not cumulative[-1] > 0:
        return []
    # Philox's raw output is fixed for good, unlike Generator.choice's: a resumed run may have a newer numpy.
    raw = numpy.random.Philox(key=[seed, step]).random_raw(count)
    thresholds = (raw >> numpy.uint64(11)) * 2.0**-53 * cumulative[-1]
    places = numpy.searchsorted(cumulative, thresholds, side="right")
    return [int(place) for place in places]


def replaced_places(positions: Sequence[int], fraction: float) -> list[int]:
    """Numbers of those positions whose sequences a draw replaces: spread evenly over the step, whatever the layout."""
    return [number for number, place in enumerate(positions) if int((place + 1) * fraction) > int(place * fraction)]


def stored(batch: ExperienceBatch, step: int, group_of: Callable[[int], int]) -> list[tuple[int, StoredSequence]]:
    """(position, sequence) of each row of a batch with scores and old log-probs; `group_of` numbers a position's
    prompt within its step's."""
    scores, rows = batch.get("scores").tolist(), []
    for index, position in enumerate(batch.positions.tolist()):
        row, score = batch.rows(index, index + 1), scores[index]
        if row.token_scores is not None:
            score += float(row.token_scores[row.response_mask].double().sum())
        fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        arrays = {
            name: value.numpy()
            for name, value in fields.items()
            if value is not None and name not in (*RECOMPUTED, "cu_seqlens", "positions")
        }
        content = io.BytesIO()
        numpy.savez(content, **arrays)
        rows.append((position, StoredSequence(step, group_of(position), score, content.getvalue())))
    return rows


def restored(sequence: StoredSequence, position: int, step: int) -> ExperienceBatch:
    """The sequence as one row at `position` of step `step`.

    Its old log-probs are those of the policy that made it: the engine's own, where that was not this step's policy.
    """
    with numpy.load(io.BytesIO(sequence.content)) as file:
        fields = {name: torch.from_numpy(file[name]) for name in file.files}
    fields["positions"] = torch.tensor([position], dtype=torch.int64)
    fields["cu_seqlens"] = torch.tensor([0, len(fields["token_ids"])], dtype=torch.int64)
    if sequence.step != step:
        fields["old_log_probs"] = fields["rollout_log_probs"].clone()
    return ExperienceBatch(**fields)


def joined(batches: Sequence[ExperienceBatch]) -> ExperienceBatch:
    """The rows of several batches one after another, with the fields that all of them have."""
    fields: dict[str, torch.Tensor | None] = {}
    for field in dataclasses.fields(ExperienceBatch):
        values = [getattr(batch, field.name) for batch in batches]
        fields[field.name] = None if any(value is None for value in values) else torch.cat(values)
    lengths = torch.cat([batch.lengths for batch in batches])
    fields["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return ExperienceBatch(**fields)  # type: ignore[arg-type]
