"""Rewards of a service behind HTTP: batches of samples as JSON, posted from threads, with time-outs and retries.

A request is `{"part": name, "samples": [{"prompt", "messages", "response", "answer", "response_ids", "finish_reason",
"extra"}, …]}`, its answer `{"scores": [score, …]}` in the same order, where a score is a number, a list of one number
a response token, or an object with `score`, and `details` and `token_scores` if there are any.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

from megappo.config.reward import RewardPartConfig
from megappo.errors import ConfigError
from megappo.experience.sample import RolloutSample
from megappo.rewards.function import as_reward
from megappo.rewards.reward import FailedReward, Reward

FIRST_PAUSE_SECONDS = 0.5
"""Before the second attempt; each later pause is twice as long."""
COME_BACK = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that may be gone at the next attempt."""
CHUNK_BYTES = 1 << 16


class AnswerError(ValueError):
    """The service answered, and not with scores; another attempt would not help."""


class HttpPart:
    """Scores samples with one service; `timeout` is the seconds of one attempt.

    At most `max_concurrent` requests are under way. Work goes on in threads: waiting for a network needs no process.
    """

    def __init__(self, config: RewardPartConfig, timeout: float) -> None:
        assert config.url is not None, "checked by build_reward"
        self._config = config
        self._url = config.url
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if config.token_env is not None:
            token = os.environ.get(config.token_env)
            if not token:
                raise ConfigError(
                    f"reward part {config.name!r}: token_env names {config.token_env}, which is not set; export it, or "
                    "leave token_env out"
                )
            self._headers["Authorization"] = f"Bearer {token}"
        self._threads = ThreadPoolExecutor(config.max_concurrent, thread_name_prefix=f"reward-{config.name}")
        self._gathering: list[tuple[int, RolloutSample]] = []
        self._posted: dict[int, tuple[Future[list[Reward | FailedReward]], int]] = {}

    def submit(self, key: int, sample: RolloutSample) -> None:
        """Adds a sample to the batch that is being gathered, which is posted when it is full."""
        self._gathering.append((key, sample))
        if len(self._gathering) == self._config.batch_size:
            self._post_gathered()

    def collect(self, keys: Sequence[int]) -> dict[int, Reward | FailedReward]:
        """The outcomes of samples that were submitted; waits for them. Failures have index 0."""
        self._post_gathered()
        outcomes: dict[int, Reward | FailedReward] = {}
        for key in keys:
            future, place = self._posted.pop(key)
            outcomes[key] = future.result()[place]
        return outcomes

    def close(self) -> None:
        """Lets requests that are under way end by themselves, and starts no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _post_gathered(self) -> None:
        batch, self._gathering = self._gathering, []
        if batch:
            future = self._threads.submit(self._scores, [sample for _, sample in batch])
            self._posted |= {key: (future, place) for place, (key, _) in enumerate(batch)}

    def _scores(self, samples: list[RolloutSample]) -> list[Reward | FailedReward]:
        """One batch, with its retries."""
        name = self._config.name
        try:
            answer = self._answer(json.dumps({"part": name, "samples": list(map(as_json, samples))}, default=str))
            scores = _scores_of(answer, len(samples), self._url)
        except (OSError, HTTPException, ValueError) as error:
            reason = f"{self._url}: {type(error).__name__}: {error}"
            return [FailedReward(0, name, reason) for _ in samples]
        return [_outcome(score, sample, name, self._url) for score, sample in zip(scores, samples, strict=True)]

    def _answer(self, body: str) -> Any:
        for attempt in range(self._config.retries + 1):
            try:
                return self._attempt(body)
            except urllib.error.HTTPError as error:
                if error.code not in COME_BACK or attempt == self._config.retries:
                    text = error.read(1000).decode("utf-8", "replace").strip()
                    raise AnswerError(f"status {error.code} {error.reason}: {text}") from error
            except (OSError, HTTPException):
                if attempt == self._config.retries:
                    raise
            time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, body: str) -> Any:
        request = urllib.request.Request(self._url, body.encode(), self._headers, method="POST")
        deadline = time.monotonic() + self._timeout
        with urllib.request.urlopen(request, timeout=self._timeout) as response:
            # The time-out of a socket is one of silence; a service that trickles would never meet it.
            content = bytearray()
            while chunk := response.read1(CHUNK_BYTES):
                content += chunk
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no complete answer within reward.timeout_seconds={self._timeout:g}")
        try:
            return json.loads(content)
        except json.JSONDecodeError as error:
            raise AnswerError(f"the answer is not JSON: {bytes(content[:200])!r}") from error


def as_json(sample: RolloutSample) -> dict[str, Any]:
    """What a service is told of a sample."""
    return {
        "prompt": sample.prompt.text,
        "messages": [dict(turn) for turn in sample.prompt.messages],
        "response": sample.text,
        "answer": sample.prompt.answer,
        "response_ids": list(sample.response_ids),
        "finish_reason": sample.finish_reason,
        "extra": dict(sample.prompt.extra),
    }


def _scores_of(answer: Any, count: int, url: str) -> list[Any]:
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        raise AnswerError('the answer has no list "scores"')
    if len(scores) != count:
        raise AnswerError(f"{len(scores)} scores for {count} samples")
    return scores


def _outcome(score: Any, sample: RolloutSample, part: str, url: str) -> Reward | FailedReward:
    try:
        if isinstance(score, dict):
            if "score" not in score and "token_scores" not in score:
                raise TypeError(f"{url} returned an object without score: {score!r}")
            tokens = score.get("token_scores")
            score = Reward(
                score.get("score", 0.0), score.get("details") or {}, None if tokens is None else tuple(tokens)
            )
        return as_reward(score, url, len(sample.response_ids))
    except (TypeError, ValueError) as error:
        return FailedReward(0, part, str(error))
