"""Environments: the calculator, replies as tokens, asking with time limits, and turns with a scripted engine."""

import asyncio
import dataclasses
import socketserver
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from megappo.config.multi_turn import MultiTurnConfig
from megappo.data.replies import ReplyEncoder
from megappo.data.tokenizer import load_tokenizer
from megappo.engines.rollout import Completion, GenerationRequest, Progress, SamplingParams
from megappo.environments.asking import Answer, Failure, Seat, ask_all
from megappo.environments.calculator import Calculator, calculated
from megappo.environments.environment import Reply
from megappo.environments.load import load_environment
from megappo.errors import ConfigError, DataError
from megappo.experience.batch import ExperienceBatch
from megappo.experience.sample import Prompt, RolloutSample
from megappo.workers.turns import ReplicaRanks, TurnTaking
from tests.support.tokenizers import char_ids, save_sentencepiece_tokenizer, save_tokenizer

PROMPT = Prompt(0, "made", tuple(char_ids("q")), "q")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("12+3", "15"), ("2*(3-5)", "-4"), ("7/2", "3.5"), ("6/3", "2"), ("1/3", "0.3333333333"), ("7//2", "3"),
        ("7%4", "3"), ("0.1+0.2", "0.3"), (" 5 ", "5"), ("99999999999*99999999999", "9999999999800000000001"),
        ("1/0", "error"), ("9**9**9", "error"), ("__import__('os')", "error"), ("1+", "error"), ("", "error"),
        ("1e308*1e308/3", "error"), ("*".join(["1e308"] * 20), "error"), ("*".join(["1e200"] * 20), "1" + "0" * 4000),
        ("True+1", "error"), ("(" * 150 + "1", "error"), ("1+" * 150 + "1", "error"),
    ],
)  # fmt: skip
def test_calculated(expression: str, expected: str) -> None:
    assert calculated(expression) == expected


def test_calculator_answers_calls_and_ends_otherwise() -> None:
    calculator = Calculator(PROMPT)
    assert calculator.answer("so <<2+2>> and <<12*12>>") == Reply("144")
    assert calculator.answer("the answer is 4") is None
    assert calculator.answer("12>>") is None
    assert calculator.answer("so <<2+2>> is 4") is None
    for rest in ("\n", " \n\n", ".", ">", ")\n", "x"):  # what is in one token with the end of the call
        assert calculator.answer(f"<<1>> so <<2+2>>{rest}") == Reply("4")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>'
    assert calculator.answer(call) == Reply("12", role="tool")
    assert calculator.answer(call + "<tool_call>{broken}</tool_call>") == Reply("12\nerror", role="tool")


class Slow:
    def __init__(self, prompt: Prompt) -> None:
        self.turns = 0

    def answer(self, turn: str) -> Reply | None:
        self.turns += 1
        if turn == "sleep":
            time.sleep(5)
        if turn == "raise":
            raise KeyError("gone")
        return None if turn == "end" else Reply(f"{turn} {self.turns}")


class SlowAsync(Slow):
    async def answer(self, turn: str) -> Reply | None:  # type: ignore[override]
        self.turns += 1
        if turn == "sleep":
            await asyncio.sleep(5)
        if turn == "raise":
            raise KeyError("gone")
        return None if turn == "end" else Reply(f"{turn} {self.turns}")


class Hanging:
    """Each turn names another way to take 3 seconds, or the thread that answers it."""

    turns_at_once = asyncio.Semaphore(1)

    def __init__(self, prompt: Prompt) -> None:
        if prompt.text == "slow":
            time.sleep(3)
        self.lock = asyncio.Lock()

    async def answer(self, turn: str) -> Reply:
        async with self.turns_at_once if turn == "semaphore" else self.lock:
            await asyncio.sleep(0.01)  # others of the semaphore wait: it binds itself to the loop
            if turn == "thread":
                await asyncio.to_thread(time.sleep, 3)
            if turn == "block":
                await asyncio.sleep(0.1)
                time.sleep(3)
            return Reply(str(threading.get_ident()))


class EchoingServer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(b"got " + line)


class Connected:
    """Asks a server on the port that is the prompt's answer, through one connection for all turns."""

    def __init__(self, prompt: Prompt) -> None:
        self.port = prompt.answer
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def answer(self, turn: str) -> Reply:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        writer.write(f"{turn}\n".encode())
        return Reply((await reader.readline()).decode().strip())


class Wrong:
    def __init__(self, prompt: Prompt) -> None:
        raise RuntimeError("no room")

    def answer(self, turn: str) -> str:
        return "text"


@pytest.mark.parametrize("kind", [Slow, SlowAsync])
def test_asking_is_bounded_and_errors_are_answers(kind: type) -> None:
    turns = ["hello", "sleep", "raise", "end", "hello"]
    seats = [Seat(kind, PROMPT) for _ in turns]
    begin = time.monotonic()
    first = ask_all(seats, turns, 0.3)
    assert time.monotonic() - begin < 2
    slow = Failure("no answer within rollout.multi_turn.timeout_seconds 0.3")
    expected: list[Answer] = [Reply("hello 1"), slow, Failure("KeyError: 'gone'"), None, Reply("hello 1")]
    assert first == expected
    assert ask_all([seats[0]], ["again"], 0.3) == [Reply("again 2")]  # the same object


def asked_within(seconds: float, seats: Sequence[Seat], turns: Sequence[str], limit: float) -> list[Answer]:
    begin = time.monotonic()
    answers = ask_all(seats, turns, limit)
    assert time.monotonic() - begin < seconds
    return answers


def test_the_limit_of_async_environments_holds_whatever_they_do() -> None:
    slow = "no answer within rollout.multi_turn.timeout_seconds 0.3"
    blocked = slow + ": a call without await blocks the event loop; use `await asyncio.to_thread(…)` for it"
    seat = Seat(Hanging, PROMPT)
    (first,) = ask_all([seat], ["x"], 5)
    # Threads that hang hold up no later turn, though a pool of them is full.
    assert asked_within(2, [Seat(Hanging, PROMPT) for _ in range(40)], ["thread"] * 40, 0.3) == [Failure(slow)] * 40
    assert ask_all([seat], ["x"], 5) == [first]  # the same loop
    assert asked_within(2, [seat, Seat(Hanging, PROMPT)], ["x", "block"], 0.3) == [first, Failure(blocked)]
    (second,) = asked_within(2, [Seat(Hanging, PROMPT)], ["x"], 5)  # a loop of its own, while the other is blocked
    assert isinstance(second, Reply) and second != first
    making = Seat(Hanging, dataclasses.replace(PROMPT, text="slow"))
    assert asked_within(2, [making], ["x"], 0.3) == [Failure(blocked)]
    (third,) = asked_within(2, [Seat(Hanging, PROMPT)], ["x"], 5)
    assert isinstance(third, Reply) and third not in (first, second)


def test_a_loop_that_was_blocked_and_is_no_more_is_kept() -> None:
    (first,) = ask_all([Seat(Hanging, PROMPT)], ["x"], 5)
    (failure,) = ask_all([Seat(Hanging, PROMPT)], ["block"], 0.3)
    assert isinstance(failure, Failure)
    time.sleep(3.2)
    assert ask_all([Seat(Hanging, PROMPT)], ["x"], 5) == [first]


def test_async_environments_keep_their_loop_over_turns() -> None:
    listening = socketserver.ThreadingTCPServer(("127.0.0.1", 0), EchoingServer)
    listening.daemon_threads = True
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    seat = Seat(Connected, dataclasses.replace(PROMPT, answer=str(listening.server_address[1])))
    for turn in ("one", "two", "three"):
        assert ask_all([seat], [turn], 5) == [Reply(f"got {turn}")]
    listening.shutdown()
    seats = [Seat(Hanging, PROMPT) for _ in range(3)]
    for _ in range(3):
        answers = ask_all(seats, ["semaphore"] * 3, 5)
        assert answers[0] is not None and isinstance(answers[0], Reply) and answers == [answers[0]] * 3


def test_an_environment_that_cannot_be_made_or_answers_nonsense() -> None:
    assert ask_all([Seat(Wrong, PROMPT)], ["a"], 1.0) == [Failure("RuntimeError: no room")]
    seat = Seat(Wrong, PROMPT)
    seat._environment = Wrong.__new__(Wrong)  # type: ignore[assignment]
    (answer,) = ask_all([seat], ["a"], 1.0)
    assert answer == Failure("answer() returned 'text' (str); return a Reply or None")


def test_loading() -> None:
    assert load_environment("megappo.environments.calculator:Calculator") is Calculator
    with pytest.raises(ConfigError, match=r"has no class 'Calc' with a method answer.* one: Calculator"):
        load_environment("megappo.environments.calculator:Calc")
    with pytest.raises(ConfigError, match="no module 'nowhere_at_all'"):
        load_environment("nowhere_at_all:Env")


def test_replies_as_tokens(tmp_path: Path) -> None:
    plain = ReplyEncoder(load_tokenizer(save_tokenizer(tmp_path / "plain")))
    assert plain.text_ids("15") == char_ids("15")
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        plain.message_ids("user", "15", [])
    chat = ReplyEncoder(load_tokenizer(save_tokenizer(tmp_path / "chat", chat=True)))
    assert chat.message_ids("user", "15", [7]) == char_ids("[user]15[assistant]")
    with pytest.raises(DataError, match="no role tool here"):
        chat.message_ids("tool", "15", [])


@pytest.mark.parametrize("prepends", [True, False])
def test_a_reply_follows_the_turn_without_a_space(tmp_path: Path, prepends: bool) -> None:
    tokenizer = load_tokenizer(save_sentencepiece_tokenizer(tmp_path, prepends=prepends))
    assert tokenizer.decode([*tokenizer.encode("so 12+3="), *ReplyEncoder(tokenizer).text_ids("15")]) == "so 12+3=15"
    tokenizer._backend.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
    tokens = tokenizer._backend.convert_ids_to_tokens(ReplyEncoder(tokenizer).message_ids("tool", "15", []))
    assert tokens == list("[tool]15[a]")


def test_a_template_that_closes_turns_does_not_close_twice(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, chat=True))
    tokenizer._backend.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    encoder = ReplyEncoder(tokenizer)
    after = [*char_ids("[tool]15"), 2, *char_ids("[assistant]")]
    assert encoder.message_ids("tool", "15", [*char_ids("a"), 2]) == after  # the model wrote its end token
    assert encoder.message_ids("tool", "15", char_ids("a")) == [2, *after]  # it was stopped by a string


class Script:
    """An engine whose turns are texts by (turn, request); keeps what it was asked."""

    def __init__(self, turns: Sequence[Sequence[str]], reasons: dict[str, str]) -> None:
        self.turns, self.reasons = list(turns), reasons
        self.asked: list[list[GenerationRequest]] = []
        self.stops: list[tuple[str, ...]] = []

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        self.asked.append(list(requests))
        self.stops.append(sampling.stop)
        texts = self.turns[len(self.asked) - 1]
        return [
            Completion(tuple(char_ids(text)), (-1.0,) * len(text), text, self.reasons.get(text, "stop"))  # type: ignore[arg-type]
            for text in texts
        ]


class Doubles:
    """Answers `3` with `33`; `x` is an error, `z` the end."""

    stop = ("]",)

    def __init__(self, prompt: Prompt) -> None:
        pass

    def answer(self, turn: str) -> Reply | None:
        if turn == "x":
            raise ValueError("x")
        return None if turn == "z" else Reply(2 * turn)


def test_turns_masks_limits_and_noise(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    config = MultiTurnConfig(enable=True, environment="a:B", max_turns=3, max_tokens_per_turn=5)
    turns = TurnTaking(config, Doubles, ReplyEncoder(tokenizer), tokenizer.decode, ReplicaRanks(0, 0, None))
    script = Script([["3", "x", "z", "cut", "abcd"], ["4"], ["5"]], {"cut": "length"})
    heard: list[Completion] = []
    keys = [partial(lambda number, turn: 10 * number + turn, number) for number in range(5)]
    dialogues = [turns.dialogue(PROMPT, key, heard.append) for key in keys]
    done = turns.generate(script, dialogues, SamplingParams(max_tokens=12, stop=("!",)))  # type: ignore[arg-type]
    assert [one.text for one in done] == ["3334445", "x", "z", "cut", "abcd"]
    assert [one.finish_reason for one in done] == ["stop", "error", "stop", "length", "length"]
    assert done[0].token_ids == tuple(char_ids("3334445"))
    assert done[0].mask == (True, False, False, True, False, False, True)
    assert done[0].log_probs == (-1.0, 0.0, 0.0, -1.0, 0.0, 0.0, -1.0)
    assert all(one.mask is None for one in done[1:])
    first, second, third = script.asked
    assert [request.noise_key for request in first] == [0, 10, 20, 30, 40]
    assert [request.max_tokens for request in first] == [5] * 5
    (again,) = second  # `abcd` would need 4 + 8 tokens of 12: no room for the model
    assert again.prompt_ids == tuple(char_ids("q333")) and again.noise_key == 1 and again.max_tokens == 5
    assert third[0].prompt_ids == tuple(char_ids("q333444")) and third[0].noise_key == 2
    assert script.stops == [("!", "]")] * 3
    assert sorted(one.text for one in heard) == sorted(one.text for one in done)

    samples = [
        RolloutSample(PROMPT, 0, 0, one.token_ids, one.log_probs, one.text, one.finish_reason, one.mask) for one in done
    ]
    assert [sample.num_turns for sample in samples] == [3, 1, 1, 1, 1]
    assert [sample.num_policy_tokens for sample in samples] == [3, 1, 1, 3, 4]
    batch = ExperienceBatch.from_samples(samples[:2])
    assert batch.response_mask.tolist() == [False, True, False, False, True, False, False, True, False, True]
    assert batch.rollout_log_probs.tolist() == [0, -1, 0, 0, -1, 0, 0, -1, 0, -1]


class Routed(Script):
    """Records 100 · (turn + 1) + place for each token that a turn computes, all but its last one."""

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        completions = super().generate(requests, sampling, progress)
        return [
            dataclasses.replace(each, routed_experts=self._record(len(request.prompt_ids) + len(each.token_ids)))
            for request, each in zip(requests, completions, strict=True)
        ]

    def _record(self, length: int) -> torch.Tensor:
        record = 100 * len(self.asked) + torch.arange(length, dtype=torch.int16)
        record[-1] = -1
        return record[:, None, None]


def test_a_token_keeps_the_experts_of_the_turn_that_computed_it_first(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    config = MultiTurnConfig(enable=True, environment="a:B", max_turns=3, max_tokens_per_turn=5)
    turns = TurnTaking(config, Doubles, ReplyEncoder(tokenizer), tokenizer.decode, ReplicaRanks(0, 0, None))
    script = Routed([["38", "z"], ["4"], ["5"]], {})
    dialogues = [turns.dialogue(PROMPT, lambda turn: turn) for _ in range(2)]
    first, second = turns.generate(script, dialogues, SamplingParams(max_tokens=12))  # type: ignore[arg-type]
    # `q38` and its reply `3838`, `4` and `44`, `5`: a turn's last token is computed in the next one.
    assert first.text == "383838" + "444" + "5" and second.text == "z"
    assert first.routed_experts is not None and second.routed_experts is not None
    expected = [100, 101, 202, 203, 204, 205, 206, 307, 308, 309, -1]
    assert first.routed_experts.flatten().tolist() == expected
    assert second.routed_experts.flatten().tolist() == [100, -1]
