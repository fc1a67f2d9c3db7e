"""Detection of the device kind: ``cuda`` if a device exists, else ``cpu``.

All other modules use the result of :func:`current`. The functions below it are shortcuts for tools and plugins.
Importing this module does not import torch, so the driver can count device slots cheaply.

For another kind of device, register a subclass of :class:`Accelerator` in every process before the first use, for
example in an installed ``sitecustomize``.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.utils.accelerator.devices import Accelerator, CPUAccelerator, CUDAAccelerator, Index, MUSAAccelerator
from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    import torch

# Files of a loaded driver: two of NVIDIA, and one of AMD, whose devices torch calls "cuda" as well.
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/kfd"))

_CUDA_LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so")


@dataclass(frozen=True)
class _Kind:
    factory: Callable[[], Accelerator]
    is_available: Callable[[], bool]
    priority: int
    communication_backends: tuple[str, ...]


_kinds: dict[str, _Kind] = {}
_chosen: Accelerator | None = None


# --------------------------------------------------------------------------------------------------- which one


@functools.cache
def current() -> Accelerator:
    """The accelerator of this machine. ``SLIME_ACCELERATOR`` (cpu, cuda, a registered name) overrides the detection.

    Raises:
        ConfigError: ``SLIME_ACCELERATOR`` is not registered.
    """
    if _chosen is not None:
        return _chosen
    name = os.environ.get("SLIME_ACCELERATOR")
    if not name:
        by_priority = sorted(_kinds, key=lambda kind: -_kinds[kind].priority)
        # in order of priority: a probe may import a heavy library, and cpu, the last one, is always available
        name = next(kind for kind in by_priority if _kinds[kind].is_available())
    if name not in _kinds:
        raise ConfigError(f"SLIME_ACCELERATOR={name!r} is not supported. It must be one of {', '.join(_kinds)}.")
    kind = _kinds[name]
    found = kind.factory()
    if kind.communication_backends:
        # on the instance: other kinds may use the same class
        found.communication_backends = kind.communication_backends
    return found


def get_accelerator() -> Accelerator:
    """:func:`current`, under the name that plugins use."""
    return current()


def initialize_accelerator() -> Accelerator:
    """:func:`current`. An initialization is not necessary."""
    return current()


def set_accelerator(accelerator: Accelerator) -> None:
    """Use ``accelerator`` in this process from now on."""
    global _chosen
    _chosen = accelerator
    current.cache_clear()


def reset_accelerator() -> None:
    """Undo :func:`set_accelerator` and repeat the detection."""
    global _chosen
    _chosen = None
    current.cache_clear()


def register_accelerator(
    name: str,
    factory: Callable[[], Accelerator],
    is_available: Callable[[], bool] | None = None,
    priority: int = 0,
    communication_backends: tuple[str, ...] = (),
) -> None:
    """Register a kind of accelerator.

    Args:
        name: value of ``SLIME_ACCELERATOR``.
        factory: creates the accelerator of this process.
        is_available: test of the detection. None: always available.
        priority: the detection takes the available kind with the highest priority. cuda has 100, musa 50, cpu -100.
        communication_backends: replace those of the class.
    """
    _kinds[name] = _Kind(factory, is_available or (lambda: True), priority, tuple(communication_backends))
    # an earlier detection may have run without this kind
    current.cache_clear()


def has_driver() -> bool:
    """Whether the kernel has a driver for GPUs that torch calls ``cuda``."""
    return any(path.exists() for path in _DRIVERS)


def is_musa_available() -> bool:
    return MUSAAccelerator.is_available()


def _torch_library() -> Path:
    """Folder of the shared libraries of the torch wheel."""
    spec = importlib.util.find_spec("torch")  # does not import torch
    return Path(spec.origin or "").parent / "lib" if spec is not None else Path()


def _has_cuda() -> bool:
    """Whether a driver is loaded, a device is visible and the installed torch has CUDA or ROCm libraries."""
    if not has_driver():
        return False
    if any(os.environ.get(name) in ("", "-1") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")):
        return False
    library = _torch_library()
    # Not by the version: CPU wheels for arm64 have no "+cpu" in it. Without libtorch_cpu.so torch is not a wheel, and
    # the driver decides.
    return not (library / "libtorch_cpu.so").exists() or any((library / name).exists() for name in _CUDA_LIBRARIES)


register_accelerator("cpu", CPUAccelerator, priority=-100)
register_accelerator("cuda", CUDAAccelerator, _has_cuda, priority=100)
register_accelerator("musa", MUSAAccelerator, is_musa_available, priority=50)


# --------------------------------------------------------------------------------------------------- its answers


def current_device() -> int | str:
    """Number of the current device of this process. ``cpu`` without a device."""
    return current().current_device()


def device(index: Index = None) -> torch.device:
    return current().device(index)


def device_name(index: Index = None) -> str:
    """Argument of ``tensor.to``: ``cuda:0``, ``cpu``."""
    return str(current().device(index))


def distributed_device_id(index: Index = None) -> torch.device | None:
    """``device_id`` of ``torch.distributed.init_process_group``. None on cpu."""
    return None if current().is_cpu else current().device(index)


def set_device(index: Index) -> None:
    current().set_device(index)


def synchronize(device_arg: Index = None) -> None:
    current().synchronize(device_arg)


def empty_cache() -> None:
    current().empty_cache()


def memory_allocated(device_arg: Index = None) -> int:
    """Bytes of tensors on the device."""
    return current().memory_allocated(device_arg)


def process_group_backend(default: str = "nccl") -> str:
    """``default`` if it supports the device, else the usual backend of the device (gloo on cpu)."""
    return current().process_group_backend(default)


def weight_update_backend(default: str = "nccl") -> str:
    """The backend between trainer and engines, by the rule of :func:`process_group_backend`."""
    return current().process_group_backend(default)


def visible_devices_env_key() -> str:
    return current().visible_devices_env_key


def resolve_visible_device_id(physical_device_id: int | float | str) -> int:
    """See :meth:`Accelerator.resolve_visible_device_id`."""
    return current().resolve_visible_device_id(physical_device_id)
