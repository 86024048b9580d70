"""Moves what a role does not need between its phases to host memory, and back.

A storage is emptied in place and filled again, so that all views into it (DDP's buffers, the shards of the distributed
optimizer, a generation engine's aliases) are right afterwards. Its address may be another one then: who keeps
addresses, as a captured CUDA graph does, can't be given such parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megappo.engines.host_slabs import HostSlabs, Place, pageable_slab, pinned_slab

Kind = Literal["params", "grads", "optimizer"]
Tensors = Callable[[], Iterable[Tensor]]
"""The tensors of one kind that exist at the moment."""


class RoleMemory:
    """The storages of one role by kind, of which those of `offloaded` kinds wait in host memory when nobody needs them.

    On a GPU copies run on a stream of their own, into pinned memory; `begin` lets the computation go on meanwhile. On a
    CPU the host copy is a second buffer: nothing is gained, but all is done.
    """

    def __init__(
        self,
        tensors: Mapping[Kind, Tensors],
        offloaded: Iterable[Kind],
        device: torch.device,
        gather: Callable[[], None] = lambda: None,
    ) -> None:
        """`gather` makes parameters whole that the optimizer left to the next forward pass to gather; a collective."""
        self._tensors = dict(tensors)
        self._gather = gather
        stream = SideStream(device)
        # Gradients begin every update with zeros: there is nothing to keep.
        self._movable = {kind: Movable(tensors[kind], stream, keeps=kind != "grads") for kind in offloaded}
        self._held: set[Kind] = set()

    @property
    def is_offloaded(self) -> bool:
        """Whether any kind is ever moved."""
        return bool(self._movable)

    def need(self, *kinds: Kind) -> None:
        """Brings `kinds` back where they are out; they can be used when it returns, in the order of the stream."""
        for kind in kinds:
            self.begin(kind)
        for kind in kinds:
            if kind in self._movable:
                self._movable[kind].wait()

    def begin(self, kind: Kind) -> None:
        """Begins to bring `kind` back; `need` has to be called before it is used."""
        if kind in self._movable:
            self._movable[kind].back()

    def need_whole(self) -> None:
        """Brings the parameters back, each of them whole, for what reads them outside of a forward pass. All
        data-parallel ranks call it together, as they do `hold` and `rest`."""
        self.need("params")
        self._gather()

    def hold(self, kind: Kind) -> None:
        """Keeps `kind` here, whoever has the turn, until it is let go; parameters are whole."""
        if kind == "params":
            self.need_whole()
        self.need(kind)
        self._held.add(kind)

    def let_go(self, kind: Kind) -> None:
        self._held.discard(kind)

    def rest(self) -> bool:
        """Moves out all that is offloaded and not held; whether there was any."""
        if "params" in self._movable and "params" not in self._held and not self._movable["params"].is_out:
            self._gather()  # nothing may write to what is out
        moved = [movable.out() for kind, movable in self._movable.items() if kind not in self._held]
        return any(moved)

    def device_bytes(self, kind: Kind) -> int:
        """Bytes of a kind on the device at this moment."""
        of_kind = self._tensors.get(kind)
        return 0 if of_kind is None else sum(storage.nbytes() for storage in storages_of(of_kind()).values())

    @property
    def gathered_bytes(self) -> int:
        """Bytes of parameters that data-parallel ranks share, and that are whole here while they are held."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Bytes of what is out."""
        return sum(movable.host_bytes for movable in self._movable.values())

    @property
    def host_reserved_bytes(self) -> int:
        """Bytes of host memory that are held for it, pinned on a GPU, also while it is not out."""
        return sum(movable.host_reserved_bytes for movable in self._movable.values())


@dataclass(frozen=True)
class Memory:
    """The memory of all roles of a run. `gives_back`: what becomes free goes back to the device, where an engine takes
    memory that is not torch's; otherwise torch keeps it for the next phase."""

    roles: Sequence[RoleMemory] = ()
    gives_back: bool = False

    def rest(self) -> None:
        """The end of a phase."""
        moved = [role.rest() for role in self.roles]
        if any(moved) and self.gives_back and torch.cuda.is_available():
            torch.cuda.empty_cache()  # waits for the copies

    def need_all(self) -> None:
        """Brings everything back, for what reads whole roles: checkpoints and exports."""
        for role in self.roles:
            role.need("params", "grads", "optimizer")
            role.need_whole()

    def metrics(self, phase: str) -> dict[str, float]:
        """`memory/…` of this rank at the end of a phase, before anything is moved; nothing where nothing ever is."""
        if not any(role.is_offloaded for role in self.roles):
            return {}
        kinds: tuple[Kind, ...] = ("params", "grads", "optimizer")
        held = {f"memory/{phase}/{kind}": float(sum(role.device_bytes(kind) for role in self.roles)) for kind in kinds}
        host = {
            f"memory/{phase}/host": float(sum(role.host_bytes for role in self.roles)),
            f"memory/{phase}/host_reserved": float(sum(role.host_reserved_bytes for role in self.roles)),
        }
        return held | host


NO_MEMORY = Memory()


@dataclass(frozen=True)
class Slot:
    """A storage that is out: its size, and the place of its bytes in host memory, empty where they are not kept."""

    storage: torch.UntypedStorage
    size: int
    place: Place


class Movable:
    """The storages of `tensors`. `keeps`: their bytes come back with them; otherwise what comes back is undefined."""

    def __init__(self, tensors: Tensors, stream: SideStream, *, keeps: bool) -> None:
        self._tensors = tensors
        self._stream = stream
        self._keeps = keeps
        self._host = HostSlabs(pinned_slab if stream.is_cuda else pageable_slab)
        self._slots: list[Slot] = []
        self.is_out = False

    def out(self) -> bool:
        """Whether it was here."""
        if self.is_out:
            return False
        # An optimizer has its state after the first step, and another one after a checkpoint was loaded.
        storages = list(storages_of(self._tensors()).values())
        sizes = [storage.nbytes() for storage in storages]
        places = self._host.places(sizes) if self._keeps else [()] * len(sizes)
        self._slots = [Slot(*one) for one in zip(storages, sizes, places, strict=True)]
        with self._stream.behind():
            for slot in self._slots:
                for here, there in pieces(slot):
                    self._stream.copy(there, here)
        for slot in self._slots:
            slot.storage.resize_(0)
        self.is_out = True
        return True

    def back(self) -> None:
        """Begins to bring it here; `wait` before it is used."""
        if not self.is_out:
            return
        # Memory comes from the stream that computes, which will be the one that frees it.
        for slot in self._slots:
            slot.storage.resize_(slot.size)
        with self._stream.behind():
            for slot in self._slots:
                for here, there in pieces(slot):
                    self._stream.copy(here, there)
        self._slots = []
        self.is_out = False

    def wait(self) -> None:
        """Has the computing stream wait for what was begun."""
        self._stream.join()

    @property
    def host_bytes(self) -> int:
        return sum(piece.nbytes for slot in self._slots for piece in slot.place)

    @property
    def host_reserved_bytes(self) -> int:
        return self._host.num_bytes


class SideStream:
    """A CUDA stream for copies; on a CPU, the order of the program."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.is_cuda else None

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """While inside, copies run after all that the computing stream was given before, and beside what follows."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Within `behind`. The memory on the device is not given to others before the copy is done."""
        target.copy_(source, non_blocking=True)
        if self._stream is not None:
            (target if target.is_cuda else source).record_stream(self._stream)

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each storage once, by an address that does not change when it is emptied; empty ones left out."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages if storage.nbytes()}


def whole(storage: torch.UntypedStorage) -> Tensor:
    """[bytes] uint8: a view of all of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload,no-any-return]


def pieces(slot: Slot) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a storage that is here, each beside the piece of its place, both [bytes] uint8."""
    if slot.place:
        yield from zip(whole(slot.storage).split([piece.nbytes for piece in slot.place]), slot.place, strict=True)


def no_memory() -> RoleMemory:
    """Of a role that moves nothing."""
    return RoleMemory({}, (), torch.device("cpu"))
