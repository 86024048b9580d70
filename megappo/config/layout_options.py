"""The settings of section `layout` that commands also take as options, and messages that name what was typed."""

import re
from collections.abc import Collection

LAYOUT_OPTIONS = ("tp", "pp", "ep", "etp", "dp", "sequence_parallel")


def with_option_names(text: str, names: Collection[str]) -> str:
    """`text` with the settings `names` of section `layout` as options: `--ep 3` for `layout.ep: 3`."""

    def option(found: re.Match[str]) -> str:
        name, colon = found.groups()
        if name not in names:
            return found.group()
        return f"--{name.replace('_', '-')}" + (" " if colon else "")

    return re.sub(r"\blayout\.(\w+)(: )?", option, text)
