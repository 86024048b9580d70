"""The most memory that a computation holds at once beside what was there before, on the CPU."""

from collections.abc import Callable

import torch


def peak_bytes(compute: Callable[[], object]) -> int:
    """Largest sum of the allocations of `compute` that were alive together, from torch's own records of them."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        kept = compute()
    del kept
    records = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for record in sorted(records, key=lambda event: event.start_ns()):
        held += record.nbytes()
        peak = max(peak, held)
    assert peak > 0, "torch records allocations of the CPU"
    return peak
