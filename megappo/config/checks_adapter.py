"""Rules about a folder of adapters that a run begins with: what PEFT says of them, and megappo has not."""

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megappo.config.checkpoint_names import readable
from megappo.config.lora import LoraConfig
from megappo.config.model_folder import ADAPTERS
from megappo.config.problem import Problem, typed

MERGE = "merge them with PEFT, and begin with the merged model"
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""What PEFT's (0.21) `init_lora_weights` begins with where the adapters belong to weights that it has changed."""
_TENSORS = "adapter_model.safetensors"
_MODULE = re.compile(r"base_model\.model\.(.*)\.lora_A\.weight")
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate_proj|up_proj|w1|w3|down_proj|w2)")


def adapter_problems(path: str, lora: LoraConfig, folder: str) -> list[Problem]:
    """What adapter_config.json says of the folder's adapters, and the section `path` does not."""
    setting = f"{path}.adapter_path"
    file = readable(folder) / ADAPTERS
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        remedy = "give the folder of an adapter that PEFT or megappo has saved"
        return [Problem(setting, typed(folder), f"there is no {ADAPTERS} in it", remedy)]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return [Problem(setting, typed(folder), f"its {ADAPTERS} is not JSON ({error})", "export the adapter again")]
    content = content if isinstance(content, dict) else {}
    theirs = {"rank": content.get("r"), "alpha": content.get("lora_alpha")}
    theirs["type"] = "dora" if content.get("use_dora") else "lora"
    problems = [
        Problem(
            f"{path}.{name}", typed(getattr(lora, name)), f"the adapters in {folder} have {value}", f"set it to {value}"
        )
        for name, value in theirs.items()
        if getattr(lora, name) != value
    ]
    if content.get("use_rslora"):
        reason = f"the adapters in {folder} are rank-stabilized: they are multiplied by alpha / √rank"
        problems.append(Problem(setting, typed(folder), reason, MERGE))
    if content.get("bias", "none") != "none":
        reason = f"the adapters in {folder} have trained biases ({content['bias']}), which the model keeps as they are"
        problems.append(Problem(setting, typed(folder), reason, MERGE))
    start = str(content.get("init_lora_weights")).lower()
    if start.startswith(CHANGE_BASE):
        reason = (
            f"the adapters in {folder} belong to weights that PEFT has changed (init_lora_weights {start}), not to the "
            "model's"
        )
        remedy = "save them again with path_initial_model_for_weight_conversion of PEFT's save_pretrained, or merge "
        problems.append(Problem(setting, typed(folder), reason, remedy + MERGE.removeprefix("merge ")))
    other = next(_of_patterns(content, folder), None)
    if other is not None:
        reason = f"the adapters in {folder} have {other}, and all have one rank and one alpha here"
        problems.append(Problem(setting, typed(folder), reason, MERGE))
    return problems


def _of_patterns(content: Mapping[str, Any], folder: str) -> Iterator[str]:
    """What rank_pattern and alpha_pattern make another one of the folder's adapters."""
    patterns = {name: content.get(f"{name}_pattern") or {} for name in ("rank", "alpha")}
    rank, alpha = content.get("r"), content.get("lora_alpha")
    if not any(patterns.values()) or not rank or not alpha:
        return
    for module in _parameters(_modules(folder)) or [key for pattern in patterns.values() for key in pattern]:
        expert = _EXPERT.fullmatch(module)
        if expert is not None:  # PEFT fuses them: gate's and up's are one of twice the rank
            module = f"{expert[1]}.{'down_proj' if expert[2] in ('down_proj', 'w2') else 'gate_up_proj'}"
        own_rank, own_alpha = (
            _matched(patterns[name], module, default) for name, default in (("rank", rank), ("alpha", alpha))
        )
        is_fused = expert is not None or module.endswith(("experts.gate_up_proj", "experts.down_proj"))
        if own_alpha * rank != alpha * own_rank if is_fused else (own_rank, own_alpha) != (rank, alpha):
            yield f"rank {own_rank} and alpha {own_alpha} of {module} (rank_pattern, alpha_pattern)"


def _parameters(modules: Sequence[str]) -> list[str]:
    """`modules`, with fused experts' parameters for their module, which a file names alike whichever of them it is."""
    found: list[str] = []
    for module in modules:
        experts = module.removesuffix(".base_layer")
        is_fused = experts.endswith(".experts")
        found += [f"{experts}.gate_up_proj", f"{experts}.down_proj"] if is_fused else [module]
    return found


def _matched(pattern: Mapping[str, Any], module: str, default: float) -> Any:
    """The value of the first key that names the module, as PEFT finds it."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _modules(folder: str) -> Sequence[str]:
    """Paths of the modules that the folder's file has adapters for; none where it can't be read, which the ranks tell.

    Of a safetensors file the first 8 bytes are the size of its header, which is JSON.
    """
    try:
        with (readable(folder) / _TENSORS).open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            names = json.loads(file.read(size))
    except (OSError, ValueError, struct.error, OverflowError, MemoryError):
        return []
    return [found[1] for name in names if (found := _MODULE.fullmatch(name))]
