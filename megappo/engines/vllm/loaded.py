"""What vLLM's loader made of the training weights, held against them, tensor by tensor.

Rows are looked for where the direct way would write them (`targets.py`). Weights that vLLM keeps packed in a kernel's
handle are read back through that kernel, with unit vectors. Nothing of vLLM is imported.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megappo.engines.hybrid.kinds import with_numbers
from megappo.engines.hybrid.targets import Target
from megappo.engines.rollout import WorstTensor
from megappo.engines.vllm.destination import VLLMDestination

UNIT_VECTORS = 512
"""That go through a kernel at once."""


@dataclass(frozen=True)
class Place:
    """Rows (columns for `axis` 1) of a tensor in an engine's parameter: `length` from `start` on lie from `offset` on,
    in the expert at `expert` of the first dimension where there are several."""

    name: str
    axis: int
    start: int
    offset: int
    length: int
    expert: int | None


def places_of(targets: Sequence[Target], tied_head: bool) -> dict[str, list[Place]]:
    """Hugging Face's name of a tensor → where this rank's engine holds parts of it. `tied_head`: the engine has a head
    that is its embedding, and may multiply with a copy of that."""
    places: dict[str, list[Place]] = {}
    for target in targets:
        names = [target.name]
        if tied_head and target.name == "model.embed_tokens.weight":
            names.append("lm_head.weight")
        for layer in target.layers:
            for place, expert in enumerate(target.experts or (None,)):
                offset = 0
                for segment in target.segments:
                    assert segment.source is not None, "every row of a generation parameter has a tensor it comes from"
                    source = with_numbers(segment.source, layer, expert)
                    places.setdefault(source, []).extend(
                        Place(
                            with_numbers(name, layer), target.axis, segment.start, offset, segment.length,
                            None if expert is None else place,
                        )
                        for name in names
                    )  # fmt: skip
                    offset += segment.length
    return places


class LoadedWeights:
    """The parameters of a vLLM model whose places are known. `tied`: its head is its embedding. `packs_experts`: the
    experts' matrices are kept in an order of their kernel's, and can't be read back (on a CPU)."""

    def __init__(
        self,
        vllm_model: nn.Module,
        targets: Sequence[Target],
        device: torch.device,
        *,
        tied: bool,
        packs_experts: bool,
    ) -> None:
        self._destination = VLLMDestination(vllm_model, device)
        self._places = places_of(targets, tied_head=tied and hasattr(vllm_model, "lm_head"))
        self._packs_experts = packs_experts

    @torch.no_grad()
    def worst(self, tensors: Iterable[tuple[str, Tensor]]) -> WorstTensor | None:
        """The parameter that is farthest from the `tensors` of training, all of which are taken; None where those that
        can be read are equal, with a note instead where others could not be."""
        found: dict[str, float] = {}
        unread: set[str] = set()
        for source, tensor in tensors:
            for place in self._places.get(source, ()):
                if place.expert is not None and self._packs_experts:
                    unread.add(place.name)
                    continue
                difference = self._difference(place, tensor)
                if difference:
                    found[place.name] = max(difference, found.get(place.name, 0.0))
        if found or not unread:
            return max((WorstTensor(value, name) for name, value in found.items()), default=None)
        note = (
            f"none of those that can be read back, and {len(unread)} can't be, which are packed for a CPU's kernels "
            f"({min(unread)}, …); hybrid.weights=direct leaves them as they are, and compares them too"
        )
        return WorstTensor(0.0, "", note)

    def _difference(self, place: Place, tensor: Tensor) -> float:
        """The largest |engine − training|; infinite where one of them is no number."""
        length = min(place.length, tensor.shape[place.axis] - place.start)
        if length <= 0:  # padding
            return 0.0
        expected, worst = tensor.narrow(place.axis, place.start, length), 0.0
        for first, engine in self._read(place, tensor, length):
            columns = expected if engine.ndim == 1 else expected.narrow(1, first, engine.shape[1])
            # In the engine's type: what a load rounds on its way is no mistake.
            off = (engine.float() - columns.to(engine.dtype).float()).abs().max().nan_to_num(nan=torch.inf)
            worst = max(worst, float(off))
        return worst

    def _read(self, place: Place, tensor: Tensor, length: int) -> Iterator[tuple[int, Tensor]]:
        """The engine's part of `tensor`: (first column, [rows, columns]), in every form in which it is kept. Where a
        matrix is cut over its columns, all of this rank's are the tensor's."""
        parameter = self._destination.parameter(place.name)
        if parameter.numel():
            whole = parameter.data if place.expert is None else parameter.data[place.expert]
            yield 0, whole.narrow(place.axis, place.offset, length)
        kernel = getattr(self._destination.module(place.name), "cpu_linear", None)
        if kernel is None or tensor.ndim != 2:
            return
        width = place.length if place.axis == 1 else tensor.shape[1]
        for first in range(0, width, UNIT_VECTORS):
            numbers = torch.arange(first, min(first + UNIT_VECTORS, width))
            units = nn.functional.one_hot(numbers, width).to(parameter.dtype)
            columns = kernel(units, parameter, None).T
            yield first, columns if place.axis == 1 else columns.narrow(0, place.offset, length)
