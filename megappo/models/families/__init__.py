"""The model families by their `model_type`; to add one, write its file here and list it. Imports no torch."""

from megappo.models.families.base import Family
from megappo.models.families.deepseek import DeepseekV2, DeepseekV3
from megappo.models.families.gemma2 import Gemma2
from megappo.models.families.gemma3 import Gemma3Text
from megappo.models.families.glm4 import Glm, Glm4
from megappo.models.families.llama import Llama
from megappo.models.families.mistral import Mistral
from megappo.models.families.mixtral import Mixtral
from megappo.models.families.phi3 import Phi3
from megappo.models.families.qwen2 import Qwen2
from megappo.models.families.qwen2_moe import Qwen2Moe
from megappo.models.families.qwen3 import Qwen3
from megappo.models.families.qwen3_moe import Qwen3Moe

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Llama(),
        Qwen2(),
        Qwen3(),
        Qwen2Moe(),
        Qwen3Moe(),
        Mixtral(),
        DeepseekV2(),
        DeepseekV3(),
        Mistral(),
        Phi3(),
        Glm(),
        Glm4(),
        Gemma2(),
        Gemma3Text(),
    )
}
