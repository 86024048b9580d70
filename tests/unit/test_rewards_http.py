"""Rewards of a service behind HTTP, against a local server: batches, retries, time-outs, and answers that are none."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megappo.config.reward import RewardConfig
from megappo.errors import ConfigError
from megappo.rewards import http
from megappo.rewards.build import build_reward
from megappo.rewards.reward import ScoredBatch
from tests.support.samples import make_sample


class Service(ThreadingHTTPServer):
    """Scores a response that is a number with it; other responses say how the service misbehaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.headers.append(dict(self.headers))
            number = sum(request == body for request in self.server.requests)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        try:
            self._answer([sample["response"] for sample in body["samples"]], number)
        except BrokenPipeError:
            pass  # the other side has given up waiting
        finally:
            with self.server.lock:
                self.server.at_once -= 1

    def _answer(self, texts: list[str], number: int) -> None:
        match texts[0].partition(" ")[0]:
            case "busy-once" if number == 1:
                self._send(503, b"try again")
            case "busy":
                self._send(503, b"never again")
            case "wrong":
                self._send(400, b"no such model")
            case "drop":
                self.connection.close()
            case "hang":
                time.sleep(3)
            case "trickle":
                self.send_response(200)
                self.end_headers()
                for _ in range(30):
                    self.wfile.write(b" ")
                    time.sleep(0.1)
            case "text":
                self._send(200, b"<html>")
            case "few":
                self._send(200, json.dumps({"scores": []}).encode())
            case "list":
                self._send(200, b"[1]")
            case _:
                time.sleep(0.05)
                self._send(200, json.dumps({"scores": [value(text) for text in texts]}).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def value(text: str) -> Any:
    known = {
        "nan": float("nan"), "word": "7", "null": None, "busy-once": 4.0,
        "object": {"score": 2, "details": {"why": "so"}, "token_scores": [0.5]},
        "tokens": [0.25], "too many": [1, 2], "empty": {},
    }  # fmt: skip
    return known[text] if text in known else float(text)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(http, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Service()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def score(service: Service, *texts: str, timeout: float = 20.0, **settings: Any) -> ScoredBatch:
    url = f"http://127.0.0.1:{service.server_port}/score"
    part = {"name": "judge", "kind": "http", "url": url, "weight": 0.5} | settings
    config = RewardConfig(parts=[part], timeout_seconds=timeout, failed_score=-1.0, max_failed_fraction=1.0)  # type: ignore[list-item]
    samples = [make_sample(text, position=place) for place, text in enumerate(texts)]
    with build_reward(config) as scorer:
        return scorer.score(samples)


def test_scores_come_in_batches_and_in_order(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    scored = score(service, *"123456789", batch_size=2, max_concurrent=3, token_env="JUDGE_KEY")
    assert scored.parts == {"judge": [1, 2, 3, 4, 5, 6, 7, 8, 9]}
    assert scored.scores == [0.5 * number for number in range(1, 10)]
    assert sorted(len(request["samples"]) for request in service.requests) == [1, 2, 2, 2, 2]
    assert 1 < service.most_at_once <= 3
    assert {headers["Authorization"] for headers in service.headers} == {"Bearer secret"}
    first = next(request for request in service.requests if request["samples"][0]["response"] == "1")
    assert (first["part"], first["samples"][0]) == (
        "judge",
        {
            "prompt": "prompt", "messages": [], "response": "1", "answer": "5", "response_ids": [2],
            "finish_reason": "stop", "extra": {"level": 3},
        },
    )  # fmt: skip


def test_rewards_of_tokens_and_details(service: Service) -> None:
    scored = score(service, "object", "tokens", "3")
    assert scored.scores == [1.0, 0.0, 1.5]
    assert scored.parts == {"judge": [2.5, 0.25, 3.0]}
    assert scored.token_scores == [(0.25,), (0.125,), None]
    assert scored.details == [{"judge": {"why": "so"}}, {}, {}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nan", "returned nan; a score must be finite"),
        ("word", "returned '7' (str)"),
        ("null", "returned None"),
        ("too many", "returned 2 token rewards for a response of 1 tokens"),
        ("empty", "returned an object without score"),
    ],
)
def test_a_wrong_score_costs_its_sample_alone(service: Service, text: str, message: str) -> None:
    scored = score(service, "1", text, "2")
    assert scored.parts == {"judge": [1.0, -1.0, 2.0]}
    assert [failure.index for failure in scored.failed] == [1] and message in scored.failed[0].error


# (response, requests that the service sees, what the failure says)
BROKEN = [
    ("busy", 3, "status 503 Service Unavailable: never again"),
    ("wrong", 1, "status 400 Bad Request: no such model"),
    ("drop", 3, "RemoteDisconnected"),
    ("text", 1, "the answer is not JSON"),
    ("few", 1, "0 scores for 1 samples"),
    ("list", 1, 'the answer has no list "scores"'),
]


@pytest.mark.parametrize(("text", "attempts", "message"), BROKEN)
def test_a_broken_answer_costs_its_batch_alone(service: Service, text: str, attempts: int, message: str) -> None:
    scored = score(service, "1", text, "2", batch_size=1)
    assert scored.parts == {"judge": [1.0, -1.0, 2.0]}
    assert [failure.index for failure in scored.failed] == [1] and message in scored.failed[0].error
    assert sum(request["samples"][0]["response"] == text for request in service.requests) == attempts


def test_a_busy_service_is_asked_again(service: Service) -> None:
    assert score(service, "busy-once").parts == {"judge": [4.0]}
    assert len(service.requests) == 2


@pytest.mark.parametrize("text", ["hang", "trickle"])
def test_a_service_that_is_late_is_given_up(service: Service, text: str) -> None:
    begin = time.monotonic()
    scored = score(service, text, "1", batch_size=1, retries=0, timeout=0.5)
    assert time.monotonic() - begin < 2.5
    assert scored.parts == {"judge": [-1.0, 1.0]}
    assert "TimeoutError" in scored.failed[0].error


def test_no_service_and_no_token(service: Service) -> None:
    service.server_close()
    assert "Connection refused" in score(service, "1", retries=1).failed[0].error
    with pytest.raises(ConfigError, match=r"token_env names NOBODY_SET_THIS, which is not set"):
        score(service, "1", token_env="NOBODY_SET_THIS")


def test_requests_are_under_way_before_their_scores_are_asked_for(service: Service) -> None:
    part = {"name": "judge", "kind": "http", "url": f"http://127.0.0.1:{service.server_port}/", "batch_size": 2}
    with build_reward(RewardConfig(parts=[part])) as scorer:  # type: ignore[list-item]
        samples = [make_sample(text, position=place) for place, text in enumerate("123")]
        for sample in samples:
            scorer.begin(sample)
        end = time.monotonic() + 10
        while not service.requests and time.monotonic() < end:
            time.sleep(0.01)
        assert len(service.requests) == 1  # the third sample waits for a fourth, or for `score`
        changed = make_sample("9", position=1)
        assert scorer.score([samples[0], changed, samples[2]]).scores == [1.0, 9.0, 3.0]
