"""Routing replay: a later pass repeats the expert choices of an earlier pass, or of the engine.

A choice that flips between the pass for the old log-probs and the training step changes a token's log-prob without a
gradient for it (GSPO, arXiv 2507.18071, section 5.3, "Routing Replay"). Only the choice is fixed: scores come from the
current weights, so the router still gets gradients.

    record   each router keeps its choices, one tensor per micro-batch
    replay   routers take them in the same order, a recomputed layer twice

Replaying the engine's choices removes the largest difference between its log-probs and the trainer's (rollout routing
replay, R3, arXiv 2510.11370). Their layout:

    sample      rows of its tokens but the last, from the engine          [L - 1, layers, topk]
    whole       the packed micro-batch. Last tokens and padding get
                arbitrary experts                                         [T, layers, topk]
    rank        the zigzag part of the context-parallel rank, then the
                slice of the tensor rank under sequence parallelism       [t, layers, topk]

A last token and the padding come after every token with a loss. Causal attention therefore keeps them out of logits and
gradients.

Plugs into Megatron's routers in place of its ``RouterReplay``, which keeps only one micro-batch. Users' routers of
other classes than ``TopKRouter`` take part through :func:`register_routing_replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter

from slime.backends.megatron_utils.checkpoint.tensors import chunks_of
from slime.backends.training.context_parallel import Sharding, zigzag_rows
from slime.backends.training.data import TrainBatch
from slime.data.engine_meta import check_routed_experts
from slime.models.shape import ModelShape
from slime.utils import accelerator
from slime.utils.errors import DataError

_Choose: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# The registered router whose forward runs.
_routing: ContextVar[torch.nn.Module | None] = ContextVar("routing", default=None)


class _Mode(StrEnum):
    OFF = "off"
    RECORD = "record"
    REPLAY = "replay"


class RouterChoices:
    """The choices of one router. Has the method that Megatron's routing asks for its top k."""

    def __init__(self, layer: int, num_experts: int) -> None:
        self.layer = layer
        self.mode = _Mode.OFF
        self.recorded: list[torch.Tensor] = []
        # Host memory holds the records of all micro-batches.
        self._dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self._first = 0
        self._again = 0

    def clear(self) -> None:
        self.recorded.clear()
        self.rewind()

    def rewind(self) -> None:
        self._first = self._again = 0

    @property
    def is_used_up(self) -> bool:
        return self._first == len(self.recorded)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: _Choose,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``scores`` [tokens, experts] -> scores and numbers of the chosen experts, both [tokens, topk]."""
        match self.mode:
            case _Mode.OFF:
                return choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
            case _Mode.RECORD:
                probs, indices = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
                self.recorded.append(_to_host(indices.to(self._dtype)))
                return probs, indices
            case _Mode.REPLAY:
                indices = self._next()
                if indices.device != scores.device:
                    # It follows the copy to the host on the same stream, so the host waits for neither.
                    indices = indices.to(scores.device, non_blocking=True)
                indices = indices.long()
                if indices.shape != (scores.size(0), topk):
                    raise RuntimeError(
                        f"routing replay, layer {self.layer}: the choices of {tuple(indices.shape)} do not fit the "
                        f"micro-batch's {(scores.size(0), topk)}: the passes do not see the same micro-batches"
                    )
                return scores.gather(1, indices), indices
            case _:
                raise AssertionError(f"unknown mode {self.mode}")

    def _next(self) -> torch.Tensor:
        # A pass without gradients is the first one through a layer that will be recomputed. A pass with gradients is
        # the recomputation of the oldest such pass, or the only pass.
        if torch.is_grad_enabled() and self._again < self._first:
            self._again += 1
            return self.recorded[self._again - 1]
        if self._first == len(self.recorded):
            raise RuntimeError(f"routing replay, layer {self.layer}: no choices are left after {self._first}")
        self._first += 1
        self._again += torch.is_grad_enabled()
        return self.recorded[self._first - 1]


def _to_host(indices: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, whose content the host must not read: it arrives later."""
    if indices.device.type == "cpu":
        return indices
    return torch.empty_like(indices, device="cpu", pin_memory=True).copy_(indices, non_blocking=True)


class RoutingReplay:
    """The choices of all routers of this rank's part of the model."""

    def __init__(self, model: Any) -> None:
        self.routers: list[RouterChoices] = []
        for chunk in chunks_of(model):
            for module in chunk.decoder.modules():  # not the routers of prediction layers
                if isinstance(module, TopKRouter) or hasattr(module, "router_replay"):
                    choices = RouterChoices(module.layer_number - 1, module.config.num_moe_experts)
                    module.router_replay = choices
                    self.routers.append(choices)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Passes inside are recorded. Drops earlier records."""
        for router in self.routers:
            router.clear()
        with self._mode(_Mode.RECORD):
            yield

    @contextmanager
    def replaying(self, choices: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
        """Passes inside repeat the recorded choices in the same order. All must be used. They are dropped at the end.

        Args:
            choices: take these instead: ``[tokens, layers, topk]`` for every micro-batch, with all layers of the model
                and the tokens that this rank's routers see.
        """
        if choices is not None:
            self._fill(choices)
        for router in self.routers:
            router.rewind()
        with self._mode(_Mode.REPLAY):
            yield
        left = [router.layer for router in self.routers if not router.is_used_up]
        for router in self.routers:
            router.clear()
        if left:
            raise RuntimeError(f"routing replay: recorded choices of layers {left} were not used")

    def _fill(self, choices: Iterable[torch.Tensor]) -> None:
        for router in self.routers:
            router.clear()
        layers = [router.layer for router in self.routers]
        for micro_batch in choices:
            by_layer = micro_batch[:, layers].transpose(0, 1).contiguous()  # a router's part in one piece
            if not accelerator.current().is_cpu:
                by_layer = by_layer.pin_memory()
            for router, part in zip(self.routers, by_layer, strict=True):
                router.recorded.append(part)

    @property
    def is_recorded(self) -> bool:
        return any(router.recorded for router in self.routers)

    @contextmanager
    def _mode(self, mode: _Mode) -> Iterator[None]:
        for router in self.routers:
            router.mode = mode
        try:
            yield
        finally:
            for router in self.routers:
                router.mode = _Mode.OFF


def register_routing_replay(module: torch.nn.Module) -> None:
    """Let a user's router take part in routing replay. Call it when the router is made.

    The router chooses by what :func:`get_routing_replay_compute_topk` gives it. It has ``layer_number`` (from 1) and
    ``config.num_moe_experts``.
    """
    module.router_replay = None  # type: ignore[assignment]  # RoutingReplay sets it

    def begin(module: torch.nn.Module, inputs: Any) -> None:
        _routing.set(module)

    def end(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        _routing.set(None)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)  # also after an error


def get_routing_replay_compute_topk(old_compute_topk: _Choose) -> _Choose:
    """``old_compute_topk(scores, topk, num_groups=None, group_topk=None)``, but repeats recorded choices in a replay.

    Unchanged outside of registered routers.
    """

    def compute_topk(
        scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        router: Any = _routing.get()
        choices: RouterChoices | None = None if router is None else router.router_replay
        if choices is None:
            return old_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return choices.get_replay_topk(scores, topk, num_groups, group_topk, old_compute_topk)

    return compute_topk


COLUMN = "rollout_routed_experts"


def engine_choices(batch: TrainBatch, shape: ModelShape) -> Iterator[torch.Tensor]:
    """``[t, num_layers, topk]`` for every micro-batch of all steps, in order.

    Raises:
        DataError: the batch lacks the engine's choices, or they are not those of this model.
    """
    moe = shape.moe
    assert moe is not None, "setup refuses replay for a model without experts"
    if batch.columns.get(COLUMN) is None:
        raise DataError(
            f"--use-rollout-routing-replay: the batch has no column {COLUMN}. Every sample must carry the experts that "
            "the engine chose (meta_info routed_experts of a request with return_routed_experts)."
        )
    experts = [value for value in batch.columns[COLUMN] if len(value)]
    layers = [layer for layer, has_experts in enumerate(moe.layers) if has_experts]
    try:
        check_routed_experts(
            experts, num_layers=shape.num_layers, topk=moe.topk, moe_layers=layers, num_experts=moe.num_experts
        )
    except ValueError as error:
        raise DataError(f"--use-rollout-routing-replay: {error}.") from None
    for step in range(batch.num_steps):
        for micro_batch in batch.micro_batches(step):
            yield lay_out(
                batch.select(COLUMN, micro_batch.indices),
                torch.tensor(micro_batch.packed.borders),
                batch.sharding,
                shared=micro_batch.packed.shared,
                num_experts=moe.num_experts,
                # A rule demands sequence parallelism of a model with experts: each tensor rank routes its slice.
                tensor_rank=mpu.get_tensor_model_parallel_rank(),
                tensor_size=mpu.get_tensor_model_parallel_world_size(),
            )


def lay_out(
    experts: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor,
    sharding: Sharding,
    *,
    num_experts: int,
    shared: Sequence[int] | None = None,
    tensor_rank: int = 0,
    tensor_size: int = 1,
) -> torch.Tensor:
    """The choices of one micro-batch as this rank's routers need them: ``[t, layers, topk]``.

    Args:
        experts: ``[L - 1, layers, topk]`` of its samples, in order.
        cu_seqlens: ``[S + 1]`` borders of the whole micro-batch's segments. A segment after the samples is padding.
        shared: tokens that each sample shares with the one before it, with equal choices.
        tensor_rank, tensor_size: the tensor rank, and the number of slices that sequence parallelism makes. FP8 makes
            ``sharding.sequence_multiple`` larger than their number.
    """
    _, layers, topk = experts[0].shape
    total = int(cu_seqlens[-1])
    filler = (torch.arange(total * topk) % num_experts).to(experts[0].dtype)  # spread evenly, distinct in a row
    whole = filler.view(total, 1, topk).expand(total, layers, topk).clone()
    borders = cu_seqlens.tolist()
    for number, (start, value) in enumerate(zip(borders, experts, strict=False)):
        own = value if shared is None else value[shared[number] :]
        whole[start : start + len(own)] = own  # the sample's last token keeps the filler
    if sharding.cp_size > 1:
        whole = whole[zigzag_rows(cu_seqlens, sharding.cp_rank, sharding.cp_size)]
    return whole.chunk(tensor_size)[tensor_rank]
