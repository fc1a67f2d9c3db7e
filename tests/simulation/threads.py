"""Stand-ins of ``threading``, ``queue``, ``time`` and ``random`` in a simulated world, and its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import random
import threading
import time
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from tests.simulation.world import Ended, Thread, World, world

EPOCH = 1_800_000_000.0


class Lock:
    """``threading.Lock``, and with ``is_reentrant`` an ``RLock``."""

    is_reentrant = False

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._depth = 0
        self._waiting: deque[Thread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        here = world()
        here.check()
        here.perhaps_yield()
        me = here.current
        if self.is_reentrant and self._owner is me:
            self._depth += 1
            return True
        until = None if timeout < 0 else here.after(timeout)
        while self._owner is not None:
            if not blocking or (until is not None and here.now >= until):
                return False
            self._waiting.append(me)
            try:
                here.park(None if until is None else until - here.now)
            finally:
                if me in self._waiting:
                    self._waiting.remove(me)
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._owner = None
        here = world()
        if self._waiting and not here.is_closing:
            here.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    is_reentrant = True


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[Thread] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> Condition:
        self._lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        here = world()
        self._waiting.append(here.current)
        self._lock.release()
        try:
            return here.park(timeout)
        finally:
            if here.current in self._waiting:
                self._waiting.remove(here.current)
            if not here.is_closing:
                self._lock.acquire()
            else:
                self._lock._depth += 1

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        here = world()
        until = None if timeout is None else here.after(timeout)
        while not (result := predicate()):
            if until is not None and here.now >= until:
                return predicate()
            self.wait(None if until is None else until - here.now)
        return result

    def notify(self, n: int = 1) -> None:
        for thread in self._waiting[:n]:
            world().wake(thread)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            world().wake(thread)
        self._waiting.clear()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        here = world()
        if not self._is_set:
            self._waiting.append(here.current)
            here.park(timeout)
            if here.current in self._waiting:
                self._waiting.remove(here.current)
        return self._is_set


class SimThread:
    """``threading.Thread``."""

    _numbers = itertools.count()

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self._call = (target, tuple(args), kwargs or {})
        self._thread: Thread | None = None
        self.ident: int | None = None
        self.daemon = daemon

    def run(self) -> None:
        target, args, kwargs = self._call
        if target is not None:
            target(*args, **kwargs)

    def start(self) -> None:
        self.ident = next(self._numbers)
        self._thread = world().spawn(self.name, self.run)
        self._thread.owner = self  # type: ignore[attr-defined]

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_over

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None and not self._thread.is_over:
            self._thread.joiners.append(world().current)
            world().park(timeout)


class Queue:
    """``queue.Queue`` without a limit."""

    def __init__(self, maxsize: int = 0) -> None:
        assert maxsize <= 0, "the simulator has queues without a limit only"
        self._items: deque[Any] = deque()
        self._change = Condition()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._change:
            self._items.append(item)
            self._change.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._change:
            if not self._change.wait_for(lambda: self._items, timeout if block else 0.0):
                raise queue.Empty
            return self._items.popleft()

    put_nowait = put

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Namespace:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _current_thread() -> Any:
    return getattr(world().current, "owner", world().current)


THREADING = Namespace(
    threading,
    Thread=SimThread,
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    current_thread=_current_thread,
)
QUEUE = Namespace(queue, Queue=Queue, SimpleQueue=Queue)


def _sleep(seconds: float) -> None:
    here = World.current_world
    if here is None or not here.is_mine():
        time.sleep(seconds)  # a thread that an earlier test has left
    else:
        here.sleep(seconds)


def _now(real: Callable[[], float], offset: float = 0.0) -> Callable[[], float]:
    return lambda: real() if World.current_world is None else offset + World.current_world.now


TIME = Namespace(
    time,
    monotonic=_now(time.monotonic),
    perf_counter=_now(time.perf_counter),
    time=_now(time.time, EPOCH),
    sleep=_sleep,
)


def _drawn(name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: getattr(random if World.current_world is None else world().random, name)(
        *args, **kwargs
    )


RANDOM = Namespace(
    random,
    SystemRandom=lambda: random.SystemRandom() if World.current_world is None else world().random,
    **{name: _drawn(name) for name in ("random", "uniform", "choice", "randint", "randrange")},
)


# ---- the event loop


_MOST_TASKS = 64


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """A task whose place in a set does not depend on its address."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(world()._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class Loop(base_events.BaseEventLoop):
    """An event loop whose ``select`` waits in the simulated world. Without sockets."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._sleeper: Thread | None = None
        self._is_pinged = False
        self.tasks: list[Any] = []
        self.set_task_factory(_make_task)
        world().on_close.append(self._drop)

    def _drop(self) -> None:
        """Close the coroutines of a loop that runs no more, the outermost first."""
        for task in self.tasks:
            if not task.done():
                task._log_destroy_pending = False
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
        self.tasks.clear()
        self._ready.clear()
        self._scheduled.clear()
        self.close()

    def call_soon(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.is_closed() else super().call_soon(*args, **kwargs)

    def select(self, timeout: float | None) -> list[Any]:
        here = world()
        if not self._is_pinged and (timeout is None or timeout > 0):
            self._sleeper = here.current
            here.park(timeout)
            self._sleeper = None
        else:
            here.check()
        self._is_pinged = False
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None:
        self._is_pinged = True
        if self._sleeper is not None:
            world().wake(self._sleeper)

    def time(self) -> float:
        return world().now

    def run_forever(self) -> None:
        try:
            super().run_forever()
        except Ended:
            return  # the process has ended: the thread must not run the loop again


def _make_task(loop: Any, coroutine: Coroutine[Any, Any, Any], **kwargs: Any) -> Any:
    task = _Task(coroutine, loop=loop, **kwargs)
    if len(loop.tasks) >= _MOST_TASKS:  # those that are done would keep their samples alive
        loop.tasks[:] = [other for other in loop.tasks if not other.done()]
    loop.tasks.append(task)
    return task


class _Futures:
    """``concurrent.futures`` for ``slime.utils.async_utils``."""

    @staticmethod
    def wait(futures: Iterable[Any], timeout: float | None = None) -> tuple[set[Any], set[Any]]:
        here, (future,) = world(), list(futures)
        me = here.current
        if not future.done():
            future.add_done_callback(lambda _: here.wake(me))
            until = None if timeout is None else here.after(timeout)
            while not future.done() and (until is None or here.now < until):
                here.park(None if until is None else until - here.now)
        return ({future}, set()) if future.done() else (set(), {future})


CONCURRENT = Namespace(None, futures=_Futures)


class LoopPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> Any:
        return Loop()
