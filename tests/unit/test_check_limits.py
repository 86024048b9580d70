"""The limits of the check of a switch: which holds for what, and that fp8's is one of its rounding."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megappo.config.hybrid import default_check_limit
from megappo.config.load import load_experiment
from megappo.trainer.generation import check_limit
from tests.support.experiments import write_experiment
from tests.support.tiny_models import tiny_model

FP8 = ["rollout.engine=vllm", "rollout.quantization=fp8"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.dtype=float32"], 1e-3),
        (["model.dtype=bfloat16"], 0.1),
        (["model.dtype=bfloat16", *FP8], 0.5),
        (["model.dtype=bfloat16", *FP8, "hybrid.check_limit=0.03"], 0.03),
        (["model.dtype=bfloat16", "rollout.quantization=fp8"], 0.1),  # the native engine rounds nothing
    ],
)
def test_which_limit_holds(overrides: list[str], expected: float, tmp_path: Path) -> None:
    assert check_limit(load_experiment(write_experiment(tmp_path, ""), overrides)) == expected


def rounded(tensor: Tensor, largest: Tensor) -> Tensor:
    """To E4M3, whose largest number is 448, scaled so that `largest` is that."""
    scale = largest / 448
    return (tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale


def round_linear_layers(model: nn.Module) -> None:
    """As vLLM computes in fp8: weights by matrix, inputs by token; the head stays."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            module.weight.data = rounded(module.weight.data, module.weight.data.abs().max())
            module.register_forward_pre_hook(
                lambda _, inputs: (rounded(inputs[0], inputs[0].abs().amax(-1, keepdim=True)),)
            )


@torch.no_grad()
def test_rounding_stays_below_the_limits_and_other_weights_do_not(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(
        tmp_path, "qwen3", hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=1000, tied=True
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 1000, (4, 16), generator=generator)
    ids = model.generate(prompts, do_sample=False, max_new_tokens=24, min_new_tokens=24, pad_token_id=0)

    def log_probs(of: Any) -> Tensor:
        rows = of(ids).logits[:, 15:-1].float().log_softmax(-1)
        return rows.gather(-1, ids[:, 16:, None])[..., 0]

    def off(other: Any) -> float:
        return float((log_probs(other) - log_probs(model)).abs().mean())

    eight_bits, updated = copy.deepcopy(model), copy.deepcopy(model)
    round_linear_layers(eight_bits)
    for parameter in updated.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    half, eight = off(copy.deepcopy(model).bfloat16()), off(eight_bits)
    print(half, eight, off(updated))
    assert half < default_check_limit("bfloat16", None) / 3
    assert default_check_limit("bfloat16", None) < eight < default_check_limit("bfloat16", "fp8") / 2
    assert off(updated) > 2 * default_check_limit("bfloat16", "fp8")
