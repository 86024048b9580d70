"""Training layouts as text, for tools: `p-t-d`, `p-t-d@ep8`, `p-t-d@ep8,etp2`. Imports no torch."""

import re

from megappo.config.grid import TrainingGrid

_LAYOUT = re.compile(r"(\d+)-(\d+)-(\d+)(?:@ep(\d+)(?:,etp(\d+))?)?")


def parse_layout(text: str) -> TrainingGrid:
    """Raises ValueError where `text` is no layout, or its expert sizes do not divide the ranks of a stage."""
    match = _LAYOUT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no layout; write p-t-d, for example 2-4-8, or 2-4-8@ep8,etp2")
    pp, tp, dp, ep, etp = (int(number or 1) for number in match.groups())
    if min(pp, tp, dp, ep, etp) < 1 or (tp * dp) % (ep * etp):
        raise ValueError(f"{text!r}: ep · etp has to divide the t · d ranks of a stage, and sizes are at least 1")
    return TrainingGrid(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp)


def layout_text(grid: TrainingGrid) -> str:
    """The inverse of `parse_layout`."""
    text = f"{grid.pp}-{grid.tp}-{grid.dp}"
    if grid.etp > 1:
        return f"{text}@ep{grid.ep},etp{grid.etp}"
    return text if grid.ep == 1 else f"{text}@ep{grid.ep}"
