"""On-policy distillation: reverse KL from a teacher, per token of the student's own samples. Called by ``credit``."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reverse_kl(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``log pi_student - log pi_teacher`` per token: the single-sample estimate of KL(student || teacher).

    Source: Agarwal et al. 2023, arXiv:2306.13649 (student samples, reverse KL); Thinking Machines Lab, "On-Policy
    Distillation" (2025), which uses it as the advantage.

    Args:
        student, teacher: per sample ``[R_i]``.

    Returns:
        fp32 tensors ``[R_i]`` on the device of the student.
    """
    return [a.float() - b.to(a.device).float() for a, b in zip(student, teacher, strict=True)]


def penalise(advantages: Sequence[torch.Tensor], divergence: Sequence[torch.Tensor], coef: float) -> list[torch.Tensor]:
    """``A_t - coef * divergence_t``. Returns stay as they are. Per sample ``[R_i]``."""
    return [a - coef * d.to(a.device) for a, d in zip(advantages, divergence, strict=True)]
