"""What vLLM's loader made of the weights, compared tensor by tensor: plain parameters, and some packed in kernels."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megappo.config.grid import GenerationGrid, TrainingGrid
from megappo.engines.hybrid.kinds import Kinds
from megappo.engines.rollout import WorstTensor
from megappo.engines.vllm import transfer
from megappo.engines.vllm.loaded import LoadedWeights, places_of
from megappo.engines.vllm.targets import VLLMTargets
from megappo.engines.vllm.transfer import LoadTransfer
from megappo.models.families import FAMILIES
from megappo.models.families.published import PUBLISHED

SIZE, PLACE = 2, 1
HEAD = 32


class Model:
    """Random tensors of a small model, and the targets of one rank of two."""

    def __init__(self, name: str) -> None:
        config = dict(PUBLISHED[name]) | {"num_hidden_layers": 1, "vocab_size": 130, "hidden_size": 128}
        family = FAMILIES[config["model_type"]]
        self.shape = family.shape(config)
        weight_map = family.weight_map(self.shape, "lm")
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            tensor: torch.randn(tuple(shape), generator=generator) for tensor, shape in weight_map.tensors.items()
        }
        grid = GenerationGrid(TrainingGrid(tp=SIZE), SIZE)
        self.targets = VLLMTargets(Kinds.of(weight_map), self.shape, grid, expert_parallel=False).of(PLACE)

    def layer(self, name: str) -> Tensor:
        return self.tensors[f"model.layers.0.{name}"]

    def half(self, name: str, axis: int = 0) -> Tensor:
        return self.layer(name).chunk(SIZE, dim=axis)[PLACE]

    def vocabulary(self, name: str) -> Tensor:
        """Padded to 192 rows; the second half holds 34 of the 130, and padding."""
        whole = self.tensors[name]
        return torch.cat([whole, torch.zeros(62, 128)]).chunk(SIZE)[PLACE]


def engine_of(model: Model, packed: frozenset[str]) -> nn.Module:
    """As vLLM holds the second half; the matrices of `packed` are in kernels alone, as on a CPU."""
    norms = [name for name in model.tensors if "norm" in name]
    parameters = {name: model.tensors[name] for name in norms}
    parameters["model.embed_tokens.weight"] = model.vocabulary("model.embed_tokens.weight")
    parameters["lm_head.weight"] = model.vocabulary(
        "model.embed_tokens.weight" if model.shape.tied else "lm_head.weight"
    )
    prefix = "model.layers.0."
    for kind in ("weight", *(["bias"] if "model.layers.0.self_attn.q_proj.bias" in model.tensors else [])):
        parts = [model.half(f"self_attn.{part}_proj.{kind}") for part in "qkv"]
        parameters[f"{prefix}self_attn.qkv_proj.{kind}"] = torch.cat(parts)
    parameters[f"{prefix}self_attn.o_proj.weight"] = model.half("self_attn.o_proj.weight", 1)
    if model.shape.moe is None:
        gate_up = [model.half(f"mlp.{part}_proj.weight") for part in ("gate", "up")]
        parameters[f"{prefix}mlp.gate_up_proj.weight"] = torch.cat(gate_up)
        parameters[f"{prefix}mlp.down_proj.weight"] = model.half("mlp.down_proj.weight", 1)
    else:
        parameters[f"{prefix}mlp.gate.weight"] = model.layer("mlp.gate.weight")
        for leaf, parts, axis in (("w13_weight", ("gate", "up"), 0), ("w2_weight", ("down",), 1)):
            stacked = [
                torch.cat([model.half(f"mlp.experts.{expert}.{part}_proj.weight", axis) for part in parts])
                for expert in range(model.shape.moe.num_experts)
            ]
            parameters[f"{prefix}mlp.experts.{leaf}"] = torch.stack(stacked)
    root = nn.Module()
    for name, value in parameters.items():
        path, _, leaf = name.rpartition(".")
        module = root
        for step in path.split("."):
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        parameter = nn.Parameter(value.clone(), requires_grad=False)
        if name in packed:
            pack(module, value.clone())
            # An embedding is looked up too.
            parameter = parameter if "embed" in name or "lm_head" in name else nn.Parameter(torch.empty(0))
        module.register_parameter(leaf, parameter)
    return root


def pack(module: Any, matrix: Tensor) -> None:
    module.cpu_linear = lambda x, weight, bias: F.linear(x, matrix)


def stream(model: Model) -> Iterator[tuple[str, Tensor]]:
    return iter(model.tensors.items())


def worst(model: Model, engine: nn.Module, packs_experts: bool = False) -> WorstTensor | None:
    settings: dict[str, bool] = {"tied": model.shape.tied, "packs_experts": packs_experts}
    return LoadedWeights(engine, model.targets, torch.device("cpu"), **settings).worst(stream(model))


LAYER = "model.layers.0."
MATRICES = frozenset(
    {
        f"{LAYER}{name}.weight"
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    | {"lm_head.weight"}
)


@pytest.mark.parametrize("packed", [frozenset[str](), MATRICES])
@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3"])
def test_equal_weights_are_equal(name: str, packed: frozenset[str]) -> None:
    model = Model(name)
    assert worst(model, engine_of(model, packed)) is None


@pytest.mark.parametrize("name", sorted({*MATRICES, f"{LAYER}self_attn.qkv_proj.bias", "model.norm.weight"}))
@pytest.mark.parametrize("packed", [frozenset[str](), MATRICES])
def test_one_element_that_differs_is_named(name: str, packed: frozenset[str]) -> None:
    model = Model("tiny-qwen2")
    engine = engine_of(model, packed)
    module: Any = engine.get_submodule(name.rpartition(".")[0])
    if name in packed:
        matrix = module.cpu_linear(torch.eye(128 if "down" not in name else model.shape.ffn_size // SIZE), None, None).T
        matrix[7, 5] += 0.5
        pack(module, matrix.clone())
    else:
        module.get_parameter(name.rpartition(".")[2]).data.view(-1)[9] += 0.5
    found = worst(model, engine)
    assert found is not None and found.name == name and found.difference == pytest.approx(0.5, abs=1e-5)


def test_padding_of_the_vocabulary_is_nobodys() -> None:
    model = Model("tiny-qwen2")
    engine = engine_of(model, MATRICES)
    engine.get_parameter("model.embed_tokens.weight").data[34:] = 9.0
    assert worst(model, engine) is None
    engine.get_parameter("model.embed_tokens.weight").data[33] = torch.nan
    assert worst(model, engine) == WorstTensor(float("inf"), "model.embed_tokens.weight")


def test_experts_are_compared_one_by_one_where_they_keep_their_order() -> None:
    model = Model("tiny-qwen3-moe")
    name = f"{LAYER}mlp.experts.w2_weight"
    engine = engine_of(model, frozenset())
    assert worst(model, engine) is None
    engine.get_parameter(name).data[3, 1, 2] -= 2.0
    assert worst(model, engine) == WorstTensor(pytest.approx(2.0, abs=1e-5), name)


def test_what_cannot_be_read_is_said_where_nothing_else_is_wrong() -> None:
    model = Model("tiny-qwen3-moe")
    engine = engine_of(model, frozenset())
    found = worst(model, engine, packs_experts=True)
    assert found is not None and found.difference == 0
    assert str(found) == (
        "none of those that can be read back, and 2 can't be, which are packed for a CPU's kernels "
        f"({LAYER}mlp.experts.w13_weight, …); hybrid.weights=direct leaves them as they are, and compares them too"
    )
    engine.get_parameter("model.norm.weight").data[0] += 1
    found = worst(model, engine, packs_experts=True)
    assert found is not None and found.name == "model.norm.weight"


def test_rounded_weights_are_not_compared_and_the_error_says_so() -> None:
    anything: Any = SimpleNamespace()
    loaded = LoadTransfer(anything, anything, anything, anything, expert_parallel=False, quantization="fp8")
    loaded._vllm_model = nn.Module()
    assert str(loaded.worst_tensor()) == (
        "none can be named, for rollout.quantization fp8 rounds them; leave it out in a run that should name it, or "
        "raise hybrid.check_limit where rounding alone is as large"
    )


class Worker:
    """Takes the tensors as vLLM's worker does, up to `limit` of them; notes what state it found."""

    def __init__(self, model: nn.Module, limit: int) -> None:
        self.model, self.limit = model, limit
        self.seen: list[Any] = []

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]], is_checkpoint_format: bool) -> None:
        assert is_checkpoint_format
        methods = [module.quant_method for module in self.model.modules() if hasattr(module, "quant_method")]
        self.seen.append([getattr(method, "moe_kernel", "no experts") for method in methods])
        self.seen += [name for name, _ in zip(range(self.limit), weights_iterator, strict=False)]


def test_a_load_forgets_kernels_of_experts_first_and_packs_a_tied_head_last(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Module()
    model.experts, model.lm_head = nn.Module(), nn.Module()
    model.experts.quant_method = SimpleNamespace(moe_kernel="laid out")
    worker = Worker(model, limit=9)
    model.lm_head.quant_method = SimpleNamespace(
        process_weights_after_loading=lambda head: worker.seen.append("head packed")
    )
    monkeypatch.setattr(transfer, "hf_tensors", lambda *rest: iter([("a", torch.ones(1)), ("b", torch.ones(1))]))
    spec: Any = SimpleNamespace(shape=SimpleNamespace(tied=True))
    anything: Any = SimpleNamespace()
    loading = LoadTransfer(anything, spec, anything, anything, expert_parallel=False, quantization=None)
    loading.transfer(model, worker)
    assert worker.seen == [[None, "no experts"], 0, 1, "head packed"]
    with pytest.raises(AssertionError, match="stopped before tensor b"):
        loading.transfer(model, Worker(model, limit=1))


def test_places_are_those_of_the_direct_way() -> None:
    model = Model("tiny-qwen3")
    (place,) = places_of(model.targets, tied_head=False)[f"{LAYER}self_attn.k_proj.weight"]
    # After 4 of the 8 heads' queries; the second half of 4 KV heads.
    assert (place.name, place.axis) == (f"{LAYER}self_attn.qkv_proj.weight", 0)
    assert (place.start, place.offset, place.length) == (2 * HEAD, 4 * HEAD, 2 * HEAD)
