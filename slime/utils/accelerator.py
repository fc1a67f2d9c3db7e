"""The device interface of slime: ``cuda`` (NVIDIA and AMD with ROCm) if a device exists, else ``cpu``.

All other modules use the result of :func:`current`. The functions below it are shortcuts for tools and plugins.
Importing this module does not import torch, so the driver can count device slots cheaply.

For another kind of device, register a subclass of :class:`Accelerator` in every process before the first use, for
example in an installed ``sitecustomize``. :func:`allow_torchvision_on_cpu` is for machines without a device.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    import torch


# A device of this process: its number, "cuda:1", or a torch.device. None is the current device.
Index: TypeAlias = "int | str | torch.device | None"


class Accelerator:
    """Interface with the implementation for the CPU. Other kinds override it.

    Attributes:
        name: value of ``SLIME_ACCELERATOR``, and torch's name of the device.
        communication_backends: backends of ``torch.distributed`` that support the device, the usual one first.
        visible_devices_env_key: environment variable with the devices that a process may use.
    """

    name = "cpu"
    communication_backends: tuple[str, ...] = ("gloo",)
    visible_devices_env_key = "CUDA_VISIBLE_DEVICES"

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def communication_backend(self) -> str:
        """Backend of process groups: ``nccl`` on cuda, ``gloo`` on cpu."""
        return self.communication_backends[0]

    def process_group_backend(self, default: str) -> str:
        """``default`` if it supports the device, else the usual backend of the device."""
        return default if default in self.communication_backends else self.communication_backend

    @staticmethod
    def is_available() -> bool:
        return True

    def num_devices(self) -> int:
        """Number of devices of this host."""
        return 0  # on cpu Ray's GPU slots are only logical

    def current_device(self) -> int | str:
        return self.name

    def device(self, index: Index = None) -> torch.device:
        import torch

        return torch.device(self.name)

    def set_device(self, index: Index) -> None:
        """Set the current device of this process."""

    def synchronize(self, index: Index = None) -> None:
        """Wait for all work on the device."""

    def empty_cache(self) -> None:
        """Return cached memory of torch to the device."""

    def give_back_shared(self) -> None:
        """Free device memory that was shared with other processes, after they have closed it."""

    def memory_allocated(self, index: Index = None) -> int:
        """Bytes of tensors on the device. 0 on cpu, where torch does not count them."""
        return 0

    def free_memory(self) -> int | None:
        """Bytes that this process can still allocate on the current device. None if it has no separate memory."""
        return None

    def manual_seed(self, seed: int) -> None:
        import torch

        torch.default_generator.manual_seed(seed)

    def rng_state(self) -> torch.Tensor | None:
        """State of the random generator of the device. None on cpu."""
        return None  # cpu has only torch's default generator

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        """Restore a state of :meth:`rng_state`. States of other kinds of devices are ignored."""

    def resolve_visible_device_id(self, physical_device_id: int | float | str) -> int:
        """Number in this process of the device ``physical_device_id``, which is a number of the host or of Ray.

        Raises:
            RuntimeError: the process does not see that device.
        """
        wanted = physical_device_id if isinstance(physical_device_id, str) else str(int(physical_device_id))
        visible = os.environ.get(self.visible_devices_env_key)
        if visible is None:
            return int(wanted)
        names = [name.strip() for name in visible.split(",")]
        if wanted not in names:
            raise RuntimeError(
                f"device {wanted} is not visible to this process: {self.visible_devices_env_key}={visible}. Name one "
                "of those, or change the variable before the process starts."
            )
        return names.index(wanted)


class CPUAccelerator(Accelerator):
    """A machine without accelerator."""

    def resolve_visible_device_id(self, physical_device_id: int | float | str) -> int:
        # The number is a logical slot. CUDA_VISIBLE_DEVICES may hide devices that this process does not use.
        return int(physical_device_id)


class CUDAAccelerator(Accelerator):
    """NVIDIA and AMD devices, through ``torch.cuda``."""

    name = "cuda"
    communication_backends = ("nccl", "gloo")

    @staticmethod
    def is_available() -> bool:
        import torch

        return torch.cuda.is_available()

    def num_devices(self) -> int:
        import torch

        return torch.cuda.device_count()

    def current_device(self) -> int:
        import torch

        return torch.cuda.current_device()

    def device(self, index: Index = None) -> torch.device:
        import torch

        if index is None:  # torch.device("cuda") without a number compares unequal to the devices of tensors
            index = torch.cuda.current_device()
        return torch.device("cuda", index) if isinstance(index, int) else torch.device(index)

    def set_device(self, index: Index) -> None:
        import torch

        torch.cuda.set_device(self.device(index))

    def synchronize(self, index: Index = None) -> None:
        import torch

        torch.cuda.synchronize(self.device(index))

    def empty_cache(self) -> None:
        import torch

        # torch keeps segments in which a workspace of cuBLAS lies, here 0.9 GiB. The next product makes a new one
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def give_back_shared(self) -> None:
        import torch

        # order matters: ipc_collect moves the freed blocks to torch's cache, and empty_cache returns them to the device
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # torch has no hints there
        torch.cuda.empty_cache()

    def memory_allocated(self, index: Index = None) -> int:
        import torch

        return torch.cuda.memory_allocated(self.device(index))

    def free_memory(self) -> int | None:
        import torch

        # torch's cache belongs to the process, but counts as used
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + cached

    def manual_seed(self, seed: int) -> None:
        import torch

        torch.cuda.manual_seed(seed)  # only the current device: each rank has one

    def rng_state(self) -> torch.Tensor | None:
        import torch

        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        import torch

        if state is not None:
            torch.cuda.set_rng_state(state)


class MUSAAccelerator(Accelerator):
    """Moore Threads devices: detected, but not supported."""

    name = "musa"
    communication_backends = ("mccl", "gloo")
    visible_devices_env_key = "MUSA_VISIBLE_DEVICES"

    def __init__(self) -> None:
        raise ConfigError(
            "SLIME_ACCELERATOR=musa is not supported yet: nothing here was ever run on Moore Threads' devices. Set "
            "SLIME_ACCELERATOR=cpu, or register an accelerator of your own (slime.utils.accelerator)."
        )

    @staticmethod
    def is_available() -> bool:
        if importlib.util.find_spec("torch_musa") is None:
            return False
        import torch
        import torch_musa  # noqa: F401  # adds torch.musa

        return bool(torch.musa.is_available())  # type: ignore[attr-defined]


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


_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"  # of nms and qnms of torchvision
# A torch Library drops its definitions when it is garbage-collected.
_kept: list[object] = []


def allow_torchvision_on_cpu() -> None:
    """Make torchvision's CUDA wheel importable with a CPU-only torch. Does nothing with a CUDA build of torch.

    SGLang and transformers import torchvision, and PyPI has no CPU build of it. At import, torchvision attaches meta
    kernels to two operators. Its Python part works on a CPU build of torch if the schemas of these operators exist:
    they are defined just before torchvision is first imported. Delete this when torchvision guards that registration.
    """
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that finds no module and defines the schemas at the first import of torchvision."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "torchvision":
            # First, so that the hook acts once even if an import below asks for torchvision again.
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
                library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
                for operator in ("nms", "qnms"):
                    library.define(operator + _SCHEMA)
                _kept.append(library)
