"""Log-prob, entropy and exact KL on a vocabulary cut over 1, 2 and 4 ranks: errors against float64, and peak memory.

One start on four ranks; needs no model. Rank 0 writes, for each TP size, the largest numbers of any rank.
"""

import argparse
import json
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.parallel.vocab import vocab_parallel_kl, vocab_parallel_log_probs
from tests.support.peak_memory import peak_bytes

TEMPERATURE = 0.7
VOCABULARY, PADDED = 1000, 1024
TOKENS, CHUNK = 37, 8
LARGE_TOKENS, LARGE_VOCABULARY, LARGE_CHUNK = 512, 16384, 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    results: dict[str, dict[str, float]] = {}
    for tp in (1, 2, 4):
        groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, world, tp)]
        group = cast(ProcessGroup, groups[rank // tp])
        own = {
            f"{name} {dtype}": value
            for dtype in ("float64", "float32", "bfloat16")
            for name, value in errors(group, getattr(torch, dtype)).items()
        } | {f"memory {name}": value for name, value in memory_ratios(group).items()}
        everywhere: list[dict[str, float] | None] = [None] * world
        dist.all_gather_object(everywhere, own)
        results[f"tp{tp}"] = {name: max(part[name] for part in everywhere if part is not None) for name in own}
    if rank == 0:
        arguments.out.write_text(json.dumps(results))
    dist.destroy_process_group()


def errors(group: ProcessGroup, dtype: torch.dtype) -> dict[str, float]:
    """Largest |difference| of values and of gradients on this rank, against float64 over the whole vocabulary.

    Logits are rounded to `dtype` first, and gradients are compared in it.
    """
    generator = torch.Generator().manual_seed(5)
    whole = (3 * torch.randn(TOKENS, PADDED, dtype=torch.float64, generator=generator)).to(dtype)
    whole[:, VOCABULARY:] = torch.nan  # what stands in the padding must not be read
    reference = (whole + torch.randn(TOKENS, PADDED, dtype=torch.float64, generator=generator)).to(dtype)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    weights = torch.randn(3, TOKENS, dtype=torch.float64, generator=generator)

    dense = whole.double().requires_grad_()
    log_p = (dense[:, :VOCABULARY] / TEMPERATURE).log_softmax(-1)
    log_q = (reference.double()[:, :VOCABULARY] / TEMPERATURE).log_softmax(-1)
    expected = (
        log_p.gather(1, targets[:, None])[:, 0],
        -(log_p.exp() * log_p).sum(-1),
        (log_p.exp() * (log_p - log_q)).sum(-1),
    )

    columns = shard(PADDED, group)
    logits = whole[:, columns].clone().requires_grad_()
    log_probs, entropy = log_probs_of(logits, targets, group, VOCABULARY, CHUNK)
    kl = kl_of(logits, reference[:, columns], group, VOCABULARY, CHUNK)
    found = {}
    for number, (name, ours) in enumerate((("log-prob", log_probs), ("entropy", entropy), ("exact KL", kl))):
        theirs, weight = expected[number], weights[number]
        (gradient,) = torch.autograd.grad((ours * weight).sum(), logits, retain_graph=True)
        (wanted,) = torch.autograd.grad((theirs * weight).sum(), dense, retain_graph=True)
        found[name] = float((ours.double() - theirs).detach().abs().max())
        found[f"gradient of {name}"] = float((gradient.double() - wanted[:, columns]).abs().max())
    return found


def memory_ratios(group: ProcessGroup) -> dict[str, float]:
    """Peak of forward and backward on this rank's bfloat16 columns, in units of the naive float32 version's."""
    generator = torch.Generator().manual_seed(6)
    columns = LARGE_VOCABULARY // group.size()
    logits, reference = (
        torch.randn(LARGE_TOKENS, columns, generator=generator).bfloat16().requires_grad_() for _ in range(2)
    )
    targets = torch.randint(0, columns, (LARGE_TOKENS,), generator=generator)

    def chunked() -> Tensor:
        log_probs, entropy = log_probs_of(logits, targets, group, LARGE_VOCABULARY, LARGE_CHUNK)
        return torch.autograd.grad((log_probs + entropy).sum(), logits)[0]

    def naive() -> Tensor:
        log_p = (logits.float() / TEMPERATURE).log_softmax(-1)
        return torch.autograd.grad((log_p.gather(1, targets[:, None])[:, 0] + entropy_of(log_p)).sum(), logits)[0]

    def chunked_kl() -> Tensor:
        return torch.autograd.grad(kl_of(logits, reference, group, LARGE_VOCABULARY, LARGE_CHUNK).sum(), logits)[0]

    def naive_kl() -> Tensor:
        log_p = (logits.float() / TEMPERATURE).log_softmax(-1)
        log_q = (reference.detach().float() / TEMPERATURE).log_softmax(-1)
        return torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits)[0]

    return {
        "log-prob and entropy": peak_bytes(chunked) / peak_bytes(naive),
        "exact KL": peak_bytes(chunked_kl) / peak_bytes(naive_kl),
    }


def entropy_of(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


def log_probs_of(
    logits: Tensor, targets: Tensor, group: ProcessGroup, vocab_size: int, chunk: int
) -> tuple[Tensor, Tensor]:
    return vocab_parallel_log_probs(
        logits, targets, vocab_size=vocab_size, temperature=TEMPERATURE, tp_group=group, chunk_tokens=chunk,
        with_entropy=True,
    )  # fmt: skip


def kl_of(logits: Tensor, reference: Tensor, group: ProcessGroup, vocab_size: int, chunk: int) -> Tensor:
    return vocab_parallel_kl(
        logits, reference, vocab_size=vocab_size, temperature=TEMPERATURE, tp_group=group, chunk_tokens=chunk
    )


def shard(width: int, group: ProcessGroup) -> slice:
    size = width // group.size()
    return slice(group.rank() * size, (group.rank() + 1) * size)


if __name__ == "__main__":
    main()
