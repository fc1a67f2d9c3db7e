"""AdamW whose main weights and moments are in host memory, for a share of the weights (--optimizer-cpu-offload).

    device                              pinned host memory
    gradient (fp32 buffer)        --->  staging buffer -> AdamW on main weight and moments, on all cores of the rank
    model weight <- fp32 scratch  <---  main weight

The device keeps 2 bytes of weight and 4 of gradient per parameter, and 12 bytes go to the host. The other share has the
same update with its 12 bytes on the device. On a CPU host and device are one memory and nothing is copied.

Copies are made in pieces of 64 MiB, always between pinned memory and the device, and always in fp32: the device casts.
With --overlap-cpu-optimizer-d2h-h2d the next gradient and the last weight are copied during the update of a piece.

How it fits into Megatron's sharded optimizer: that has a mode for optimizers that own their main weights
("precision-aware"). There it hands over shards of the model's weights with ``decoupled_grad``, and leaves main weights
and the copy back to us. Called by ``optimizer``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.optim.adamw import adamw

from slime.utils import accelerator
from slime.utils.process import num_cpus

_STATES = ("master_param", "exp_avg", "exp_avg_sq")
_HOST = torch.device("cpu")
_PIECE = 2**24  # numbers: large enough for the full speed of PCIe, small beside an embedding of a gigabyte


@dataclass(frozen=True)
class HostUpdate:
    """How the share on the host is updated.

    Attributes:
        fraction: share of the numbers with states on the host: the first shards, each as a whole.
        overlaps: copies run during the updates.
        num_threads: of an update. None: those of the process.
        is_staged: copy through staging buffers. None: if the weights are on another device.
        piece: numbers per copy.
    """

    fraction: float = 1.0
    overlaps: bool = False
    num_threads: int | None = None
    is_staged: bool | None = None
    piece: int = _PIECE


class HostAdam(torch.optim.Optimizer):
    """See the module docstring.

    Args:
        groups: of Megatron's Adam, with its settings: shards of the model's weights, flat, views of its buffers.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], update: HostUpdate) -> None:
        super().__init__([torch.empty(0)], {})  # torch refuses an empty list
        self.param_groups = list(groups)  # the same objects: Megatron and the schedule keep references to them
        self._how = update
        shards = [shard for group in self.param_groups for shard in group["params"]]
        budget = update.fraction * sum(shard.numel() for shard in shards)
        self._staged: set[torch.Tensor] = set()
        with _threads(update.num_threads):  # also fills the new memory
            for shard in shards:
                is_host = budget > 0
                budget -= shard.numel()
                self.state[shard] = _first_state(shard, _HOST if is_host else shard.device)
                if is_host and (shard.device != _HOST if update.is_staged is None else update.is_staged):
                    self._staged.add(shard)
        longest = min(update.piece, max((shard.numel() for shard in self._staged), default=0))
        pin = _is_pinned(shards)
        self._buffers = [
            torch.empty(longest, dtype=torch.float32, pin_memory=pin) for _ in range(1 + update.overlaps) if longest
        ]

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """Main weights and moments on the model's device."""
        for shard, state in self.state.items():
            yield from (state[name] for name in _STATES if state[name].device == shard.device)

    @torch.no_grad()
    def read_weights(self) -> None:
        """Start the main weights from the model's weights, which were filled from elsewhere."""
        for shard, state in self.state.items():
            state["master_param"].copy_(shard)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply ``decoupled_grad``: decoupled weight decay, then Adam (Loshchilov and Hutter 2019, algorithm 2)."""
        assert closure is None, "Megatron gives none"
        pieces: list[_Piece] = []
        with _threads(self._how.num_threads):
            for group in self.param_groups:
                for shard in group["params"]:
                    gradient = vars(shard).get("decoupled_grad")  # set by Megatron in its precision-aware mode
                    if gradient is None:
                        continue
                    if shard in self._staged:
                        pieces += _pieces(shard, gradient, self.state[shard], group, self._how.piece)
                        continue
                    state = self.state[shard]
                    _update(gradient.float(), state, group)
                    shard.copy_(state["master_param"])
                group["step"] = group.get("step", 0) + 1
            if pieces:
                self._update_staged(pieces)

    def _update_staged(self, pieces: Sequence[_Piece]) -> None:
        """Update piece after piece. A buffer is filled again only after the update that reads it."""
        device, count = pieces[0].shard.device, len(self._buffers)
        wide = [torch.empty(len(buffer), dtype=torch.float32, device=device) for buffer in self._buffers]
        down, up = _Stream(device), _Stream(device)
        arrived: list[Callable[[], None]] = []
        for index, piece in enumerate(pieces):
            for ahead in pieces[len(arrived) : index + count]:
                with down:
                    target = self._buffers[len(arrived) % count][: ahead.shard.numel()]
                    target.copy_(ahead.gradient, non_blocking=True)
                arrived.append(down.mark())
            arrived[index]()
            _update(self._buffers[index % count][: piece.shard.numel()], piece.state, piece.group)
            with up:
                scratch = wide[index % count][: piece.shard.numel()]
                piece.shard.copy_(scratch.copy_(piece.state["master_param"], non_blocking=True))
            if count == 1:
                up.mark()()
        # Later steps change the main weights, and readers of the model's weights use other streams.
        up.mark()()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. They are views of a buffer that belongs to Megatron."""
        for group in self.param_groups:
            for shard in group["params"]:
                shard.decoupled_grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups' settings and the step. Megatron copies the tensors itself."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
            for shard in group["params"]:
                self.state[shard]["step"].fill_(float(group.get("step") or 0))


@dataclass(frozen=True)
class _Piece:
    """A part of a shard, of its gradient and of its states."""

    shard: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, torch.Tensor]
    group: dict[str, Any]


def _pieces(
    shard: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any], size: int
) -> Iterator[_Piece]:
    for start in range(0, shard.numel(), size):
        part = slice(start, start + size)
        # Adam advances the step, once per call: every piece but the first gets a copy of the old one.
        states = {name: state[name][part] for name in _STATES}
        states["step"] = state["step"].clone() if start else state["step"]
        yield _Piece(shard[part], gradient[part], states, group)


def _update(gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [state["master_param"]],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        foreach=False,
        fused=True,  # one pass over memory instead of ten
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class _Stream(AbstractContextManager[None]):
    """A stream of the device beside the current one, whose work so far it follows. On a CPU copies simply run."""

    def __init__(self, device: torch.device) -> None:
        self._block: AbstractContextManager[Any] = nullcontext()
        self._stream: Any = None
        if device.type != "cpu":
            streams = torch.get_device_module(device)
            self._stream = streams.Stream(device)
            self._stream.wait_stream(streams.current_stream(device))
            self._make_block = streams.stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._block = self._make_block(self._stream)
        self._block.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    def mark(self) -> Callable[[], None]:
        """A function that waits until the stream has done its work so far."""
        if self._stream is None:
            return lambda: None
        synchronize: Callable[[], None] = self._stream.record_event().synchronize
        return synchronize


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute with ``count`` threads inside the block. None changes nothing."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


@dataclass(frozen=True)
class Cores:
    """The CPUs of a rank.

    Attributes:
        host: name of the node.
        cpus: those that the rank may use. Ranks of one node share them, or have those of their NUMA node.
        quota: number of CPUs that all ranks of the node may use together.
    """

    host: str
    cpus: tuple[int, ...]
    quota: int


def update_threads() -> int | None:
    """Threads of this rank's updates: its share of the node's CPUs. A collective.

    Ray starts trainer ranks with ``OMP_NUM_THREADS=1``, and a user may give another number. Binds the process to the
    CPUs near its GPU, before the main weights are allocated. None for the threads that the process has: on a CPU, where
    ranks and engines share the cores at all times, and with a user's number.
    """
    if accelerator.current().is_cpu:
        return None
    quota = num_cpus()
    _bind_to_numa_node()
    mine = Cores(socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))), quota)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return None if os.environ.get("OMP_NUM_THREADS", "1") != "1" else threads_of(mine, ranks)


def threads_of(mine: Cores, ranks: Sequence[Cores]) -> int:
    """The share of the CPUs that a rank with ``mine`` has beside the other ``ranks``. At least 1."""
    on_node = [cores for cores in ranks if cores.host == mine.host]
    num_near = sum(cores.cpus == mine.cpus for cores in on_node)
    return max(1, min(len(mine.cpus) // num_near, mine.quota // len(on_node)))


def _bind_to_numa_node() -> None:
    try:
        # Private, but the alternative is to parse the same files of /sys.
        from torch.numa.binding import AffinityMode, NumaOptions, _maybe_apply_numa_binding_to_current_process
    except ImportError:  # an older torch: memory of another socket is slower, not wrong
        return
    options = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    _maybe_apply_numa_binding_to_current_process(gpu_index=torch.cuda.current_device(), numa_options=options)


@torch.no_grad()
def _first_state(shard: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    is_pinned = device == _HOST and _is_pinned([shard])
    state = {
        name: torch.zeros(shard.shape, dtype=torch.float32, device=device, pin_memory=is_pinned) for name in _STATES
    }
    state["master_param"].copy_(shard)
    return state | {"step": torch.zeros((), dtype=torch.float32, device=device)}


def _is_pinned(shards: list[torch.Tensor]) -> bool:
    """Whether to pin host memory, so that a GPU copies at full speed. Impossible without a GPU."""
    return any(shard.is_cuda for shard in shards)


class _HostDistributedOptimizer(DistributedOptimizer):
    """Megatron's sharded optimizer around :class:`HostAdam`: where its tensors are found, for checkpoints."""

    def _get_main_param_and_optimizer_states(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        main, *moments = (self._states_of(model_param)[name] for name in _STATES)
        return {"param": main, **dict(zip(_STATES[1:], moments, strict=True))}

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        for name, target in self._get_main_param_and_optimizer_states(model_param).items():
            target.copy_(tensors[name])

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        self.optimizer.read_weights()

    def _states_of(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        group, index = self.model_param_group_index_map[model_param]
        states: dict[str, torch.Tensor] = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        return states


def keep_states_on_host(part: Any, update: HostUpdate) -> None:
    """Let ``part``, a sharded optimizer in precision-aware mode, step with :class:`HostAdam`."""
    if part.optimizer is None:  # nothing to train on this rank
        return
    part.optimizer = HostAdam(part.optimizer.param_groups, update)
    part.__class__ = _HostDistributedOptimizer  # Megatron built it: only the access to its tensors changes
