"""SGLang on a CPU as a platform plugin, through SGLang's own plugin mechanism: nothing in SGLang is edited.

SGLang finds :func:`activate` by entry point (group ``sglang.srt.platforms``) in each of its processes.
"""

from __future__ import annotations

from slime.utils import accelerator


def activate() -> str | None:
    """The platform class, or None with a GPU: then SGLang's platform applies."""
    if not accelerator.current().is_cpu:
        return None
    return "slime.backends.sglang_utils.cpu_platform.platform.SlimeCpuPlatform"
