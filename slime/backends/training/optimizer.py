"""Learning rate and weight decay over a run, fused AdamW, and Adam without moments, for every backend.

The schedule counts rollouts, as Megatron's ``OptimizerParamScheduler`` does. :class:`RateSchedule` is the plan that the
flags describe. :class:`ScheduledRates` applies it to a plain torch optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from slime.backends import weights_dtype
from slime.backends.training.arguments import OptimizerArgs, PrecisionArgs
from slime.utils import accelerator
from slime.utils.errors import ConfigError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_of(precision: PrecisionArgs) -> torch.dtype:
    """:func:`weights_dtype` as torch's object."""
    return _DTYPES[weights_dtype(fp16=precision.fp16, fp32=precision.fp32)]


@dataclass(frozen=True)
class RateSchedule:
    """The plan of a run. Its steps are rollouts, and its fields are the arguments of Megatron's class."""

    init_lr: float
    max_lr: float
    min_lr: float
    lr_warmup_steps: int
    lr_decay_steps: int
    lr_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_steps: int
    wd_incr_style: str
    wsd_decay_steps: int | None
    lr_wsd_decay_style: str

    @classmethod
    def of(cls, settings: OptimizerArgs, *, num_steps: int, global_batch_size: int) -> RateSchedule:
        """The schedule that the flags describe.

        Args:
            num_steps: optimizer steps of the whole run. The decay ends there unless --lr-decay-iters says otherwise.

        Raises:
            ConfigError: the warm-up is not shorter than the decay.
        """
        decay_steps = settings.lr_decay_iters if settings.lr_decay_iters is not None else max(1, num_steps)
        if settings.lr_warmup_fraction is not None:
            warmup, flag = (
                settings.lr_warmup_fraction * decay_steps,
                f"--lr-warmup-fraction {settings.lr_warmup_fraction}",
            )
        else:
            warmup, flag = settings.lr_warmup_iters, f"--lr-warmup-iters {settings.lr_warmup_iters}"
        if warmup >= decay_steps:
            raise ConfigError(
                f"{flag} is {warmup:g} steps of warm-up, which must be fewer than the {decay_steps} steps of the "
                "schedule (--lr-decay-iters, by default all steps of the run)."
            )
        start, end = settings.weight_decay, settings.weight_decay
        if settings.weight_decay_incr_style != "constant":
            assert settings.start_weight_decay is not None, "a rule asks for it"
            assert settings.end_weight_decay is not None, "a rule asks for it"
            start, end = settings.start_weight_decay, settings.end_weight_decay
        return cls(
            init_lr=settings.lr_warmup_init,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            # flags count optimizer steps, the schedule counts rollouts
            lr_warmup_steps=int(warmup * global_batch_size),
            lr_decay_steps=decay_steps * global_batch_size,
            lr_decay_style=settings.lr_decay_style,
            start_wd=start,
            end_wd=end,
            wd_incr_steps=decay_steps * global_batch_size,
            wd_incr_style=settings.weight_decay_incr_style,
            wsd_decay_steps=None
            if settings.lr_wsd_decay_iters is None
            else settings.lr_wsd_decay_iters * global_batch_size,
            lr_wsd_decay_style=settings.lr_wsd_decay_style,
        )

    def learning_rate(self, step: int) -> float:
        """The learning rate after ``step`` rollouts."""
        warmup = self.lr_warmup_steps
        if warmup > 0 and step <= warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * step / warmup
        if self.lr_decay_style == "constant":
            return self.max_lr
        if step > self.lr_decay_steps:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(step, 1)))
        return self.min_lr + self._decay(step) * (self.max_lr - self.min_lr)

    def _decay(self, step: int) -> float:
        """1 at the end of the warm-up, with WSD until the last ``wsd_decay_steps``. 0 at the end of the run."""
        begin, style = self.lr_warmup_steps, self.lr_decay_style
        if style == "WSD":
            assert self.wsd_decay_steps is not None, "a rule asks for --lr-wsd-decay-iters"
            begin, style = self.lr_decay_steps - self.wsd_decay_steps, self.lr_wsd_decay_style
        ratio = max(0, step - begin) / (self.lr_decay_steps - begin)
        match style:
            case "linear":
                return 1 - ratio
            case "cosine":
                return 0.5 * (math.cos(math.pi * ratio) + 1)
            case "exponential":
                return 2 * math.pow(0.5, ratio) - 1
            case "minus_sqrt":
                return 1 - math.sqrt(ratio)
            case other:
                raise ValueError(f"the decay style {other} is not supported")

    def weight_decay(self, step: int) -> float:
        """The weight decay after ``step`` rollouts."""
        ratio = min(1.0, step / self.wd_incr_steps)
        match self.wd_incr_style:
            case "constant":
                share = 1.0
            case "linear":
                share = ratio
            case "cosine":
                share = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1)
            case other:
                raise ValueError(f"--weight-decay-incr-style {other} is not supported")
        return self.start_wd + share * (self.end_wd - self.start_wd)


class ScheduledRates:
    """The rates of an optimizer's groups. A group decays by ``decay_factor`` times the schedule's weight decay.

    Args:
        follows_checkpoint: loading a checkpoint also replaces ``schedule``, not only the position in it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: RateSchedule, *, follows_checkpoint: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._follows_checkpoint = follows_checkpoint
        self._step = 0
        self.advance(0)

    def advance(self, num_rollouts: int) -> None:
        self._step += num_rollouts
        rate, decay = self._schedule.learning_rate(self._step), self._schedule.weight_decay(self._step)
        for group in self._optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate, decay * group["decay_factor"]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "schedule": asdict(self._schedule)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._follows_checkpoint:
            self._schedule = RateSchedule(**state["schedule"])
        self._step = state["step"]
        self.advance(0)


def fuse_adamw(optimizer: torch.optim.Optimizer) -> None:
    """Let AdamW update its tensors on a GPU in fused kernels.

    Its default there is a dozen kernels and 4 bytes of temporary memory per weight. Other optimizers, and a CPU, whose
    recorded numbers are those of the unfused update, stay as they are.
    """
    if isinstance(optimizer, torch.optim.AdamW) and not accelerator.current().is_cpu:
        optimizer.register_step_pre_hook(keep_fused)


def keep_fused(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before every step: a loaded checkpoint brings the settings and the step counts of an unfused optimizer."""
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, None
        for parameter in group["params"]:
            # a look-up with [] would make an entry, in which AdamW takes the first moments to be missing
            state = optimizer.state.get(parameter)
            if state:
                state["step"] = state["step"].to(parameter.device)


class StatelessAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1) from zero moments in every step: ``--use-stateless-adam``.

    With g the gradient:

        m = (1 - b1) g      v = (1 - b2) g^2      m / (1 - b1) = g      v / (1 - b2) = g^2
        p <- p - lr * g / (|g| + eps)

    That is the sign of the gradient, softened by eps. It saves two fp32 numbers per parameter. Weight decay is
    decoupled: it shrinks the weights by ``1 - lr * weight_decay``.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients."""
        assert closure is None, "no caller gives one"
        for group in self.param_groups:
            group["step"] = 1
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                g = parameter.grad.to(parameter.dtype)
                if decay:
                    # before the update, with the old weights
                    parameter.mul_(1 - lr * decay)
                parameter.addcdiv_(g, g.abs().add_(group["eps"]), value=-lr)
