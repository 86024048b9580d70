"""Rules of pipeline stages: whether a model's layers can be spread over them as the layout says."""

from dataclasses import asdict, replace

from megappo.config.divisibility import choices, nearest
from megappo.config.pipeline import EVEN, PipelineSplit
from megappo.config.problem import Problem, typed

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def split_problems(split: PipelineSplit, pp: int) -> list[Problem]:
    """Settings of unequal stages that don't go together, whatever the model."""
    used = {name: value for name, value in asdict(split).items() if value}
    if pp == 1:
        reason = "is for pipeline stages, and layout.pp is 1"
        return [
            Problem(f"layout.{name}", typed(value), reason, "leave it out, or set layout.pp to 2")
            for name, value in used.items()
        ]
    if split.counted and len(used) > split.counted:
        reason = f"is one way to make stages unequal, and layout.{next(reversed(used))} is another"
        name = next(iter(used))
        return [Problem(f"layout.{name}", typed(used[name]), reason, "leave one of the two out")]
    return []


def virtual_problems(pp: int, vpp: int) -> list[Problem]:
    """Virtual stages of a pipeline that is none."""
    if vpp == 1 or pp > 1:
        return []
    reason = "is for virtual stages of a pipeline, and layout.pp is 1"
    return [Problem("layout.vpp", str(vpp), reason, "set it to 1, or layout.pp to 2")]


def stage_problems(
    num_layers: int, folder: str, pp: int, split: PipelineSplit, pp_path: str, vpp: int = 1
) -> list[Problem]:
    """Layers of a model that can't be spread over `pp` · `vpp` stages."""
    if pp > 1 and vpp > 1 and not split_problems(split, pp):
        if split.stages(num_layers, pp * vpp) is not None:
            return []
        fitting = nearest(vpp, 1, num_layers // pp, lambda size: split.stages(num_layers, pp * size) is not None)
        if fitting:
            unequal = "" if split == EVEN else " as the settings of unequal stages say"
            reason = f"times pp {pp} makes {pp * vpp} stages, and the {num_layers} layers of {folder} can't be split so"
            return [Problem("layout.vpp", str(vpp), reason + unequal, choices(fitting))]
    if pp == 1 or split_problems(split, pp) or split.stages(num_layers, pp) is not None:
        return []
    first, last = split.num_layers_in_first_pipeline_stage, split.num_layers_in_last_pipeline_stage
    if first is None and last is None:
        counted = f", counted as {num_layers + split.counted} with embedding or loss" if split.counted else ""
        reason = f"does not divide the {num_layers} layers of {folder}{counted}"
        sizes = nearest(pp, 1, num_layers, lambda size: split.stages(num_layers, size) is not None)
        return [Problem(pp_path, str(pp), reason, choices(sizes))]
    name, size = (FIRST, first) if first is not None else (LAST, last)
    other = split.num_layers_in_last_pipeline_stage if first is not None else None
    num_left = pp - 1 - (other is not None)
    left = num_layers - (first or 0) - (last or 0)
    reason = f"leaves {left} of the {num_layers} layers of {folder} for {num_left} other stages"
    if other is not None:
        reason += f" beside a last one of {other}"
    assert size is not None, "one of the two is set"

    def fits(number: int) -> bool:
        changed = replace(split, num_layers_in_first_pipeline_stage=number)
        if name == LAST:
            changed = replace(split, num_layers_in_last_pipeline_stage=number)
        return changed.stages(num_layers, pp) is not None

    sizes = nearest(size, 1, num_layers, fits)
    remedy = choices(sizes) if sizes else "leave both out"
    return [Problem(f"layout.{name}", str(size), reason, remedy)]
