"""The base class of every configuration section."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of the experiment file; an unknown key is an error, never ignored."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        """A section's defaults are those of its class: what a default instance sets beside them would be lost as soon
        as a file sets any key of that section, for pydantic then makes the section from its class."""
        super().__pydantic_init_subclass__(**keywords)
        for name, field in cls.model_fields.items():
            default = field.get_default(call_default_factory=True)
            if isinstance(default, Section):
                assert type(default) is field.annotation and not default.model_fields_set, (
                    f"{cls.__name__}.{name}: defaults of its own need a class of their own, as CriticOptimConfig"
                )
