"""Dynamic sampling with lots made by hand: where it ends, what it tells, and how the loop ends a run within a step."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.config.filter_groups import FilterGroupsConfig
from megappo.errors import ConfigError, ExitCode
from megappo.experience.batch import ExperienceBatch
from megappo.experience.sample import Prompt, RolloutSample
from megappo.observe.memory import PeakMemory
from megappo.rewards.reward import ScoredBatch
from megappo.trainer.baseline import NoBaseline
from megappo.trainer.collect import Collected, Collector, GroupFilter
from megappo.trainer.experience_metrics import experience_metrics
from megappo.trainer.loop import Loop, Step, throughput
from megappo.workers.reward import ScoredSamples
from megappo.workers.reward_sets import SetRewards
from megappo.workers.rollout import RolloutWorker

ALONE: Any = SimpleNamespace(dp_group=SimpleNamespace(size=lambda: 1), dp_rank=0, device=torch.device("cpu"))


class Told:
    """Stands for the reporter."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, dict[str, Any]]] = []

    def phase(self, step: int, name: str) -> None: ...

    def event(self, step: int, kind: str, **details: Any) -> None:
        self.events.append((step, kind, details))

    def finish(self, step: int, outcome: ExitCode) -> None:
        self.events.append((step, "finish", {"code": int(outcome)}))


class Lots:
    """Stands for the collector: two prompts with two responses each, scored as told, lot after lot."""

    def __init__(self, *scores: list[float]) -> None:
        self.scores = scores
        self.plan = SimpleNamespace(prompts=2, n=2, sequences=4, positions_of=lambda rank: range(4))
        self.mesh = ALONE
        self.made: list[int] = []

    def one_batch(self, step: Step, number: int) -> Collected:
        self.made.append(number)
        prompts = [Prompt(10 * number + index, "made", (1,), "x") for index in range(2)]
        samples = [
            RolloutSample(prompts[position // 2], position, position % 2, (2, 3), (0.0, 0.0), "t", "stop")
            for position in range(4)
        ]
        scores = self.scores[number]
        batch = ScoredBatch(list(scores), {"part": list(scores)}, [{} for _ in scores], [])
        return Collected(samples, ScoredSamples(batch, None))

    def describe(self, step: Step, lots: list[Collected]) -> None: ...


UNIFORM, ONE, BOTH = [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]


def step_of(told: Told, asked: list[bool] | None = None) -> Step:
    answers = iter(asked or [])
    return Step(4, told, 1, PeakMemory(), asked_to_stop=lambda: next(answers, False))  # type: ignore[arg-type]


def collect(lots: Lots, step: Step, **settings: Any) -> Collected | None:
    return GroupFilter(lots, FilterGroupsConfig(enable=True, **settings)).collect(step)  # type: ignore[arg-type]


def test_groups_of_several_lots_fill_a_step_and_each_further_lot_is_told() -> None:
    told, lots = Told(), Lots(UNIFORM, ONE, BOTH)
    collected = collect(lots, step_of(told))
    assert collected is not None
    assert [sample.prompt.index for sample in collected.samples] == [11, 11, 20, 20]
    assert collected.scored.batch.scores == [0.0, 1.0, 1.0, 0.0]
    assert told.events == [
        (4, "further_batch", {"batches": 1, "kept": 0, "needed": 2}),
        (4, "further_batch", {"batches": 2, "kept": 1, "needed": 2}),
    ]


def test_ten_batches_are_the_limit_unless_another_is_set_and_the_error_says_what_to_change() -> None:
    lots = Lots(*[UNIFORM] * 12)
    expected = (
        r"^algorithm\.filter_groups\.max_num_gen_batches: 10 batches of prompts gave 0 groups that differ in 'score', "
        r"and step 4 needs 2; set it higher \(0: no limit\), rollout\.n higher, or "
        r"algorithm\.filter_groups\.when_short=fill$"
    )
    with pytest.raises(ConfigError, match=expected):
        collect(lots, step_of(Told()))
    assert lots.made == list(range(10))


def test_zero_is_no_limit() -> None:
    lots = Lots(*[UNIFORM] * 11, BOTH)
    assert collect(lots, step_of(Told()), max_num_gen_batches=0) is not None
    assert lots.made == list(range(12))


def test_a_signal_is_heard_between_lots() -> None:
    lots = Lots(*[UNIFORM] * 9)
    step = step_of(Told(), [False, False, True])
    assert collect(lots, step, max_num_gen_batches=0) is None
    assert step.is_given_up and lots.made == [0, 1, 2]


@pytest.mark.parametrize(
    ("resume", "saved"), [("auto", []), ("runs/other/checkpoints/step-000003", [(3, {"index": 3})])]
)
def test_a_run_ends_as_it_was_before_the_step(resume: str, saved: list[Any]) -> None:
    """Given up are the first step after a resume, whose checkpoint is there, but where it may be another run's."""
    assert given_up_at(4, resume) == saved


def test_what_was_before_a_later_step_is_saved() -> None:
    assert given_up_at(5, "auto") == [(4, {"index": 14})]


def given_up_at(number: int, resume: str) -> list[tuple[int, dict[str, int]]]:
    """What a run that goes on after step 3 saves as it is given up in step `number`. Each step takes a prompt, the one
    that is given up many; it draws from Python's generator too."""
    loop: Any = object.__new__(Loop)
    told, place, saves, drawn = Told(), [3], [], []
    order = SimpleNamespace(state_dict=lambda: {"index": place[0]})
    memory = SimpleNamespace(rest=lambda: None, need_all=lambda: None)
    loop._parts = SimpleNamespace(order=order, controller=None, memory=memory, total_steps=9, roles={}, files={})
    loop._config = SimpleNamespace(trainer=SimpleNamespace(seed=0, resume=resume))
    loop._mesh, loop._peak, loop._reporter = SimpleNamespace(world_size=1), PeakMemory(), told
    loop._stop = SimpleNamespace(requested=lambda: loop.asked)
    loop._best = SimpleNamespace(state_dict=lambda: None)
    loop._last_saved, loop._named_step, loop.asked = 3, None if resume == "auto" else 3, False
    loop._start, loop._after = lambda: 3, lambda step: None

    def save(roles: Any, state: Any, files: Any) -> str:
        saves.append((state.step, state.data))
        drawn.append(random.random())
        return "there"

    loop._store = SimpleNamespace(save=save)
    for step in loop.steps():
        coming = random.getstate()
        place[0] += 11
        random.random()
        if step.number == number:
            loop.asked = True
            assert step.gives_up()
    assert loop.outcome is ExitCode.STOPPED_AFTER_SAVING
    random.setstate(coming)
    assert drawn == [random.random() for _ in saves]
    reason = f"a signal asked to stop, in the middle of step {number}, which is made anew"
    assert told.events[-2:] == [(number - 1, "stopped", {"reason": reason}), (number - 1, "finish", {"code": 75})]
    return saves


def dialogue(position: int, source: str, mask: list[bool], finish: Any = "stop") -> RolloutSample:
    """A response of several turns, True where the policy speaks, to a prompt of 3 tokens."""
    prompt = Prompt(position // 2, source, (1, 1, 1), "x")
    ids, log_probs = tuple(range(len(mask))), (0.0,) * len(mask)
    return RolloutSample(prompt, position, position % 2, ids, log_probs, "t", finish, mask=tuple(mask))


ONE_TURN, TWO_TURNS = [True, True], [True, False, False, True]
LOT_MASKS = [[ONE_TURN] * 4, [TWO_TURNS] * 3 + [ONE_TURN]]
LOT_SCORES = [[1.0, 1.0, 0.0, 1.0], [0.0, 2.0, 5.0, 4.0]]
SWITCHES = [
    {"hybrid/bytes_sent": 100.0, "hybrid/bytes_copied": 10.0, "hybrid/seconds": 0.5, "hybrid/turn_seconds": 2.0,
     "hybrid/peak_bytes": 7.0, "hybrid/held_awake_bytes": 3.0, "hybrid/probe_diff_mean": 0.25},
    {"hybrid/bytes_sent": 100.0, "hybrid/bytes_copied": 10.0, "hybrid/seconds": 0.75, "hybrid/turn_seconds": 1.0,
     "hybrid/peak_bytes": 5.0, "hybrid/held_awake_bytes": 4.0},
]  # fmt: skip


def collected_by(what: type[GroupFilter] | None) -> Step:
    """A step of the real collector, with or without dynamic sampling: prompts of set a, then of set b, in each lot."""
    numbers = iter(range(2))
    rollout: Any = object.__new__(RolloutWorker)
    rollout._turns, rollout._mesh = "some", ALONE

    def generate(*rest: Any, batch: int) -> list[RolloutSample]:
        made = enumerate(LOT_MASKS[batch])
        return [dialogue(at, "ab"[at // 2], mask, "error" if at == 3 else "stop") for at, mask in made]

    def score(samples: list[RolloutSample]) -> ScoredSamples:
        scores = [score - 0.25 for score in LOT_SCORES[next(numbers)]]
        tokens: Any = [(0.25,) for _ in scores]  # a part of each is the reward of a token
        return ScoredSamples(ScoredBatch(scores, {}, [{} for _ in scores], [], tokens), None)

    rollout.generate = generate
    switches = iter(SWITCHES)
    switch: Any = SimpleNamespace(to_rollout=lambda step: next(switches), to_training=lambda: None)
    reward: Any = SetRewards({"a": None, "b": None})  # type: ignore[dict-item]
    reward.score = score
    plan: Any = Lots().plan
    feed: Any = SimpleNamespace(next_batch=lambda: [None, None])
    collector = Collector(feed, plan, ALONE, switch, rollout, reward, NoBaseline())
    step = step_of(Told())
    assert (GroupFilter(collector, FilterGroupsConfig(enable=True)) if what else collector).collect(step) is not None
    return step


def test_a_steps_metrics_are_of_all_its_lots() -> None:
    """Of the first lot group b differs, of the second both do: the first responses to a are left out, and count."""
    step = collected_by(GroupFilter)
    assert step.metrics["filter_groups/num_gen_batches"] == 2
    expected = {
        "hybrid/bytes_sent": 200.0, "hybrid/bytes_copied": 20.0, "hybrid/seconds": 1.25, "hybrid/turn_seconds": 3.0,
        "hybrid/peak_bytes": 7.0, "hybrid/held_awake_bytes": 4.0, "hybrid/probe_diff_mean": 0.25,
        "rollout/turns": (4 * 1 + 3 * 2 + 1) / 8, "rollout/environment_tokens": 3 * 2 / 8,
        "rollout/environment_errors": 2.0,
        "reward/sets/a": (1 + 1 + 0 + 2) / 4, "reward/sets/b": (0 + 1 + 5 + 4) / 4,
    }  # fmt: skip
    assert {name: step.metrics[name] for name in expected} == expected
    step._clock._phases["rollout"] = 4.0
    step.finish(num_tokens=40)
    assert step.metrics["rollout/tokens_per_second"] == pytest.approx(16 / 4)  # each response has 2 of the policy


def test_a_step_of_one_lot_says_what_that_lot_says() -> None:
    step = collected_by(None)
    assert {name: step.metrics[name] for name in SWITCHES[0]} == SWITCHES[0]
    assert step.metrics["rollout/turns"] == 1 and step.metrics["reward/sets/b"] == 0.5


def test_generated_tokens_make_the_rate_of_the_rollout() -> None:
    metrics = {"time/step": 10.0, "time/rollout": 4.0, "response_length/total": 20.0}
    expected = {"perf/tokens_per_second_per_gpu": 300 / 10 / 2, "rollout/tokens_per_second": 100 / 4}
    assert throughput(metrics, num_tokens=300, num_generated=100, world_size=2) == expected


def test_a_response_is_at_its_limit_with_the_environments_tokens() -> None:
    """Of 4 tokens: two turns with 2 of the environment between them, 4 of the policy, 3, and none."""
    masks = [TWO_TURNS, [True] * 4, [True] * 3, []]
    batch = ExperienceBatch.from_samples([dialogue(at, "a", mask) for at, mask in enumerate(masks)])
    zeros = torch.zeros(batch.num_tokens)
    batch = batch.fill(token_rewards=zeros, old_log_probs=batch.rollout_log_probs.clone(), scores=torch.zeros(4))
    found = experience_metrics(batch, ScoredBatch([0.0] * 4, {}, [{}] * 4, []), zeros, ALONE, 4)
    assert found["response_length/clip_ratio"] == 2 / 4
    assert (found["response_length/mean"], found["response_length/max"]) == ((2 + 4 + 3 + 0) / 4, 4)
