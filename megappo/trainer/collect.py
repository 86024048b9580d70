"""What a step learns from: prompts sampled and scored, and with dynamic sampling, until enough groups are of use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megappo.config.filter_groups import FilterGroupsConfig
from megappo.data.feed import PromptFeed
from megappo.errors import ConfigError
from megappo.experience.sample import RolloutSample
from megappo.parallel.collectives import gather_objects, sum_over
from megappo.parallel.exchange import exchange_objects
from megappo.parallel.mesh import Mesh
from megappo.planner.batch import BatchPlan
from megappo.trainer.baseline import GreedyBaseline, NoBaseline
from megappo.trainer.experience_metrics import with_switch
from megappo.trainer.loop import Step
from megappo.trainer.weight_switch import WeightSwitch
from megappo.workers.reward import RewardWorker, ScoredSamples
from megappo.workers.reward_sets import SetRewards
from megappo.workers.rollout import RolloutWorker
from megappo.workers.scored_rows import joined_rows, taken


class Collected(NamedTuple):
    """This rank's samples of a step, in the order of their positions, and their scores."""

    samples: list[RolloutSample]
    scored: ScoredSamples


@dataclass(frozen=True)
class Collector:
    """Takes the turn to generate, samples a batch of prompts, gives the turn back, and scores."""

    feed: PromptFeed
    plan: BatchPlan
    mesh: Mesh
    switch: WeightSwitch
    rollout: RolloutWorker
    reward: RewardWorker | SetRewards
    baseline: GreedyBaseline | NoBaseline

    def collect(self, step: Step) -> Collected:
        """The step's samples. A collective call."""
        lot = self.one_batch(step, 0)
        self.describe(step, [lot])
        return lot

    def one_batch(self, step: Step, number: int) -> Collected:
        """Samples of the next batch of prompts, the step's batch `number` from 0, which has noise of its own."""
        positions = self.plan.positions_of(self.mesh.dp_rank)
        with step.phase("weight_sync"):
            step.record(with_switch(step.metrics, self.switch.to_rollout(step.number)))
        with step.phase("rollout"):
            prompts = self.feed.next_batch()
            samples = self.rollout.generate(prompts, positions, step.number, step.progress, batch=number)
            greedy = self.baseline.generate(prompts, positions, step.number)
            tokens = sum(sample.num_policy_tokens for sample in (*samples, *greedy))
            step.count_generated(int(sum_over(self.mesh.dp_group, self.mesh.device)(torch.tensor(tokens))))
        with step.phase("weight_sync"):
            self.switch.to_training()
        with step.phase("reward"):
            scored = self.reward.score(samples)
            return Collected(self.baseline.compare(samples, greedy, len(prompts)), scored)

    def describe(self, step: Step, lots: Sequence[Collected]) -> None:
        """Records what is told of all the step's responses, trained on or not. A collective call."""
        with step.phase("reward"):
            samples = [sample for lot in lots for sample in lot.samples]
            step.record(self.rollout.turn_metrics(samples))
            if isinstance(self.reward, SetRewards):
                scores = [score for lot in lots for score in lot.scored.batch.totals]
                step.record(set_scores(samples, scores, self.reward.names, self.mesh))


@dataclass(frozen=True)
class GroupFilter:
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups that are all worth the same teach nothing and are replaced.

    Samples whole batches until a step's number of groups differ. The surplus of the last batch is dropped: at the next
    step it would be another policy's. A signal to stop is heard between batches.
    """

    collector: Collector
    config: FilterGroupsConfig

    def collect(self, step: Step) -> Collected | None:
        """None where the step is given up for a signal to stop. Raises ConfigError on every rank where
        `max_num_gen_batches` were not enough and that is an error."""
        plan, mesh, config = self.collector.plan, self.collector.mesh, self.config
        lots: list[Collected] = []
        kept: list[tuple[int, int]] = []
        uniform: list[tuple[int, int]] = []
        total = 0.0
        while len(kept) < plan.prompts and not (config.max_num_gen_batches and len(lots) >= config.max_num_gen_batches):
            if lots:
                step.event("further_batch", batches=len(lots), kept=len(kept), needed=plan.prompts)
                if step.gives_up():
                    return None
            lot = self.collector.one_batch(step, len(lots))
            for prompt, values in enumerate(group_values(lot, config.metric, plan.n, mesh)):
                total += sum(values)
                (kept if min(values) < max(values) else uniform).append((len(lots), prompt))
            lots.append(lot)
        self.collector.describe(step, lots)
        step.record(
            {
                "filter_groups/num_gen_batches": float(len(lots)),
                "filter_groups/kept": float(len(kept)),
                "filter_groups/uniform": float(len(uniform)),
                "filter_groups/metric": total / (plan.sequences * len(lots)),
            }
        )
        missing = plan.prompts - len(kept)
        if missing > 0 and config.when_short == "error":
            raise ConfigError(
                f"algorithm.filter_groups.max_num_gen_batches: {config.max_num_gen_batches} batches of prompts gave "
                f"{len(kept)} groups that differ in {config.metric!r}, and step {step.number} needs {plan.prompts}; "
                "set it higher (0: no limit), rollout.n higher, or algorithm.filter_groups.when_short=fill"
            )
        chosen = (kept + uniform[: max(missing, 0)])[: plan.prompts]
        return dealt_again(lots, chosen, plan, mesh)


def set_scores(
    samples: Sequence[RolloutSample], scores: Sequence[float], names: Sequence[str], mesh: Mesh
) -> dict[str, float]:
    """`reward/sets/<name>`: the mean score of each prompt set's responses, of those with any. A collective call."""
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    for sample, score in zip(samples, scores, strict=True):
        sums[names.index(sample.prompt.source)] += torch.tensor([score, 1.0], dtype=torch.float64)
    totals = sum_over(mesh.dp_group, mesh.device)(sums).tolist()
    return {f"reward/sets/{name}": total / count for name, (total, count) in zip(names, totals, strict=True) if count}


def group_values(lot: Collected, metric: str, n: int, mesh: Mesh) -> list[list[float]]:
    """The metric's value of each response, by prompt of the batch, over all ranks. A collective call."""
    own = list(zip((sample.position for sample in lot.samples), _values(lot.scored, metric), strict=True))
    values = [value for _, value in sorted(pair for part in gather_objects(own, mesh.dp_group) for pair in part)]
    return [values[start : start + n] for start in range(0, len(values), n)]


def _values(scored: ScoredSamples, metric: str) -> Sequence[float]:
    if metric == "score":
        return scored.batch.totals
    if metric == "acc":
        assert scored.right is not None, "checked by require_sound"
        return [float(right) for right in scored.right]
    return scored.batch.parts[metric]


def dealt_again(lots: Sequence[Collected], chosen: Sequence[tuple[int, int]], plan: BatchPlan, mesh: Mesh) -> Collected:
    """The groups `chosen`, each a (lot, prompt), as the prompts 0, 1, … of one step: this rank's share of them.

    A sample travels to the rank that trains on it and no other, pickled. A collective call over the world.
    """
    prompts = {group: prompt for prompt, group in enumerate(chosen)}
    samples: list[RolloutSample] = []
    scores: list[ScoredSamples] = []
    for number, lot in enumerate(lots):
        rows = [row for row, sample in enumerate(lot.samples) if (number, sample.position // plan.n) in prompts]
        for row in rows:
            sample = lot.samples[row]
            position = prompts[number, sample.position // plan.n] * plan.n + sample.sample
            samples.append(dataclasses.replace(sample, position=position))
        scores.append(taken(lot.scored, rows))
    parts = [(samples, joined_rows(scores))]
    if mesh.dp_group.size() > 1:
        shares = [share_of(*parts[0], plan.positions_of(dp_rank)) for dp_rank in range(mesh.dp)]
        parts = exchange_objects(shares, mesh.dp_peers, mesh.world_group)
    everything = [sample for part, _ in parts for sample in part]
    row_at = {sample.position: row for row, sample in enumerate(everything)}
    mine = [row_at[position] for position in plan.positions_of(mesh.dp_rank)]
    return Collected([everything[row] for row in mine], taken(joined_rows([scored for _, scored in parts]), mine))


def share_of(
    samples: Sequence[RolloutSample], scored: ScoredSamples, positions: Sequence[int]
) -> tuple[list[RolloutSample], ScoredSamples]:
    """The samples at `positions`, perhaps none, and their scores, which keep all columns."""
    wanted = set(positions)
    rows = [row for row, sample in enumerate(samples) if sample.position in wanted]
    return [samples[row] for row in rows], taken(scored, rows)
