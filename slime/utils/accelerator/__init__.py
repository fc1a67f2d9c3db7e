"""The only place that asks what the device is: ``cuda`` when there is one, else ``cpu``.

Everybody else calls :func:`current` and uses what it returns. Importing this module does not import torch, so that the
driver can ask how many device slots the machine has without paying for it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING

from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["Accelerator", "current"]

_NAMES = ("cpu", "cuda")


class Accelerator:
    """What the rest of slime needs to know about the device; a few lines over ``torch`` and ``torch.cuda``."""

    def __init__(self, name: str) -> None:
        if name not in _NAMES:
            raise ConfigError(f"SLIME_ACCELERATOR={name!r} is not supported. It must be one of {', '.join(_NAMES)}.")
        self.name = name

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def communication_backend(self) -> str:
        """Backend of ``torch.distributed`` process groups: ``nccl`` on cuda, ``gloo`` on cpu."""
        return "gloo" if self.is_cpu else "nccl"

    def num_devices(self) -> int:
        """Devices of this host. 0 on cpu, where Ray's GPU slots are only logical."""
        if self.is_cpu:
            return 0
        import torch

        return torch.cuda.device_count()

    def device(self) -> torch.device:
        import torch

        return torch.device("cpu") if self.is_cpu else torch.device("cuda", torch.cuda.current_device())

    def set_device(self, index: int) -> None:
        if not self.is_cpu:
            import torch

            torch.cuda.set_device(index)

    def synchronize(self) -> None:
        if not self.is_cpu:
            import torch

            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        if not self.is_cpu:
            import torch

            torch.cuda.empty_cache()

    def give_back_shared(self) -> None:
        """Free device memory that other processes had open and have closed."""
        if not self.is_cpu:
            import torch

            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # torch has no hints there
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        import torch

        if self.is_cpu:
            torch.default_generator.manual_seed(seed)
        else:
            torch.cuda.manual_seed(seed)


@functools.cache
def current() -> Accelerator:
    """The accelerator of this machine. ``SLIME_ACCELERATOR`` (cpu or cuda) overrides the detection."""
    return Accelerator(os.environ.get("SLIME_ACCELERATOR") or _detect())


def _detect() -> str:
    """``cuda`` when a driver is loaded, a device is visible and the installed torch was built for it."""
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/nvidiactl").exists():
        return "cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "cpu"
    return "cpu" if importlib.metadata.version("torch").endswith("+cpu") else "cuda"
