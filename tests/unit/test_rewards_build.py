"""The reward section at work: weighted sums, user functions that misbehave, time limits, and when a run stops."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megappo.config.reward import RewardConfig
from megappo.errors import ConfigError, RewardError
from megappo.rewards.build import NODE_CORES, RewardScorer, build_reward, share_of_cores
from megappo.rewards.function import load_function
from tests.support.samples import make_sample

# One module of reward functions for all tests: a process start costs more than what it then does.
MODULE = '''
import asyncio, os, sys, time, threading
from megappo.rewards.reward import Reward

NUMBER = 3

def length(sample):
    return len(sample.text)

def by_text(sample):
    """What the text says: a score, or a way to misbehave."""
    text = sample.text
    if text == "raise": raise KeyError("this text")
    if text == "hang": time.sleep(1000)
    if text == "spin": 9 ** 9 ** 9
    if text == "exit": sys.exit(3)
    if text == "crash": os._exit(41)
    if text == "none": return None
    if text == "word": return "7"
    if text == "nan": return float("nan")
    if text == "true": return True
    if text == "details": return Reward(2.0, {"level": sample.prompt.extra["level"]})
    if text == "object": return Reward(2.0, {"bad": object()})
    if text == "child":
        import subprocess
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if text == "pid": return os.getpid()
    if text == "tokens": return [0.5] * len(sample.response_ids)
    if text == "both": return Reward(2.0, {"why": "so"}, (0.5,))
    if text == "too many": return [0.5, 1.0, 2.0]
    print("a reward may print")
    return float(text)

async def judge(sample):
    if sample.text == "hang": await asyncio.sleep(1000)
    if sample.text == "block": time.sleep(1000)
    if sample.text == "raise": raise OSError("the judge is away")
    await asyncio.sleep(0.3)
    return Reward(float(sample.text), {"loop": id(asyncio.get_running_loop())})

class Scorer:
    def __call__(self, sample): return 0.25

scorer = Scorer()
def two(sample, other): return 0
def many(sample, scale=2.0, *rest, **more): return scale
'''


@pytest.fixture(scope="module", autouse=True)
def rewards_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards_of_test.py").write_text(MODULE)
    (folder / "broken_rewards.py").write_text("import os\n1 / 0\n")
    (folder / "needy_rewards.py").write_text("import a_package_nobody_has\n")
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.path[:] = path


def config(*parts: dict[str, Any], **settings: Any) -> RewardConfig:
    return RewardConfig(parts=parts, **{"timeout_seconds": 20.0, "max_failed_fraction": 1.0} | settings)  # type: ignore[arg-type]


def function(name: str, weight: float = 1.0) -> dict[str, Any]:
    return {"name": name, "kind": "function", "function": f"rewards_of_test:{name}", "weight": weight}


EXACT = {"name": "exact", "kind": "exact_match"}


def test_inline_rules_need_no_process() -> None:
    scorer = build_reward(config(EXACT, {"name": "number", "kind": "gsm8k", "weight": 0.5}))
    before = children()
    scored = scorer.score([make_sample("5"), make_sample("it is 5"), make_sample("6"), make_sample("")])
    assert scored.scores == [1.5, 0.5, 0, 0]
    assert scored.parts == {"exact": [1, 0, 0, 0], "number": [1, 1, 0, 0]}
    assert (scored.failed, scored.num_failed) == ([], 0)
    assert children() == before
    assert scorer.score([]).scores == []


def test_a_missing_ground_truth_is_a_failure() -> None:
    scored = build_reward(config(EXACT, failed_score=-1.0)).score([make_sample("5", None), make_sample("5")])
    assert scored.scores == [-1, 1]
    assert "set data.answer_key" in scored.failed[0].error


def test_parts_are_weighted_and_processes_are_kept() -> None:
    parts = [EXACT, function("length", weight=-0.25), {"name": "math", "kind": "math_verify", "weight": 2.0}]
    before = set(children())
    with build_reward(config(*parts), num_processes=2) as scorer:
        scored = scorer.score([make_sample("5"), make_sample("$4+1$"), make_sample("6")])
        assert scored.parts == {"exact": [1, 0, 0], "length": [1, 5, 1], "math": [1, 1, 0]}
        assert scored.scores == [1 - 0.25 + 2, -1.25 + 2, -0.25]
        first = set(children()) - before
        assert 1 <= len(first) <= 2
        scorer.score([make_sample("7")])
        assert first <= set(children())
    assert set(children()) == before


@pytest.fixture(scope="module")
def misbehaving(rewards_module: Path) -> Iterator[RewardScorer]:
    with build_reward(config(function("by_text"), failed_score=-7.0, timeout_seconds=1.5), num_processes=1) as scorer:
        yield scorer


# (text, what the failure says)
MISBEHAVIOUR = [
    ("raise", "KeyError: 'this text'"),
    ("hang", "no result within reward.timeout_seconds=1.5"),
    ("spin", "no result within reward.timeout_seconds=1.5"),
    ("exit", "the reward process ended with exit code 3 while scoring this sample"),
    ("crash", "the reward process ended with exit code 41 while scoring this sample"),
    ("none", "rewards_of_test:by_text returned None (NoneType); return a float"),
    ("word", "rewards_of_test:by_text returned '7' (str)"),
    ("nan", "rewards_of_test:by_text returned nan; a score must be finite"),
    ("too many", "rewards_of_test:by_text returned 3 token rewards for a response of 1 tokens (sample.response_ids)"),
    ("object", "TypeError: Object of type object is not JSON serializable"),
    ("abc", "ValueError: could not convert string to float: 'abc'"),
]


@pytest.mark.parametrize(("text", "message"), MISBEHAVIOUR)
def test_a_misbehaving_function_costs_its_sample_alone(misbehaving: RewardScorer, text: str, message: str) -> None:
    scored = misbehaving.score([make_sample("1.5"), make_sample(text), make_sample("2.5")])
    assert scored.scores == [1.5, -7, 2.5]
    assert [(failure.index, failure.part) for failure in scored.failed] == [(1, "by_text")]
    assert message in scored.failed[0].error


def test_results_that_are_fine(misbehaving: RewardScorer) -> None:
    scored = misbehaving.score([make_sample("true"), make_sample("details"), make_sample("-3")])
    assert scored.scores == [1, 2, -3]
    assert scored.details == [{}, {"by_text": {"level": 3}}, {}]


def test_rewards_of_tokens_are_weighted_and_added(misbehaving: RewardScorer) -> None:
    parts = [function("by_text", weight=0.5), function("length", weight=0.25), function("by_text") | {"name": "again"}]
    with build_reward(config(*parts), num_processes=1) as scorer:
        scored = scorer.score([make_sample("tokens"), make_sample("both"), make_sample("3")])
    assert scored.token_scores == [(0.75,), (0.75,), None]
    assert scored.scores == [0.25 * 6, 0.5 * 2 + 0.25 * 4 + 2.0, 0.5 * 3 + 0.25 + 3.0]
    assert scored.parts == {"by_text": [0.5, 2.5, 3.0], "length": [6, 4, 1], "again": [0.5, 2.5, 3.0]}
    assert scored.details[1] == {"by_text": {"why": "so"}, "again": {"why": "so"}}


def test_slow_parts_begin_before_scores_are_asked_for(rewards_module: Path) -> None:
    """What was begun is not called again; what came out otherwise is scored anew, and late answers are not failures."""
    parts = [function("by_text"), function("judge", weight=2.0)]
    with build_reward(config(*parts, timeout_seconds=0.8), num_processes=2) as scorer:
        scorer.score([make_sample("1"), make_sample("1", position=1)])  # both processes are there
        begun = [make_sample(str(number), position=number) for number in range(4)]
        for sample in begun:
            scorer.begin(sample)
        time.sleep(1.2)  # longer than a call may take
        begin = time.monotonic()
        other = make_sample("7", position=2)
        scored = scorer.score([begun[3], other, begun[0]])
        assert time.monotonic() - begin < 1.5
    assert scored.scores == [9.0, 21.0, 0.0] and not scored.failed


def test_a_function_that_is_gone_is_told_when_scores_are_asked_for(rewards_module: Path) -> None:
    file = rewards_module / "rewards_that_go.py"
    file.write_text("def score(sample): return 1.0")
    part = {"name": "one", "kind": "function", "function": "rewards_that_go:score"}
    with build_reward(config(part), num_processes=1) as scorer:
        file.write_text("1 / 0")
        sample = make_sample("1")
        for _ in range(40):
            scorer.begin(sample)  # never raises: generation goes on
            time.sleep(0.05)
        with pytest.raises(RewardError, match="rewards_that_go"):
            scorer.score([sample])


def test_a_killed_function_takes_its_children_along(misbehaving: RewardScorer) -> None:
    group = int(misbehaving.score([make_sample("pid")]).scores[0])
    misbehaving.score([make_sample("child")])
    end = time.monotonic() + 5
    while members_alive(group) and time.monotonic() < end:
        time.sleep(0.05)  # the system takes a moment to end what was killed
    assert members_alive(group) == []


def test_a_process_that_dies_while_idle_is_replaced(misbehaving: RewardScorer) -> None:
    (before,) = misbehaving.score([make_sample("pid")]).scores
    os.kill(int(before), 9)
    time.sleep(0.2)
    scored = misbehaving.score([make_sample("pid"), make_sample("1")])
    assert scored.num_failed == 0
    assert scored.scores[0] != before


def test_async_functions_run_together() -> None:
    texts = ["1", "raise", "hang"] + ["2"] * 30
    with build_reward(config(function("judge"), timeout_seconds=1.5), num_processes=1) as scorer:
        scorer.score([make_sample("1")])
        start = time.monotonic()
        scored = scorer.score([make_sample(text) for text in texts])
        seconds = time.monotonic() - start
        assert scored.scores == [1, 0, 0] + [2] * 30
        assert seconds < 5, "30 calls of 0.3 s each ran one after the other"
        errors = [failure.error for failure in scored.failed]
        assert "OSError: the judge is away" in errors[0]
        assert errors[1] == "no result within reward.timeout_seconds=1.5"
        again = scorer.score([make_sample("1")])
        assert again.details[0] == scored.details[0], "clients that a function keeps need one event loop"
        blocked = scorer.score([make_sample("block")])
        assert blocked.failed[0].error == "no result within reward.timeout_seconds=1.5"


def test_other_callables() -> None:
    with build_reward(config(function("scorer"), function("many")), num_processes=1) as scorer:
        assert scorer.score([make_sample("x")]).parts == {"scorer": [0.25], "many": [2.0]}


# (failures of 4 samples, fraction allowed, whether the run stops)
FRACTIONS = [
    (1, 0.25, False),
    (2, 0.25, True),
    (2, 0.5, False),
    (3, 0.5, True),
    (1, 0.0, True),
    (0, 0.0, False),
    (4, 1.0, False),
]


@pytest.mark.parametrize(("num_failed", "allowed", "stops"), FRACTIONS)
def test_too_many_failures_stop_the_run(num_failed: int, allowed: float, stops: bool) -> None:
    samples = [make_sample("5", None if index < num_failed else "5") for index in range(4)]
    # Two failing parts of one sample are one failed sample.
    scorer = build_reward(config(EXACT, {"name": "number", "kind": "gsm8k"}, max_failed_fraction=allowed))
    if not stops:
        assert scorer.score(samples).num_failed == num_failed
        return
    with pytest.raises(RewardError) as error:
        scorer.score(samples)
    message = str(error.value)
    assert f"rewards failed on {num_failed} of 4 samples, more than reward.max_failed_fraction={allowed:g}" in message
    assert "the first, of part 'exact':\nprompt 0 of made has no ground truth" in message


def test_all_ranks_stop_together() -> None:
    """This rank's samples are fine; with the other's 3 failures of 4 the step has 3 of 6."""
    scorer = build_reward(config(EXACT, max_failed_fraction=0.4))
    fine = [make_sample("5"), make_sample("5")]
    with pytest.raises(RewardError, match=r"3 of 6 samples, .* none of them on this rank"):
        scorer.score(fine, sum_over_ranks=lambda counts: [counts[0] + 3, counts[1] + 4])
    scorer.score(fine, sum_over_ranks=lambda counts: [counts[0] + 2, counts[1] + 4])


# (function, message)
IMPORTS = [
    ("rewards_of_tset:length", r"no module 'rewards_of_tset' in .*; did you mean 'rewards_of_test'\?"),
    ("rewards_of_test:lenght", r"has no 'lenght'; did you mean 'length'\?"),
    ("rewards_of_test:NUMBER", "'NUMBER' is a int, not a function"),
    ("rewards_of_test:two", r"must take one argument, the sample; its signature is two\(sample, other\)"),
    ("rewards_of_test", "write module:function, for example"),
    (":length", "write module:function"),
    ("broken_rewards:f", r"(?s)'broken_rewards' fails to import:.*line 2.*ZeroDivisionError"),
    ("needy_rewards:f", "module 'needy_rewards' needs 'a_package_nobody_has'"),
    ("rewards_of_test.inner:f", "no module 'rewards_of_test.inner'"),
]


@pytest.mark.parametrize(("path", "message"), IMPORTS)
def test_functions_that_cannot_be_imported(path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        build_reward(config({"name": "f", "kind": "function", "function": path}))


def test_functions_of_installed_packages_are_found() -> None:
    assert load_function("os.path:basename") is os.path.basename


# (parts, message)
WRONG_PARTS = [
    ([EXACT, EXACT], r"reward.parts\[1\].name: 'exact' is taken"),
    ([{"name": "f", "kind": "function"}], r"reward.parts\[0\].function: None with kind 'function'"),
    ([EXACT | {"function": "a:b"}], r"reward.parts\[0\].function: 'a:b' with kind 'exact_match'"),
]


@pytest.mark.parametrize(("parts", "message"), WRONG_PARTS)
def test_wrong_parts(parts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward(config(*parts))


def test_a_killed_trainer_leaves_no_process(rewards_module: Path, tmp_path: Path) -> None:
    """A trainer that dies by SIGKILL while a function hangs takes the reward process with it."""
    program = tmp_path / "trainer.py"
    root = Path(__file__).resolve().parents[2]
    program.write_text(
        f"""
import os, sys, threading
sys.path[:0] = [{str(root)!r}, {str(rewards_module)!r}]
from megappo.config.reward import RewardConfig
from megappo.rewards.build import build_reward
from tests.support.samples import make_sample
scorer = build_reward(RewardConfig(parts=[dict(name="f", kind="function", function="rewards_of_test:by_text")]), 1)
print(int(scorer.score([make_sample("pid")]).scores[0]), flush=True)
scorer.score([make_sample("hang")])
"""
    )
    trainer = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    child = int(trainer.stdout.readline())
    time.sleep(0.5)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 10
    while members_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members_alive(child) == []
    trainer.stdout.close()


def process_fields() -> dict[int, list[str]]:
    """Of each process its state, parent and process group: the fields of /proc/PID/stat after the name."""
    fields = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
    return fields


def members_alive(group: int) -> list[int]:
    """Processes of a group, without zombies that nobody has waited for."""
    return [pid for pid, (state, _, own) in process_fields().items() if int(own) == group and state != "Z"]


def children() -> list[int]:
    """Processes that this one has started and that lead a group of their own, as reward processes do."""
    found = process_fields().items()
    return [
        pid for pid, (state, parent, own) in found if int(parent) == os.getpid() and int(own) == pid and state != "Z"
    ]


@pytest.mark.parametrize(
    ("seen", "ranks", "on_node", "expected"),
    [
        (6, None, None, 6), (64, None, None, 8),  # alone
        (64, 8, None, 8), (32, 8, None, 4), (16, 8, None, 2), (4, 8, None, 1),  # torchrun: all see all
        (8, 8, 64, 8), (4, 8, 32, 4), (2, 8, 16, 2), (1, 8, 8, 1),  # tasks that Slurm has bound
        (32, 8, 32, 4), (128, 8, 32, 4),  # tasks that it has not: the job's cores, or the whole machine's
        (6, 1, 6, 6), (1, 8, 64, 1),
    ],
)  # fmt: skip
def test_reward_processes_are_the_rank_s_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, seen: int, ranks: int | None, on_node: int | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(seen)))
    for name, value in (("LOCAL_WORLD_SIZE", ranks), (NODE_CORES, on_node)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, str(value))
    assert share_of_cores() == expected
