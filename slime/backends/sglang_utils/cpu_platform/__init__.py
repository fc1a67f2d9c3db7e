"""SGLang on a CPU as a platform plugin, through SGLang's own plugin mechanism: nothing in SGLang is edited.

SGLang finds :func:`activate` by entry point (group ``sglang.srt.platforms``) in each of its processes.
"""

from __future__ import annotations

from slime.utils import accelerator

__all__ = ["activate"]


def activate() -> str | None:
    """The platform class, None where there is a GPU: SGLang's own platform then applies."""
    if not accelerator.current().is_cpu:
        return None
    return "slime.backends.sglang_utils.cpu_platform.platform.SlimeCpuPlatform"
