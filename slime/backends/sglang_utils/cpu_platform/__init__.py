"""SGLang on a CPU as a platform plugin of SGLang's plugin mechanism, without changes in SGLang.

SGLang finds :func:`activate` by entry point (group ``sglang.srt.platforms``) in each of its processes.
"""

from __future__ import annotations

from slime.utils import accelerator


def activate() -> str | None:
    """Path of the platform class. None with a GPU: then SGLang uses its standard platform."""
    if not accelerator.current().is_cpu:
        return None
    return "slime.backends.sglang_utils.cpu_platform.platform.SlimeCpuPlatform"
