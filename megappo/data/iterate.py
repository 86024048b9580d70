"""The order of prompts over epochs: seeded, resumable, the same on every rank and layout. Not: the prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megappo.errors import DataError


class PromptOrder:
    """Yields the row numbers of one step's prompts after another, epoch after epoch.

    The order of an epoch depends on (seed, epoch, number of prompts) alone. An epoch's last, incomplete batch is left
    out, as in verl: the rows that it would have held stand elsewhere in the next epoch's permutation.
    """

    def __init__(self, num_prompts: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if num_prompts < batch_size:
            raise DataError(
                f"data.train_batch_size is {batch_size}, but the training files hold {num_prompts} prompts; "
                f"set data.train_batch_size={num_prompts} or less (a step needs that many different prompts)"
            )
        self._num_prompts = num_prompts
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._index = 0
        self._permutation = self._permute(0)

    @property
    def epoch(self) -> int:
        """The pass over the prompts, from 0, that the next batch belongs to."""
        return self._epoch

    @property
    def prompts_seen(self) -> int:
        """Prompts of all batches so far, where the batch size has always been this one."""
        return self._epoch * self.steps_per_epoch * self._batch_size + self._index

    @property
    def steps_per_epoch(self) -> int:
        return self._num_prompts // self._batch_size

    def next_batch(self) -> list[int]:
        """Row numbers of the next step's `batch_size` prompts, all different."""
        batch = self._permutation[self._index : self._index + self._batch_size]
        self._index += self._batch_size
        if self._index + self._batch_size > self._num_prompts:
            self._epoch += 1
            self._index = 0
            self._permutation = self._permute(self._epoch)
        return [int(row) for row in batch]

    def state_dict(self) -> dict[str, int]:
        """Where the next batch begins; the rest tells whether it is still the same order."""
        return {"epoch": self._epoch, "index": self._index} | self._identity()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint; DataError where the data set, the seed or shuffling has changed since."""
        if "num_prompts" not in state or isinstance(state["num_prompts"], Mapping):  # a set may have any name
            raise DataError(
                f"the checkpoint mixes the prompt sets {', '.join(state)} of data.sets, this run has none: resume with "
                "the same data.sets, or start a new run"
            )
        for name, now in self._identity().items():
            # Checkpoints of earlier versions don't say whether rows were shuffled.
            if state.get(name, now) != now:
                raise DataError(
                    f"the checkpoint's order of prompts has {name} {state[name]}, this run has {now}: resume with the "
                    "same data.train_files, lengths, data.seed and data.shuffle, or start a new run"
                )
        self._epoch, self._index = state["epoch"], state["index"]
        if self._index + self._batch_size > self._num_prompts:
            # Saved with a smaller batch size than this run's: the rest of that epoch does not fill one.
            self._epoch, self._index = self._epoch + 1, 0
        self._permutation = self._permute(self._epoch)

    def _identity(self) -> dict[str, int]:
        """What the order follows from; a checkpoint of another one can't be gone on from."""
        return {"num_prompts": self._num_prompts, "seed": self._seed, "shuffle": self._shuffle}

    def _permute(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._num_prompts)
        # Philox's raw output is fixed for good, unlike Generator.permutation's: a resumed run may have a newer numpy.
        keys = np.random.Philox(key=[self._seed, epoch]).random_raw(self._num_prompts)
        return np.argsort(keys, kind="stable")
