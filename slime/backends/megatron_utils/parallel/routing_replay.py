"""Routing replay: the choice of experts of one pass over the batch, taken again in a later pass.

A choice that flips between the pass that computed the old log-probs and the training step moves a token's log-prob
for no reason that a gradient could see (GSPO, arXiv 2507.18071, section 5.3, "Routing Replay"). The scores stay those
of the current weights, so gradients flow to the router as always; only which experts are chosen is fixed.

    record   each router keeps its choices, one tensor per micro-batch
    replay   they come back in the same order; a recomputed layer takes them a second time

The choices may also be given (``engine_routing``): replaying those of the engine removes the largest difference between
its log-probs and the trainer's (R3, arXiv 2510.11370: rollout routing replay).

Called by ``actor``. Plugs into Megatron's routers where its own ``RouterReplay`` would be, which keeps one micro-batch.
Routers of users' models that are no ``TopKRouter`` take part through :func:`register_routing_replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, TypeAlias

import torch
from megatron.core.transformer.moe.router import TopKRouter

from slime.backends.megatron_utils.checkpoint.tensor_plan import chunks_of

__all__ = ["RouterChoices", "RoutingReplay", "get_routing_replay_compute_topk", "register_routing_replay"]

_Choose: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_routing: ContextVar[torch.nn.Module | None] = ContextVar("routing", default=None)
"""The registered router whose forward runs."""


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
                self.recorded.append(indices.to(device="cpu", dtype=self._dtype))
                return probs, indices
            case _Mode.REPLAY:
                indices = self._next().to(device=scores.device, dtype=torch.int64)
                if indices.shape != (scores.size(0), topk):
                    raise RuntimeError(
                        f"routing replay, layer {self.layer}: the choices of {tuple(indices.shape)} do not fit the "
                        f"micro-batch's {(scores.size(0), topk)}: the passes do not see the same micro-batches"
                    )
                return scores.gather(1, indices), indices
            case _:
                raise AssertionError(f"unknown mode {self.mode}")

    def _next(self) -> torch.Tensor:
        """Without gradients it is the first pass through a layer that will be recomputed; with gradients it is the
        recomputation if such a pass is outstanding (in the order of the passes), else the only one."""
        if torch.is_grad_enabled() and self._again < self._first:
            self._again += 1
            return self.recorded[self._again - 1]
        if self._first == len(self.recorded):
            raise RuntimeError(f"routing replay, layer {self.layer}: no choices are left after {self._first}")
        self._first += 1
        self._again += torch.is_grad_enabled()
        return self.recorded[self._first - 1]


class RoutingReplay:
    """The choices of all routers of this rank's part of the model."""

    def __init__(self, model: Any) -> None:
        self.routers: list[RouterChoices] = []
        for chunk in chunks_of(model):
            for module in chunk.decoder.modules():
                if isinstance(module, TopKRouter) or hasattr(module, "router_replay"):
                    choices = RouterChoices(module.layer_number - 1, module.config.num_moe_experts)
                    module.router_replay = choices
                    self.routers.append(choices)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Passes inside are remembered, whatever was remembered before is gone."""
        for router in self.routers:
            router.clear()
        with self._mode(_Mode.RECORD):
            yield

    @contextmanager
    def replaying(self, choices: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
        """Passes inside choose as the recorded ones did, in the same order. All must be used; they are gone after.

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
    """Make a router of one's own take part in routing replay; call it where the router is made.

    The router chooses by what :func:`get_routing_replay_compute_topk` gives it. It has ``layer_number`` (from 1) and
    ``config.num_moe_experts``.
    """
    module.router_replay = None  # until there is something to replay

    def begin(module: torch.nn.Module, inputs: Any) -> None:
        _routing.set(module)

    def end(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        _routing.set(None)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


def get_routing_replay_compute_topk(old_compute_topk: _Choose) -> _Choose:
    """``old_compute_topk(scores, topk, num_groups=None, group_topk=None)`` with the recorded choices where they are to
    be taken again; as it is outside of registered routers."""

    def compute_topk(
        scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        router = _routing.get()
        choices: RouterChoices | None = None if router is None else router.router_replay
        if choices is None:
            return old_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return choices.get_replay_topk(scores, topk, num_groups, group_topk, old_compute_topk)

    return compute_topk
