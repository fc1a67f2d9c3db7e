"""Who the processes of a run are, and whether they live: a card for each actor, and a pulse that anyone can feel.

Every actor introduces itself when it starts: name, pid, node, log and a file that its Python stacks are written to on
SIGUSR2. The card is kept in Ray's own store, so it can be read when the actor is gone. From then on a thread of the
actor counts in the same store: a process that is stopped, or whose interpreter is stuck in native code, counts no more.

Read by ``blame`` (the reports) and ``pulse`` (who has stopped counting).
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put  # as in Ray's own libraries

__all__ = ["SILENCE_S", "STACK_SIGNAL", "Card", "card_of", "cards_of", "introduce", "last_beat", "myself"]

SILENCE_S = 10.0
"""Default of --heartbeat-timeout."""

STACK_SIGNAL = signal.SIGUSR2
_NAMESPACE = "slime.cards"
_BEATS = 5
"""Beats in the time after which silence is a sign."""

_stack_file: list[IO[str]] = []
"""Keeps the file open that the signal handler writes to."""


@dataclass(frozen=True)
class Card:
    """How to find a process of the run.

    Attributes:
        name: what messages call it.
        pid: valid on the node ``host``.
        created: the process's start in seconds since 1970, to tell it from another one with its number.
        log: file of its standard error; empty where that is no file.
        stack: file that SIGUSR2 makes it write its Python stacks to.
        actor_id: Ray's name of it.
        node_id: Ray's name of the node.
        silence_s: seconds without a beat after which something is wrong with it; 0 when it does not beat.
    """

    name: str
    pid: int
    host: str
    created: float
    log: str
    stack: str
    actor_id: str
    node_id: str
    silence_s: float

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} on {self.host})"

    @property
    def is_here(self) -> bool:
        """Whether it lives, on this node."""
        try:
            return self.host == _host() and psutil.Process(self.pid).create_time() == self.created
        except psutil.NoSuchProcess:
            return False


def introduce(name: str, silence_s: float = SILENCE_S) -> None:
    """In an actor's constructor: from now on others know this process by ``name``, and feel its pulse."""
    if not ray.is_initialized():
        return  # the body of an actor, used without Ray
    _stack_file[:] = [_nameless_file()]
    faulthandler.register(STACK_SIGNAL, _stack_file[0], all_threads=True)
    log = os.path.realpath("/proc/self/fd/2")
    context = ray.get_runtime_context()
    card = Card(
        name,
        os.getpid(),
        _host(),
        psutil.Process().create_time(),
        log if Path(log).is_file() else "",
        f"/proc/{os.getpid()}/fd/{_stack_file[0].fileno()}",
        str(context.get_actor_id()),
        str(context.get_node_id()),
        silence_s,
    )
    _internal_kv_put(card.actor_id, json.dumps(dataclasses.asdict(card)), namespace=_NAMESPACE)
    if silence_s:
        beat = (card.actor_id, silence_s / _BEATS)
        threading.Thread(target=_beat, args=beat, name="slime-pulse", daemon=True).start()


def _nameless_file() -> IO[str]:
    """Found through /proc: nothing stays behind when the process is killed. To append to, as readers empty it."""
    descriptor, name = tempfile.mkstemp(prefix="slime-stack-")
    os.close(descriptor)
    file = open(name, "a", encoding="utf-8")  # noqa: SIM115 - stays open with the process
    os.unlink(name)
    return file


def card_of(actor_id: str | None) -> Card | None:
    """None for actors that have not introduced themselves."""
    found = _internal_kv_get(actor_id, namespace=_NAMESPACE) if actor_id else None
    return None if found is None else Card(**json.loads(found))


def cards_of(refs: Iterable[Any]) -> Iterator[Card]:
    """The actors that work on ``refs``, each once."""
    for actor_id in dict.fromkeys(ref.task_id().actor_id().hex() for ref in refs):
        card = card_of(actor_id)
        if card is not None:
            yield card


def last_beat(card: Card) -> bytes | None:
    """What the process counted last; says nothing but whether it has counted since one last asked."""
    return _internal_kv_get(_pulse_of(card.actor_id), namespace=_NAMESPACE)


def myself() -> str:
    """Who waits."""
    context = ray.get_runtime_context() if ray.is_initialized() else None
    card = card_of(context.get_actor_id()) if context is not None else None
    return str(card) if card is not None else f"the driver (pid {os.getpid()})"


def _beat(actor_id: str, every_s: float) -> None:
    for count in itertools.count():
        with contextlib.suppress(Exception):  # the store does not answer, in whatever way: nobody can feel a pulse then
            _internal_kv_put(_pulse_of(actor_id), str(count), namespace=_NAMESPACE)
        time.sleep(every_s)


def _pulse_of(actor_id: str) -> str:
    return f"{actor_id}.pulse"


def _host() -> str:
    return str(ray.util.get_node_ip_address())
