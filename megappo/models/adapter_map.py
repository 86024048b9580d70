"""Which projections get an adapter, and how its parameters are made of PEFT's tensors. Imports no torch.

A linear layer of Megatron may be several projections of Hugging Face, its rows in blocks that are cut over TP ranks.
Its adapter has one A for each projection, and one B for each block, whose rows are the block's: so B is cut as the
weight is, and each row of B meets the A of its own projection. The adapter of `….linear_qkv` is a module
`….linear_qkv_lora` beside it. The experts of a layer are one target: its adapter holds an A and a B for each expert and
projection, and stands beside all of them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from megappo.config.lora import ALL_LINEAR, LoraConfig
from megappo.errors import ConfigError
from megappo.models.weight_map import EXPERT, Block, Head, Rule, Segment, Shape, WeightMap

SUFFIX = "_lora"
"""Ends the name of an adapter, which stands beside its linear layer."""
PEFT_PREFIX = "base_model.model."
"""Begins PEFT's tensor names."""
PEFT_EXPERTS_GATE_UP = "experts.gate_up_proj"
PEFT_EXPERTS_DOWN = "experts.down_proj"
_WEIGHT = ".weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True)
class AdapterTarget:
    """A linear layer, or that of all experts of a layer, with the projections of it that are adapted.

    `linear`: its global Megatron name. `rule`: that of its weight. `projections`: paths of Hugging Face modules, in the
    order of the weight's rows; `{expert}` in them is an expert's number. `in_size`: its columns, over all TP ranks.
    """

    linear: str
    rule: Rule
    projections: tuple[str, ...]
    in_size: int

    @property
    def is_row_parallel(self) -> bool:
        """Whether the columns are cut over TP ranks, rather than the rows."""
        return self.rule.axis == 1

    @property
    def adapter(self) -> str:
        """The adapter's global name. Whether experts are grouped or modules of their own, theirs has the same one."""
        return (self.linear if self.rule.experts is None else self.linear.replace(".experts.", ".experts_")) + SUFFIX


def adapter_targets(
    weight_map: WeightMap, patterns: Sequence[str], setting: str = "model.lora"
) -> tuple[AdapterTarget, ...]:
    """The layers of which `patterns` name a projection. ConfigError where one names nothing, or other projections in
    one layer than in another; `setting` is the section that has them."""
    candidates = _candidates(weight_map)
    names = {name: rule for rule in candidates for name in _modules(rule)}
    chosen = set()
    for pattern in patterns:
        matched = {name for name in names if _matches(name, pattern)}
        if not matched:
            possible = ", ".join(sorted({_last(name) for name in names}))
            raise ConfigError(f"{setting}.target_modules: {pattern!r} names no projection; there are {possible}")
        chosen |= matched
    _refuse_uneven(chosen, names, setting)
    targets = []
    for rule in candidates:
        projections = tuple(name for name in _modules(rule) if name in chosen)
        if projections:
            in_size = _weight_shape(weight_map, projections[0])[1]
            targets.append(AdapterTarget(rule.names[0].removesuffix(_WEIGHT), rule, projections, in_size))
    return tuple(targets)


def adapter_map(weight_map: WeightMap, targets: Sequence[AdapterTarget], lora: LoraConfig, head: Head) -> WeightMap:
    """The rules of all adapter parameters, and of a value head, which is trained beside them: sources are the names in
    PEFT's adapter_model.safetensors."""
    tensors: dict[str, Shape] = {}
    rules: list[Rule] = []
    for target in targets:
        if target.rule.experts is not None:
            rules += _expert_rules(weight_map, target, target.rule.experts, lora, tensors)
            continue
        prefix = f"{target.adapter}."
        for name in target.projections:
            rows = weight_map.tensors[name + _WEIGHT][0]
            peft = PEFT_PREFIX + name
            tensors[f"{peft}.lora_A.weight"] = (lora.rank, target.in_size)
            tensors[f"{peft}.lora_B.weight"] = (rows, lora.rank)
            if lora.type == "dora":
                tensors[f"{peft}.lora_magnitude_vector"] = (rows,)
            axis, length = (1, target.in_size) if target.is_row_parallel else (None, lora.rank)
            columns = (Segment(f"{peft}.lora_A.weight", 0, length),)
            rules.append(Rule((f"{prefix}lora_A.{_last(name)}",), axis, (columns,)))
        for number, block in enumerate(row_blocks(weight_map, target)):
            axis = None if target.is_row_parallel else 0
            kinds = {"lora_B": ".lora_B.weight"} | (
                {"magnitude": ".lora_magnitude_vector"} if lora.type == "dora" else {}
            )
            for kind, ending in kinds.items():
                renamed = tuple(_renamed(segment, target.projections, ending) for segment in block)
                rules.append(Rule((f"{prefix}{kind}.{number}",), axis, (renamed,)))
    if head == "value":
        rule = next(rule for rule in weight_map.rules if rule.names == ("output_layer.weight",))
        (source,) = rule.sources
        tensors[PEFT_PREFIX + source] = weight_map.tensors[source]
        rules.append(Rule(rule.names, None, ((Segment(PEFT_PREFIX + source, 0, 1),),)))
    return WeightMap(tensors, tuple(rules))


def row_blocks(weight_map: WeightMap, target: AdapterTarget) -> tuple[Block, ...]:
    """The rows of the linear layer, over all TP ranks, in blocks that are each cut over the ranks."""
    if not target.is_row_parallel:
        return target.rule.blocks
    source = target.rule.sources[0]
    return ((Segment(source, 0, weight_map.tensors[source][0]),),)


def projection_of(segment: Segment) -> str | None:
    """The path of the module that the rows belong to."""
    return None if segment.source is None else segment.source.removesuffix(_WEIGHT)


@dataclass(frozen=True)
class PeftTargets:
    """What is adapted, as PEFT's configuration names it: last parts of modules' paths, and parameters. `has_experts`:
    experts are among the parameters."""

    modules: list[str]
    parameters: list[str]
    has_experts: bool


def peft_targets(weight_map: WeightMap, targets: Sequence[AdapterTarget]) -> PeftTargets:
    """PEFT's names of what is adapted.

    With transformers 5 the experts of a layer are two parameters, into which PEFT (0.21) fuses the tensors of a file
    that has them one by one. It takes a `gate_proj` among the modules for an expert's, but not in all families: so
    experts are named as parameters, and a shared expert's and a dense layer's projections too.
    """
    modules: set[str] = set()
    parameters: set[str] = set()
    has_experts = False
    for name in (name for target in targets for name in target.projections):
        found = _LAYER.fullmatch(name)
        assert found is not None, f"{name} is in no layer"
        if EXPERT in name:
            has_experts = True
        elif is_beside_experts(weight_map, name):
            parameters.add(found[2] + _WEIGHT)
        else:
            modules.add(_last(name))
    fused = [PEFT_EXPERTS_GATE_UP, PEFT_EXPERTS_DOWN] if has_experts else []
    return PeftTargets(sorted(modules), fused + sorted(parameters), has_experts)


def is_beside_experts(weight_map: WeightMap, name: str) -> bool:
    """Whether a module has the last name of an expert's: it is one, or a shared expert's or a dense layer's."""
    return any(_last(name) == _last(other) for other in expert_projections(weight_map))


def missing_expert_tensors(weight_map: WeightMap, adapters: WeightMap, rank: int) -> dict[str, Shape]:
    """PEFT's tensors of the projections of adapted experts that have no adapter: PEFT fuses those of all three, and
    wants an adapter of each (0.21)."""
    missing = {}
    for name in expert_projections(weight_map):
        rule = next(rule for rule in _candidates(weight_map) if name in _modules(rule))
        rows, columns = _weight_shape(weight_map, name)
        layer = PEFT_PREFIX + name.partition(EXPERT)[0]
        if not any(tensor.startswith(layer) for tensor in adapters.tensors):
            continue
        for expert in range(rule.experts or 0):
            peft = PEFT_PREFIX + name.replace(EXPERT, str(expert))
            missing[f"{peft}.lora_A.weight"] = (rank, columns)
            missing[f"{peft}.lora_B.weight"] = (rows, rank)
    return {name: shape for name, shape in missing.items() if name not in adapters.tensors}


def expert_projections(weight_map: WeightMap) -> list[str]:
    """Paths of the projections of all layers' experts, with `{expert}` for the number."""
    return [name for rule in _candidates(weight_map) if rule.experts is not None for name in _modules(rule)]


def refuse_kinds_for_experts(
    weight_map: WeightMap, targets: Sequence[AdapterTarget], lora: LoraConfig, setting: str
) -> None:
    """ConfigError where experts would get what their adapters cannot be: PEFT knows neither DoRA nor dropout of the
    feed-forward parts of a model with experts (0.21), so that no file could hold them."""
    names = [name for target in targets for name in target.projections if is_beside_experts(weight_map, name)]
    if not names or (lora.type == "lora" and lora.dropout == 0):
        return
    key, value, out = ("type", lora.type, "lora") if lora.type == "dora" else ("dropout", lora.dropout, "0")
    raise ConfigError(
        f"{setting}.{key}: {value}, but target_modules name {names[0].replace(EXPERT, '0')}, of the experts' kind, "
        f"which has plain adapters alone; set it to {out}, or name projections of the attention: ['*.self_attn.*']"
    )


def _candidates(weight_map: WeightMap) -> list[Rule]:
    """The rules of linear layers."""
    return [
        rule
        for rule in weight_map.rules
        if rule.axis is not None
        and not rule.is_vocabulary
        and (rule.experts is not None or all(name.endswith("_proj.weight") for name in rule.sources))
    ]


def _modules(rule: Rule) -> tuple[str, ...]:
    return tuple(source.removesuffix(_WEIGHT) for source in rule.sources)


def _matches(name: str, pattern: str) -> bool:
    return pattern == ALL_LINEAR or fnmatch(name, pattern) or fnmatch(_last(name), pattern)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _renamed(segment: Segment, projections: Sequence[str], ending: str) -> Segment:
    """The rows of a projection that has no adapter are padding: they are never used."""
    name = projection_of(segment)
    source = f"{PEFT_PREFIX}{name}{ending}" if name in projections else None
    return Segment(source, segment.start if source else 0, segment.length)


def _weight_shape(weight_map: WeightMap, name: str) -> Shape:
    """[rows, columns] of a projection; of any expert's, which are alike."""
    return weight_map.tensors[name.replace(EXPERT, "0") + _WEIGHT]


def _expert_rules(
    weight_map: WeightMap, target: AdapterTarget, num_experts: int, lora: LoraConfig, tensors: dict[str, Shape]
) -> list[Rule]:
    """The rules of the adapter of all experts of a layer, made for one expert; its tensors are added to `tensors`."""
    rules = []
    for name in target.projections:
        rows = _weight_shape(weight_map, name)[0]
        sizes = {"A": (lora.rank, target.in_size), "B": (rows, lora.rank)}
        for matrix, shape in sizes.items():
            source = f"{PEFT_PREFIX}{name}.lora_{matrix}.weight"
            tensors |= {source.replace(EXPERT, str(expert)): shape for expert in range(num_experts)}
            # Column-parallel: B's rows are cut, A is whole; row-parallel: A's columns are, B is whole.
            axis = {"A": 1, "B": None}[matrix] if target.is_row_parallel else {"A": None, "B": 0}[matrix]
            block = (Segment(source, 0, shape[axis or 0]),)
            rules.append(Rule((f"{target.adapter}.lora_{matrix}.{_last(name)}",), axis, (block,), experts=num_experts))
    return rules


def _refuse_uneven(chosen: set[str], names: Iterable[str], setting: str) -> None:
    """Layers may differ in what they have, as a dense one from one with experts, not in what of it is adapted."""
    is_chosen: dict[str, set[bool]] = {}
    for name in names:
        found = _LAYER.fullmatch(name)
        assert found is not None, f"{name} is in no layer"
        is_chosen.setdefault(found[2], set()).add(name in chosen)
    if any(len(answers) > 1 for answers in is_chosen.values()):
        raise ConfigError(
            f"{setting}.target_modules: they name other projections in one layer than in another; name them as q_proj "
            "or *.self_attn.*, without a layer's number"
        )
