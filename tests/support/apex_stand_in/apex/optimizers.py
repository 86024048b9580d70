"""`apex.optimizers`: AdamW with one `step` a group, as Apex's fused kernel has it."""

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """As in Apex: moments in `state`, the number of steps in the group from the first step on."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        assert bias_correction and adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta, beta_sq), step, rate = group["betas"], group["step"], group["lr"]
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["exp_avg"].lerp_(param.grad, 1 - beta)
                state["exp_avg_sq"].mul_(beta_sq).addcmul_(param.grad, param.grad, value=1 - beta_sq)
                scale = (state["exp_avg_sq"] / (1 - beta_sq**step)).sqrt_().add_(group["eps"])
                param.mul_(1 - rate * group["weight_decay"])
                param.addcdiv_(state["exp_avg"] / (1 - beta**step), scale, value=-rate)


class FusedSGD(torch.optim.SGD):
    """Imported by Megatron beside FusedAdam."""
