"""Adam that remembers nothing: each step is the first step of Adam (``--use-stateless-adam``).

Adam (Kingma and Ba 2015, algorithm 1) from zero moments, with g the gradient:

    m = (1 - b1) g      v = (1 - b2) g^2      m / (1 - b1) = g      v / (1 - b2) = g^2
    p <- p - lr * n * g / (d * |g| + eps)     n = d = 1 with bias correction, else n = 1 - b1, d = sqrt(1 - b2)

that is the sign of the gradient, softened by eps. It saves two fp32 numbers per parameter. Called by ``optimizer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["StatelessAdam"]


class StatelessAdam(torch.optim.Optimizer):
    """Takes the arguments of Apex's and TransformerEngine's FusedAdam.

    Args:
        adam_w_mode: weight decay shrinks the weights by ``1 - lr * weight_decay``; otherwise it is added to g.
        use_decoupled_grad: the gradient is ``parameter.decoupled_grad`` instead of ``parameter.grad``.
        set_grad_none: what ``zero_grad`` does by default; None means yes.

    Raises:
        ValueError: ``amsgrad`` or ``master_weights``, which need a state; a sparse gradient, when stepping.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        maximize: bool = False,
        use_decoupled_grad: bool = False,
        master_weights: bool = False,
        set_grad_none: bool | None = None,
        **_: Any,
    ) -> None:
        if amsgrad:
            raise ValueError("StatelessAdam has no amsgrad: it would have to remember the largest second moment")
        if master_weights:
            raise ValueError("StatelessAdam keeps no master weights: give it fp32 parameters")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._bias_correction = bias_correction
        self._adam_w_mode = adam_w_mode
        self._maximize = maximize
        self._grad_name = "decoupled_grad" if use_decoupled_grad else "grad"
        self._set_grad_none = set_grad_none is not False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients. Returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = 1
            for parameter in group["params"]:
                gradient = getattr(parameter, self._grad_name, None)
                if gradient is not None:
                    self._update(parameter, gradient, group)
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        set_to_none = self._set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(set_to_none)
        if self._grad_name == "grad":
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.decoupled_grad = None
                elif getattr(parameter, "decoupled_grad", None) is not None:
                    parameter.decoupled_grad.zero_()

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise ValueError("StatelessAdam cannot take sparse gradients")
        lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), group["betas"]
        g = gradient.to(parameter.dtype)
        if self._maximize:
            g = -g
        if decay and self._adam_w_mode:
            parameter.mul_(1 - lr * decay)
        elif decay:
            g = g + decay * parameter
        n, d = (1.0, 1.0) if self._bias_correction else (1 - beta1, (1 - beta2) ** 0.5)
        parameter.addcdiv_(g, (d * g.abs()).add_(group["eps"]), value=-lr * n)
