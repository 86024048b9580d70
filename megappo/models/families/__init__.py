"""The model families by their `model_type`; to add one, write its file here and list it. Imports no torch."""

from megappo.models.families.base import Family
from megappo.models.families.llama import Llama
from megappo.models.families.qwen2 import Qwen2
from megappo.models.families.qwen3 import Qwen3

FAMILIES: dict[str, Family] = {family.model_type: family for family in (Llama(), Qwen2(), Qwen3())}
