"""One served model: the router in front of it and its engines, started side by side, watched, and stopped together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from slime.backends.sglang_utils.router import Router
from slime.ray.engines.slots import EngineSlots

__all__ = ["RolloutServer"]

logger = logging.getLogger(__name__)


class RolloutServer:
    """Router and engines of one model. The constructor returns at once; :meth:`wait_ready` waits.

    Args:
        name: of the model.
        make: starts the actor for (rank, how many died there before); returns its handle without waiting.
        ranks: numbers of the engines in the run.
        updates_weights: False for a model that keeps the weights it was started with.
        registers: the engines were not registered with the router before; a router that lives on forgets them again.
    """

    def __init__(
        self,
        name: str,
        router: Router,
        make: Callable[[int, int], Any],
        ranks: Sequence[int],
        *,
        updates_weights: bool,
        registers: bool = True,
    ) -> None:
        self._registers = registers
        self.name = name
        self.router = router
        self.updates_weights = updates_weights
        self.engines = EngineSlots(make, ranks, router.url, needs_weights=updates_weights)

    def wait_ready(self, timeout_s: float) -> tuple[str, int]:
        """(host, port) of the router once every engine is registered with it."""
        self.router.wait_ready()
        self.engines.wait_ready(timeout_s)
        urls = ", ".join(engine.url for engine in self.engines.fleet().engines) or "none"
        about = "" if self.updates_weights else f" of {self.name}, whose weights stay"
        logger.info("router %s, engines%s %s", self.router.url, about, urls)
        return self.router.host, self.router.port

    def raise_if_dead(self) -> None:
        """Raise the cause if the router has died, or an engine that nobody replaces."""
        self.router.raise_if_dead()
        self.engines.raise_if_dead()

    def stop(self) -> None:
        self.engines.stop(leaves_router=self._registers and not self.router.is_ours)
        self.router.stop()
