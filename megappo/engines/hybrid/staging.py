"""Memory of a transfer beyond parameters: what it takes goes through here and is counted as it lives and dies."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class MemoryMeter:
    """The most bytes that were alive at once, of the memory that was asked of it and of the tensors it was shown.

    Memory is alive as long as any view of it is.
    """

    def __init__(self) -> None:
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self.peak_bytes = 0

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """[nbytes] uint8, uninitialised."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.watch([memory])
        return memory

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that were made elsewhere."""
        self._alive = [(storage, size) for storage, size in self._alive if not storage.expired()]
        self._alive += [(StorageWeakRef(tensor.untyped_storage()), tensor.nbytes) for tensor in tensors]
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive))


class DevicePeak:
    """What torch's allocator gave out on a GPU at most since this was made, beyond what it had given out then.

    Its own peak is left as it is, for others read it: where it was higher before, there is nothing to see, and
    `extra_bytes` is 0.
    """

    def __init__(self) -> None:
        statistics = self._statistics()
        self._held, self._peak = statistics["current"], statistics["peak"]

    @property
    def extra_bytes(self) -> int:
        peak = self._statistics()["peak"]
        return peak - self._held if peak > self._peak else 0

    @staticmethod
    def _statistics() -> dict[str, int]:
        """As they were asked for, without what the allocator adds to round them up."""
        return dict(torch.cuda.memory_stats_as_nested_dict()["requested_bytes"]["all"])
