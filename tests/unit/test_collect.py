"""Dynamic sampling with lots made by hand: where it ends, what it tells, and how the loop ends a run within a step."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.config.filter_groups import FilterGroupsConfig
from megappo.errors import ConfigError, ExitCode
from megappo.experience.sample import Prompt, RolloutSample
from megappo.observe.memory import PeakMemory
from megappo.rewards.reward import ScoredBatch
from megappo.trainer.collect import Collected, GroupFilter
from megappo.trainer.loop import Loop, Step
from megappo.workers.reward import ScoredSamples


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
        group = SimpleNamespace(size=lambda: 1)
        self.mesh: Any = SimpleNamespace(dp_group=group, dp_rank=0, device=torch.device("cpu"))
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
