"""vLLM's model as the destination of a plan: its parameters are bound to training memory, or written in place.

Nothing of vLLM is imported: the model is a torch module whose parameters have vLLM's names.
"""

import torch
from torch import Tensor, nn

from megappo.engines.hybrid.messages import Views
from megappo.engines.hybrid.transfers import Transfer

# vLLM 0.32 keeps the experts one module deeper than 0.20 did.
_DEEPER = (".experts.w", ".experts.routed_experts.w")


class VLLMDestination:
    """Finds parameters by name anew each time: vLLM replaces Parameter objects after loading (0.20.2), in place.

    vLLM's sleep mode keeps addresses; where memory that is written to has moved nevertheless, it is found anew.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._found: dict[str, tuple[nn.Module, str]] = {}
        self._bound: dict[tuple[str, int | None], tuple[dict[str, nn.Parameter | None], str]] = {}
        self._written: dict[tuple[str, int | None], tuple[dict[str, nn.Parameter | None], str, int]] = {}

    def alias(self, transfer: Transfer, views: Views) -> None:
        """Binds the whole parameter to the training shard's memory; nothing where it is bound."""
        if self.is_alias(transfer, views):
            return
        parameter, view = self.parameter(transfer.target_name), views[0]
        assert parameter.shape == view.shape and parameter.dtype == view.dtype and view.is_contiguous(), (
            f"vLLM's {transfer.target_name} is {tuple(parameter.shape)} {parameter.dtype}, training's shard "
            f"{tuple(view.shape)} {view.dtype}, contiguous: {view.is_contiguous()}"
        )
        self._give_memory(transfer.target_name, view)

    def is_alias(self, transfer: Transfer, views: Views) -> bool:
        # Asked for every parameter in every switch: what takes time is done once.
        if transfer.key not in self._bound:
            self.parameter(transfer.target_name)
            module, leaf = self._found[transfer.target_name]
            self._bound[transfer.key] = (module._parameters, leaf)
        parameters, leaf = self._bound[transfer.key]
        parameter = parameters[leaf]
        return parameter is not None and parameter.data_ptr() == views[0].data_ptr()

    def has_moved(self) -> bool:
        """Whether a parameter that `view` gave a part of is in other memory now."""
        return any(
            (parameter := parameters[leaf]) is None or parameter.data_ptr() != address
            for parameters, leaf, address in self._written.values()
        )

    def current(self, transfer: Transfer) -> Views | None:
        return (self._part(self.parameter(transfer.target_name).data, transfer),)

    def view(self, transfer: Transfer) -> Tensor:
        """The part of vLLM's parameter that `transfer` fills; a parameter on meta gets its memory now."""
        name = transfer.target_name
        if self.parameter(name).is_meta:
            self._give_memory(name, torch.empty_like(self.parameter(name), device=self._device))
        tensor = self.parameter(name).data
        module, leaf = self._found[name]
        self._written[transfer.key] = module._parameters, leaf, tensor.data_ptr()
        return self._part(tensor, transfer)

    @staticmethod
    def _part(tensor: Tensor, transfer: Transfer) -> Tensor:
        axis, run = transfer.axis, transfer.experts
        if run is not None:
            tensor = tensor.narrow(0, run.target_place, run.count)
            axis += 1
        return tensor.narrow(axis, transfer.target_offset, transfer.length)

    def parameter(self, name: str) -> nn.Parameter:
        """vLLM's parameter of this name; AssertionError where this version has none."""
        if name not in self._found:
            self._found[name] = self._owner(name)
        module, leaf = self._found[name]
        parameter = getattr(module, leaf)
        assert isinstance(parameter, nn.Parameter), f"vLLM's {name} is no parameter any more"
        return parameter

    def module(self, name: str) -> nn.Module:
        """The module that has this parameter."""
        self.parameter(name)
        return self._found[name][0]

    def _give_memory(self, name: str, memory: Tensor) -> None:
        """Makes `memory` the parameter's; one without memory so far (on the meta device) is exchanged wherever it is
        used, with the attributes that vLLM has given it."""
        old = self.parameter(name)
        if not old.is_meta:
            old.data = memory
            return
        new = nn.Parameter(memory, requires_grad=False)
        new.__dict__.update(old.__dict__)
        for module in self._model.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter is old:
                    setattr(module, leaf, new)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        for candidate in (name, name.replace(*_DEEPER)):
            path, _, leaf = candidate.rpartition(".")
            try:
                module = self._model.get_submodule(path)
            except AttributeError:
                continue
            if hasattr(module, leaf):
                return module, leaf
        raise AssertionError(f"this version of vLLM has no parameter {name}; use hybrid.weights=load")
