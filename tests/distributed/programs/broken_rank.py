"""A reward whose import breaks the critic of rank 1 in its first update, so that its peers wait in vain."""

import os

from megappo.experience.sample import RolloutSample
from megappo.workers.critic import CriticWorker


def score(sample: RolloutSample) -> float:
    return 1.0


def _update(self: CriticWorker, minibatch: object) -> dict[str, float]:
    raise ValueError("the second rank alone went wrong")


if os.environ.get("RANK") == "1":
    CriticWorker.update = _update  # type: ignore[method-assign,assignment]
