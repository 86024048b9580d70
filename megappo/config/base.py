"""The base class of every configuration section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of the experiment file; an unknown key is an error, never ignored."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )
