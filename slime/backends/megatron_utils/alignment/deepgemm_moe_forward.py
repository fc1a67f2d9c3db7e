"""Public name of the hook that launch scripts give for experts; the flags say which layers, dense ones included."""

from __future__ import annotations

from slime.backends.megatron_utils.alignment.deepgemm_forward import (
    enable_deepgemm_all_forward as enable_deepgemm_moe_forward,
)

__all__ = ["enable_deepgemm_moe_forward"]
