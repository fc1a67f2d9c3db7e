"""The only place that asks what the device is: ``cuda`` when there is one, else ``cpu``.

Everybody else calls :func:`current` and uses what it returns; the other functions are the same for tools and plugins.
Importing this module does not import torch, so that the driver can ask how many device slots the machine has without
paying for it.

A kind of device that slime does not know is a subclass of :class:`Accelerator` that is registered in every process
before anything asks, for example by an installed ``sitecustomize``.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slime.utils.accelerator.devices import Accelerator, CPUAccelerator, CUDAAccelerator, Index, MUSAAccelerator
from slime.utils.accelerator.registry import Registry

if TYPE_CHECKING:
    import torch

_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""What a loaded driver leaves: NVIDIA's two, and AMD's, whose devices torch calls cuda as well."""

_CUDA_LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so")

_registry = Registry()


# --------------------------------------------------------------------------------------------------- which one


@functools.cache
def current() -> Accelerator:
    """The accelerator of this machine; ``SLIME_ACCELERATOR`` (cpu, cuda, a registered name) overrides the detection."""
    return _registry.choose(os.environ.get("SLIME_ACCELERATOR"))


def get_accelerator() -> Accelerator:
    """:func:`current` under the name that plugins know."""
    return current()


def initialize_accelerator() -> Accelerator:
    """:func:`current`; nothing has to be initialised."""
    return current()


def set_accelerator(accelerator: Accelerator) -> None:
    """From now on this process has this one."""
    _registry.chosen = accelerator
    current.cache_clear()


def reset_accelerator() -> None:
    """Undo :func:`set_accelerator` and ask anew."""
    _registry.chosen = None
    current.cache_clear()


def register_accelerator(
    name: str,
    factory: Callable[[], Accelerator],
    is_available: Callable[[], bool] | None = None,
    priority: int = 0,
    communication_backends: tuple[str, ...] = (),
) -> None:
    """Make a kind of accelerator known.

    Args:
        name: for ``SLIME_ACCELERATOR``.
        factory: makes the one of this process.
        is_available: asked where nobody says which kind to take; None: it always is.
        priority: the highest available kind is taken. cuda has 100, musa 50, cpu -100.
        communication_backends: replace those of the class.
    """
    _registry.register(name, factory, is_available, priority, communication_backends)
    current.cache_clear()


def has_driver() -> bool:
    """Whether the kernel has a driver for GPUs that torch calls ``cuda``."""
    return any(path.exists() for path in _DRIVERS)


def is_musa_available() -> bool:
    return MUSAAccelerator.is_available()


def _torch_library() -> Path:
    """Where wheels of torch have their libraries; found without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin or "").parent / "lib" if spec is not None else Path()


def _has_cuda() -> bool:
    """A driver is loaded, a device is visible and the installed torch was built for it."""
    if not has_driver():
        return False
    if any(os.environ.get(name) in ("", "-1") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")):
        return False
    library = _torch_library()
    # not the version: wheels for arm64 have no "+cpu" in it
    return not (library / "libtorch_cpu.so").exists() or any((library / name).exists() for name in _CUDA_LIBRARIES)


register_accelerator("cpu", CPUAccelerator, priority=-100)
register_accelerator("cuda", CUDAAccelerator, _has_cuda, priority=100)
register_accelerator("musa", MUSAAccelerator, is_musa_available, priority=50)


# --------------------------------------------------------------------------------------------------- its answers


def current_device() -> int | str:
    """Number of this process's device; ``cpu`` without one."""
    return current().current_device()


def device(index: Index = None) -> torch.device:
    return current().device(index)


def device_name(index: Index = None) -> str:
    """As ``tensor.to`` takes it: ``cuda:0``, ``cpu``."""
    return str(current().device(index))


def distributed_device_id(index: Index = None) -> torch.device | None:
    """``device_id`` of ``torch.distributed.init_process_group``; None on cpu."""
    return None if current().is_cpu else current().device(index)


def set_device(index: Index) -> None:
    current().set_device(index)


def synchronize(device_arg: Index = None) -> None:
    current().synchronize(device_arg)


def empty_cache() -> None:
    current().empty_cache()


def memory_allocated(device_arg: Index = None) -> int:
    """Bytes that tensors take on the device."""
    return current().memory_allocated(device_arg)


def process_group_backend(default: str = "nccl") -> str:
    """``default`` where it reaches the device, else the device's own backend (gloo on cpu)."""
    return current().process_group_backend(default)


def weight_update_backend(default: str = "nccl") -> str:
    """The backend between trainer and engines: the same rule."""
    return current().process_group_backend(default)


def visible_devices_env_key() -> str:
    return current().visible_devices_env_key


def resolve_visible_device_id(physical_device_id: int | float | str) -> int:
    """See :meth:`Accelerator.resolve_visible_device_id`."""
    return current().resolve_visible_device_id(physical_device_id)
