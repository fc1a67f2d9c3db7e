"""A world with one seed: virtual time, processes, and threads of which exactly one runs at any moment.

A simulated thread is an OS thread that waits at its gate. When the running thread parks, it chooses the next one by
the seed and opens its gate. If no thread is ready, time moves to the next timer. No real clock is read, so the same
seed gives the same order of events.

A killed process keeps its threads parked until :meth:`World.close`, as SIGKILL runs no ``finally``. Then they are
unwound, and everything that they try to do outside their memory raises :class:`Ended`.
"""

from __future__ import annotations

import _thread
import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar


# GeneratorExit: code that converts or suppresses ordinary exceptions lets it pass.
class Ended(GeneratorExit):
    """The simulated process of this thread no longer runs."""


class WaitWithoutEnd(AssertionError):
    """All threads wait, or the virtual time of a run is over."""


@dataclass(eq=False)
class Process:
    """A simulated process.

    Attributes:
        on_death: called once when it dies.
        held: its threads that would run if it were not paused.
    """

    name: str
    number: int
    is_dead: bool = False
    is_paused: bool = False
    paused_at: float = 0.0
    on_death: list[Callable[[], None]] = field(default_factory=list)
    held: list[Thread] = field(default_factory=list)


class Thread:
    """A simulated thread. ``worker`` is the OS thread that runs it."""

    def __init__(self, name: str, process: Process, body: Callable[[], None]) -> None:
        self.name, self.process, self.body = name, process, body
        self.worker: _Worker | None = None
        self.is_parked = self.is_woken = self.is_over = False
        self.turn = 0
        self.joiners: list[Thread] = []


class _Worker:
    """An OS thread, used again for later simulated threads."""

    idle: ClassVar[list[_Worker]] = []
    idents: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.job: tuple[World, Thread] | None = None
        self.idents.add(_thread.start_new_thread(self._serve, ()))

    def _serve(self) -> None:
        while True:
            self.gate.acquire()
            assert self.job is not None
            world, thread = self.job
            world.enter(thread)
            self.job = None
            del thread
            self.idle.append(self)  # before the next thread runs: this one touches nothing shared afterwards
            world.leave()
            del world


class World:
    """One simulated run.

    Args:
        horizon_s: virtual seconds after which the run counts as hanging.
        keeps_trace: keep the text of all events, not only their hash.
    """

    current_world: World | None = None

    def __init__(self, seed: int, *, horizon_s: float = 6 * 3600.0, keeps_trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.trace: list[str] | None = [] if keeps_trace else None
        self.is_closing = False
        self.failure: BaseException | None = None
        self.on_event: list[tuple[int, Callable[[], None]]] = []  # sorted by the number of the event
        self.on_close: list[Callable[[], None]] = []
        self.globals: dict[str, Any] = {}
        self._horizon_s = horizon_s
        self._hash = hashlib.blake2b(digest_size=8)
        self._ready: list[Thread] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._threads: dict[Thread, None] = {}
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self.processes: list[Process] = []
        self.main = Thread("operator", self.process("operator"), lambda: None)
        self.current = self.main
        self._ident = _thread.get_ident()

    # ---------------------------------------------------------------- events

    def note(self, text: str) -> None:
        """Add an event to the trace. Faults that are due at this event happen now."""
        self.events += 1
        line = f"{self.events} {self.now:.6f} {text}"
        self._hash.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)
        while self.on_event and self.on_event[0][0] <= self.events:
            _, fault = self.on_event.pop(0)
            fault()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def chance(self, share: float) -> bool:
        return share > 0 and self.random.random() < share

    # ---------------------------------------------------------------- processes

    def process(self, name: str) -> Process:
        process = Process(name, len(self.processes))
        self.processes.append(process)
        return process

    def kill(self, process: Process) -> None:
        """End a process, as by SIGKILL. The calling thread continues unless it belongs to it."""
        if process.is_dead:
            return
        process.is_dead = True
        self.note(f"dead {process.name}")
        for call in process.on_death:
            call()
        process.held.clear()

    def pause(self, process: Process, seconds: float) -> None:
        """Stop a process, as by SIGSTOP, and continue it later."""
        if process.is_dead or process.is_paused:
            return
        process.is_paused, process.paused_at = True, self.now
        self.note(f"pause {process.name} {seconds:.3f}")
        self.at(seconds, lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        process.is_paused = False
        self._ready += process.held
        process.held = []

    # ---------------------------------------------------------------- threads and time

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call ``call`` later. It must not wait."""
        heapq.heappush(self._timers, (self.now + delay_s, next(self._numbers), call))

    def after(self, seconds: float) -> float:
        """The time in ``seconds``. Later than now unless they are 0: tiny ones would be lost in the sum of floats."""
        return self.now + (max(seconds, 1e-6) if seconds > 0 else 0.0)

    def spawn(self, name: str, body: Callable[[], None], process: Process | None = None) -> Thread:
        thread = Thread(name, process or self.current.process, body)
        self._threads[thread] = None
        self._ready.append(thread)
        return thread

    def park(self, timeout_s: float | None = None) -> bool:
        """Let other threads run until :meth:`wake`. False if ``timeout_s`` passed before."""
        me = self.current
        self.check(me)
        me.turn += 1
        me.is_parked, me.is_woken = True, False
        if timeout_s is not None and timeout_s < 1e9:
            turn = me.turn
            self.at(max(0.0, timeout_s), lambda: self._expire(me, turn))
        self._switch(me)
        self.check(me)
        return me.is_woken

    def check(self, thread: Thread | None = None) -> None:
        """Raise in a thread that must do nothing any more."""
        process = (thread or self.current).process
        if process.is_dead or (self.is_closing and process is not self.main.process):
            raise Ended(process.name)

    def wake(self, thread: Thread) -> None:
        if thread.is_parked:
            thread.is_parked, thread.is_woken = False, True
            self._ready.append(thread)

    def perhaps_yield(self, share: float = 0.1) -> None:
        """Let another ready thread run, by chance."""
        if not self.is_closing and self._ready and self.chance(share):
            self.sleep(0.0)

    def sleep(self, seconds: float) -> None:
        self.park(seconds)

    def is_mine(self) -> bool:
        """Whether the OS thread of the caller belongs to this world."""
        return _thread.get_ident() in (self._ident, *_Worker.idents)

    def _expire(self, thread: Thread, turn: int) -> None:
        if thread.is_parked and thread.turn == turn:
            thread.is_parked = False
            self._ready.append(thread)

    def _next(self) -> Thread:
        if self.is_closing:
            return self.main
        while True:
            while self._ready:
                number = self.random.randrange(len(self._ready)) if len(self._ready) > 1 else 0
                thread = self._ready.pop(number)
                if thread.process.is_paused and not thread.process.is_dead:
                    thread.process.held.append(thread)
                elif not thread.process.is_dead:
                    return thread
            if not self._timers or self._timers[0][0] > self._horizon_s:
                return self._give_up(WaitWithoutEnd(self._who_waits()))
            self.now, _, call = heapq.heappop(self._timers)
            try:
                call()
            except Exception as error:  # a mistake of the simulator, shown by run()
                return self._give_up(error)

    def _give_up(self, error: BaseException) -> Thread:
        self.failure = self.failure or error
        self.main.is_parked = False
        return self.main

    def _who_waits(self) -> str:
        waiting = [f"{t.process.name}/{t.name}" for t in self._threads if t.is_parked and not t.process.is_dead]
        return f"at {self.now:.1f} s of virtual time these threads wait: {', '.join(waiting)}"

    def _open(self, thread: Thread) -> None:
        self.current = thread
        if thread is self.main:
            self._gate.release()
            return
        if thread.worker is None:
            thread.worker = _Worker.idle.pop() if _Worker.idle else _Worker()
            thread.worker.job = (self, thread)
        thread.worker.gate.release()

    def _switch(self, me: Thread) -> None:
        chosen = self._next()
        if chosen is me:
            self.current = me
            return
        self._open(chosen)
        if me is self.main:
            self._gate.acquire()
        else:
            assert me.worker is not None
            me.worker.gate.acquire()

    def enter(self, thread: Thread) -> None:
        """The life of a thread, in its OS thread."""
        try:
            if not self.is_closing:
                thread.body()
        except Ended:
            pass
        except BaseException as error:
            if not (self.is_closing or thread.process.is_dead):
                self.failure = self.failure or error
        thread.is_over, thread.worker = True, None
        self._threads.pop(thread, None)
        for joiner in thread.joiners:
            self.wake(joiner)

    def leave(self) -> None:
        """The end of a thread: the next one runs."""
        self._open(self._next())

    # ---------------------------------------------------------------- the run

    def run(self, body: Callable[[], None]) -> None:
        """Run ``body`` as the operator, then everything else to its end."""
        World.current_world = self
        try:
            body()
        finally:
            self.close()
            World.current_world = None

    def close(self) -> None:
        """Unwind the threads that still wait."""
        self.is_closing = True
        for thread in list(self._threads):
            if thread.worker is None:
                continue  # it has not begun
            self._open(thread)
            self._gate.acquire()
        self.current = self.main
        for call in self.on_close:
            call()
        for process in self.processes:  # no cycles remain, so the collector has little to do
            process.on_death.clear()
        self.globals.clear()
        self._timers.clear()


def world() -> World:
    """The world that is simulated now."""
    assert World.current_world is not None, "nothing is simulated"
    return World.current_world
