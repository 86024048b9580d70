"""Completions as flat tensors, and their way from the ranks that generated them to the ranks that train on them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from megappo.engines.rollout import Completion
from megappo.experience.sample import FinishReason
from megappo.models.routing import EXPERT_DTYPE
from megappo.parallel.exchange import RowExchange
from megappo.parallel.mesh import Mesh
from megappo.workers.dealing import Delivery

FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
HEADER_BYTES = 4 * 8
"""What travels with each sequence beside its 8 + 8 bytes a token and its text: four int64."""


def exchange_completions(
    positions: Sequence[int],
    completions: Mapping[int, Completion],
    delivery: Delivery,
    mesh: Mesh,
    experts: tuple[int, int] | None = None,
) -> dict[int, Completion]:
    """The completions that this rank trains on, by position. `positions` are those of its replica, all completed.

    `experts`: (layers, top_k) of `routed_experts`, which all of them have; None where they don't.
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
    result = _completions(arrived, token_ids, log_probs, bytes(text.numpy()))
    return result if experts is None else _with_experts(result, rows, exchange, experts)


def _with_experts(
    arrived: dict[int, Completion], rows: Sequence[Completion], exchange: RowExchange, shape: tuple[int, int]
) -> dict[int, Completion]:
    """The completions with their experts, which travel as bytes: gloo and NCCL send no int16."""
    sent = [row.routed_experts for row in rows if row.routed_experts is not None]
    assert len(sent) == len(rows), "the engine records the experts of every completion"
    lengths = torch.tensor([len(one) for one in sent], dtype=torch.int64)
    flat = torch.cat([*sent, torch.empty(0, *shape, dtype=EXPERT_DTYPE)]).flatten(1).view(torch.uint8)
    received_lengths = exchange.fixed(lengths)
    received = exchange.ragged(flat, lengths, received_lengths).view(EXPERT_DTYPE).unflatten(1, shape)
    parts = received.split(received_lengths.tolist())
    return {
        position: dataclasses.replace(completion, routed_experts=part.clone())
        for (position, completion), part in zip(arrived.items(), parts, strict=True)
    }


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
