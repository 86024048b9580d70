"""Which sequences form a minibatch: decided for the global batch, so that every layout makes the same optimizer
steps."""

from collections.abc import Iterator

import numpy

from megappo.experience.batch import ExperienceBatch
from megappo.planner.batch import MiniBatchPlan


def minibatches(batch: ExperienceBatch, plan: MiniBatchPlan, *, seed: int, step: int) -> Iterator[ExperienceBatch]:
    """This rank's part of each minibatch, for all epochs of a step; none in the steps that the plan leaves out.

    A minibatch is a run of consecutive sequences of the step, whose prompts come in random order already; the first
    epoch takes them in that order and each later one in an order of its own, drawn from (seed, step, epoch).
    """
    if step <= plan.idle_steps:
        return
    share = plan.sequences_per_rank
    for epoch in range(plan.epochs):
        order = list(range(plan.num_minibatches))
        if epoch:
            numpy.random.default_rng((seed, step, epoch)).shuffle(order)
        for index in order:
            yield batch.rows(index * share, (index + 1) * share)
