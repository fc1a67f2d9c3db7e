"""Device interface of slime, with one class per kind: CPU, and ``cuda`` for NVIDIA and AMD (ROCm).

Importing this module does not import torch. For another kind, write a subclass and register it with
``slime.utils.accelerator.register_accelerator``.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, TypeAlias

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
