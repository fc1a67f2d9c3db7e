"""A simulated engine: the actor's body with the verbs of ``SGLangEngine``, and the server that generates tokens.

Every generated token names the weights that made it: ``FIRST_TOKEN`` plus the number of rollouts that these weights
were trained on. So a wrong version in the reply, or a mixture of versions, is visible in the trained tokens.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from slime.backends import EngineInfo
from slime.utils.errors import EngineError, EngineSilent, SlimeError
from tests.simulation.cluster import Later, Steps, inline, waited
from tests.simulation.network import Exchange, Server, network
from tests.simulation.world import Process, world

FIRST_TOKEN = 40
_TOKEN_S = 0.05
_START_S = 1.0
_VERB_S = 0.02
_CONTROL_TIMEOUT_S = 60.0


class EngineServer(Server):
    """The HTTP server of an engine.

    Attributes:
        trained_on: number of rollouts that its weights were trained on. -1: weights of the checkpoint.
        version: the version that it reports.
        has_notice: it got SIGTERM.
    """

    def __init__(self, process: Process, url: str) -> None:
        super().__init__(process, url)
        self.trained_on, self.version = -1, "default"
        self.is_paused = False
        self.has_notice = False
        self._running: dict[Exchange, float] = {}
        self._waiting: list[Exchange] = []

    def handle(self, exchange: Exchange) -> None:
        if exchange.path == "/abort_request":
            rid = exchange.body.get("rid")
            for request in [*self._running, *self._waiting]:
                if exchange.body.get("abort_all") or request.body["rid"] == rid:
                    self._abort(request)
            exchange.reply(200, {})
        elif exchange.path.startswith("/v1/loads"):
            load = {"num_running_reqs": len(self._running), "num_waiting_reqs": len(self._waiting)}
            exchange.reply(200, {"loads": [load]})
        elif any(exchange.body["rid"] == other.body["rid"] for other in [*self._running, *self._waiting]):
            exchange.reply(400, f"Duplicate request ID detected: {exchange.body['rid']}")  # as SGLang
        elif self.is_paused:
            self._waiting.append(exchange)
            exchange.on_close = lambda: self._forget(exchange)
        else:
            self._begin(exchange)

    def abort_all(self) -> None:
        for request in [*self._running, *self._waiting]:
            self._abort(request)

    @property
    def num_requests(self) -> int:
        return len(self._running) + len(self._waiting)

    def preempt(self, seconds: float) -> None:
        """SIGTERM, and SIGKILL after ``seconds``."""
        self.has_notice = True
        world().at(seconds, lambda: world().kill(self.process))

    def pause(self) -> None:
        """End running requests with the tokens that they have."""
        self.is_paused = True
        for exchange in list(self._running):
            self._abort(exchange)

    def resume(self) -> None:
        self.is_paused = False
        waiting, self._waiting = self._waiting, []
        for exchange in waiting:
            self._begin(exchange)

    def _begin(self, exchange: Exchange) -> None:
        here = world()
        exchange.on_close = lambda: self._forget(exchange)
        self._running[exchange] = here.now
        room = exchange.body["sampling_params"]["max_new_tokens"]
        count = min(room, 1 + here.random.randrange(8))
        here.at(_TOKEN_S * (1 + count), lambda: self._end(exchange, count))

    def _end(self, exchange: Exchange, count: int) -> None:
        if exchange not in self._running:
            return
        if self.process.is_paused:
            world().at(0.2, lambda: self._end(exchange, count))
            return
        del self._running[exchange]
        is_cut = count >= exchange.body["sampling_params"]["max_new_tokens"]
        self._answer(exchange, count, "length" if is_cut else "stop")

    def _abort(self, exchange: Exchange) -> None:
        begun = self._running.pop(exchange, None)
        if exchange in self._waiting:
            self._waiting.remove(exchange)
        count = 0 if begun is None else int((world().now - begun) / _TOKEN_S)
        self._answer(exchange, min(count, exchange.body["sampling_params"]["max_new_tokens"]), "abort")

    def _answer(self, exchange: Exchange, count: int, reason: str) -> None:
        token = FIRST_TOKEN + self.trained_on
        meta = {
            "id": exchange.body["rid"],
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-1.0, token, None]] * count,
            "prompt_tokens": len(exchange.body["input_ids"]),
            "completion_tokens": count,
            "cached_tokens": 0,
            "weight_version": self.version,
        }
        exchange.reply(200, {"text": "x" * count, "meta_info": meta})

    def _forget(self, exchange: Exchange) -> None:
        self._running.pop(exchange, None)
        if exchange in self._waiting:
            self._waiting.remove(exchange)


class EnginePort:
    """``slime.ray.run.engine_port.EnginePort`` without HTTP: its thread, and the calls that its requests make."""

    def __init__(self, engines: Any, port: int) -> None:
        self.process = world().current.process
        self.url = "http://driver:0"
        self._engines = engines
        world().globals["engine port"] = self

    def resize(self, count: int) -> None:
        from slime.ray.engines.servers import RolloutServers

        with contextlib.suppress(RayError, SlimeError):  # as the port, which answers with the error
            self._engines.call(RolloutServers.resize, count)
        world().note(f"asked for {count} engines")

    def close(self) -> None:
        world().globals["engine port"] = None


class SimulatedEngine:
    """Stands in for ``slime.ray.engines.actor.EngineActor``."""

    process_name = staticmethod(lambda args, place, *_: f"engine{place.rank}")
    _ports = itertools.count()

    def __init__(self, args: Any, place: Any, first_slot: int, *others: Any) -> None:
        self._rank, self._slot, self._args = place.rank, first_slot, args
        self._server: EngineServer | None = None

    def _start(self) -> None:
        here = world()
        here.sleep(_START_S * (0.5 + here.random.random()))
        actor = here.current.process
        process = here.process(f"server{self._rank}")
        actor.on_death.append(lambda: here.kill(process))
        self._server = EngineServer(process, f"http://engine{self._rank}-{process.number}:80")

    def start_unregistered(self) -> EngineInfo:
        self._start()
        assert self._server is not None
        return EngineInfo(self._server.url, 1, self._slot)

    def start_and_register(self, router_url: str) -> EngineInfo:
        info = self.start_unregistered()
        self.register(router_url)
        return info

    def register(self, router_url: str) -> None:
        url = waited(self._verb("register")).url
        network().call("POST", f"{router_url}/workers", {"url": url}, _CONTROL_TIMEOUT_S)
        if url not in [worker["url"] for worker in network().call("GET", f"{router_url}/workers")["workers"]]:
            raise EngineError(f"the router did not take {url}")

    @inline
    def has_ended(self) -> bool:
        return self._server is None or self._server.process.is_dead

    @inline
    def is_leaving(self) -> bool:
        return self._server is not None and not self._server.process.is_dead and self._server.has_notice

    def abort_all(self) -> Steps[None]:
        (yield from self._verb("abort_all")).abort_all()

    def num_requests(self) -> Steps[int]:
        return (yield from self._verb("num_requests")).num_requests

    @inline
    def is_responsive(self, timeout_s: float) -> bool | Later:
        if self._server is None or self._server.process.is_dead:
            return False
        silent = network().is_cut_until.get(self._server.process, 0.0) > world().now
        return Later(False, timeout_s) if silent or self._server.process.is_paused else True

    @inline
    def raise_if_dead(self) -> None:
        if self.has_ended():
            raise EngineError(f"engine {self._rank} died with status -9.")

    @inline
    def stop(self) -> None:
        if self._server is not None:
            world().kill(self._server.process)

    def _verb(self, name: str, timeout_s: float = _CONTROL_TIMEOUT_S) -> Steps[EngineServer]:
        """Reach the server, or raise as the HTTP call of an engine does."""
        here, server = world(), self._server
        if server is None:
            raise EngineError(f"engine {self._rank} has not started")
        start = here.now
        yield _VERB_S
        while not server.process.is_dead and (
            server.process.is_paused or network().is_cut_until.get(server.process, 0.0) > here.now
        ):
            if here.now > start + timeout_s:
                raise EngineSilent(f"engine {self._rank}: {name}: no answer within {timeout_s:g} s", [server.url])
            yield 0.25
        self.raise_if_dead()
        here.note(f"verb {server.process.name}.{name}")
        return server

    def pause_generation(self, mode: str = "retract") -> Steps[None]:
        (yield from self._verb("pause")).pause()

    def continue_generation(self) -> Steps[None]:
        (yield from self._verb("continue")).resume()

    def flush_cache(self, timeout_s: float | None = None) -> Steps[None]:
        yield from self._verb("flush")

    def update_weights_from_disk(self, model_path: str, weight_version: str) -> Steps[None]:
        yield from self.load_number(int(model_path.rpartition("/")[2]), weight_version)

    def load_number(self, trained_on: int, weight_version: str) -> Steps[None]:
        """Weights that arrive from the trainer's ranks, as ``update_weights_from_distributed``."""
        server = yield from self._verb("load", self._args.weight_sync_timeout)
        yield 0.1 * (1 + world().random.random())
        server.trained_on, server.version = trained_on, weight_version

    def begin_weight_update(self) -> Steps[None]:
        yield from self._verb("begin")

    def end_weight_update(self) -> Steps[None]:
        yield from self._verb("end")

    def weight_version(self) -> Steps[str]:
        return (yield from self._verb("version")).version

    def release_memory_occupation(self, tags: Sequence[str] = ()) -> Steps[None]:
        yield from self._verb("release")

    def resume_memory_occupation(self, tags: Sequence[str] = ()) -> Steps[None]:
        yield from self._verb("resume")
