"""Completions as flat tensors, and their way from the ranks that generated them to the ranks that train on them."""

from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from megappo.engines.rollout import Completion
from megappo.experience.sample import FinishReason
from megappo.parallel.exchange import RowExchange
from megappo.parallel.mesh import Mesh
from megappo.workers.dealing import Delivery

FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
HEADER_BYTES = 4 * 8
"""What travels with each sequence beside its 8 + 8 bytes a token and its text: four int64."""


def exchange_completions(
    positions: Sequence[int], completions: Mapping[int, Completion], delivery: Delivery, mesh: Mesh
) -> dict[int, Completion]:
    """The completions that this rank trains on, by position. `positions` are those of its replica, all completed.

    Token ids, log-probs (float64, as generated) and texts (UTF-8) arrive bit for bit. A collective call over the world.
    """
    rows = [completions[position] for position in positions]
    texts = [row.text.encode("utf-8", "surrogatepass") for row in rows]
    headers = torch.tensor(
        [
            (position, len(row.token_ids), len(text), FINISH_REASONS.index(row.finish_reason))
            for position, row, text in zip(positions, rows, texts, strict=True)
        ],
        dtype=torch.int64,
    ).reshape(-1, 4)
    # An environment's token travels as its complement, which is negative: no further column for the mask.
    token_ids = torch.tensor([token for row in rows for token in _signed(row)], dtype=torch.int64)
    log_probs = torch.tensor([value for row in rows for value in row.log_probs], dtype=torch.float64)
    text = torch.frombuffer(bytearray(b"".join(texts) or b"\0"), dtype=torch.uint8)

    exchange = RowExchange(mesh.world_group, delivery.routes)
    arrived = exchange.fixed(headers)
    assert arrived[:, 0].tolist() == list(delivery.arrivals), "sequences arrive as they were dealt"
    token_ids = exchange.ragged(token_ids, headers[:, 1], arrived[:, 1])
    log_probs = exchange.ragged(log_probs, headers[:, 1], arrived[:, 1])
    text = exchange.ragged(text, headers[:, 2], arrived[:, 2])
    return _completions(arrived, token_ids, log_probs, bytes(text.numpy()))


def _completions(
    headers: torch.Tensor, token_ids: torch.Tensor, log_probs: torch.Tensor, text: bytes
) -> dict[int, Completion]:
    """Cuts the flat columns by the headers [rows, 4]."""
    ids, values = token_ids.tolist(), log_probs.tolist()
    completions: dict[int, Completion] = {}
    token = byte = 0
    for position, num_tokens, num_bytes, reason in headers.tolist():
        own = ids[token : token + num_tokens]
        completions[position] = Completion(
            tuple(max(one, ~one) for one in own),
            tuple(values[token : token + num_tokens]),
            text[byte : byte + num_bytes].decode("utf-8", "surrogatepass"),
            FINISH_REASONS[reason],
            tuple(one >= 0 for one in own) if any(one < 0 for one in own) else None,
        )
        token, byte = token + num_tokens, byte + num_bytes
    return completions


def _signed(completion: Completion) -> Sequence[int]:
    """Token ids, those of an environment as their complement."""
    if completion.mask is None:
        return completion.token_ids
    return [token if own else ~token for token, own in zip(completion.token_ids, completion.mask, strict=True)]
