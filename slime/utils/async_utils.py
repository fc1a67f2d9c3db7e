"""One background event loop per process, threads for blocking calls, slots that limit concurrency, and deadlines.

Rollout functions are synchronous to their caller. Inside, thousands of requests share the loop of this module. If a
coroutine blocks that loop, the waiting caller raises an error with the blocked stack.

Ctrl-C and SIGTERM raise an exception and also set a flag. Every wait checks the flag at least once a second
(``Deadline.check``), and so does every step of the loop. The driver installs the handlers for the duration of a run. In
other processes the flag is never set.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from slime.utils.errors import DeadlineExceeded, undone


@dataclass
class Deadline:
    """A moment after which waiting is an error.

    Attributes:
        seconds: longest duration of the wait.
        what: the awaited event. Completes the sentence "gave up after N s waiting for ...".
        fix: advice for the reader of the error.
    """

    seconds: float
    what: str
    fix: str = ""
    # monotonic: a corrected wall clock must not end or prolong a wait
    started: float = field(default_factory=lambda: time.monotonic())  # looked up at each call: tests replace the clock

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.seconds - self.elapsed)

    def error(self, detail: str = "") -> DeadlineExceeded:
        parts = [f"gave up after {self.elapsed:.1f} s waiting for {self.what}", detail, self.fix]
        return DeadlineExceeded(". ".join(part.rstrip(".") for part in parts if part))

    def check(self, detail: str = "") -> None:
        """Raise if the time is over or the run was interrupted. Call this between two polls of a wait."""
        raise_if_interrupted()  # before the time: an interrupt must not be reported as a timeout
        if self.elapsed > self.seconds:
            raise self.error(detail)


def wait_until(ready: Callable[[], bool], deadline: Deadline, poll_s: float = 0.05) -> None:
    """Call ``ready`` until it returns true. Raises :class:`DeadlineExceeded` when the deadline passes first."""
    while not ready():
        deadline.check()
        time.sleep(min(poll_s, deadline.remaining))


# Signals within this time after the first one count as the same one: make, uv and timeout forward the signal that the
# terminal has already sent to the whole process group.
_FORWARDED_S = 1.0

# The exception alone can get lost: Python raises it at the current line of the main thread. In a __del__ or a callback
# of native code (Ray has both) it is printed and dropped, and the run would continue.
_noted: list[int] = []


class Interrupted(KeyboardInterrupt):
    """The first Ctrl-C or SIGTERM of a run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number  # exit status of the shell convention


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block the first Ctrl-C or SIGTERM raises :class:`Interrupted`; the second ends the process at once.

    Main thread only: Python installs signal handlers in no other thread.
    """
    first: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if first and now > first[0] + _FORWARDED_S:
            # not print: the handler may have interrupted a write to the same buffered stream
            os.write(2, b"interrupted again: ended without waiting for anything.\n")
            os._exit(128 + number)
        if not first:
            first.append(now)
            _noted.append(number)
            raise Interrupted(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        acknowledge()
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_if_interrupted() -> None:
    """Raise :class:`Interrupted` from the first signal until :func:`acknowledge`."""
    if _noted:
        raise Interrupted(_noted[0])


def acknowledge() -> None:
    """Clear the flag, so that the waits of an orderly shutdown are not interrupted."""
    _noted.clear()


Result = TypeVar("Result")

_HEARTBEAT_S = 1.0
_DEFAULT_STALL_S = 600.0


class AsyncLoopThread:
    """An event loop on a separate daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="slime-async", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            # A SystemExit in a task leaves run_forever: the task keeps the exception, and the loop must go on.
            with contextlib.suppress(BaseException):
                self.loop.run_forever()
                return

    def run(self, coroutine: Coroutine[Any, Any, Result], stall_s: float = _DEFAULT_STALL_S) -> Result:
        """Run ``coroutine`` on the loop and return its result.

        The coroutine may take as long as its own deadlines allow.

        Raises:
            DeadlineExceeded: the loop made no step for ``stall_s`` seconds. The message shows the blocked stack.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()  # avoids the warning "coroutine was never awaited"
            raise RuntimeError("run() was called on the loop that would have to run it; use await instead")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        last_step = time.monotonic()

        def note_step() -> None:
            nonlocal last_step
            last_step = time.monotonic()

        with undone(future.cancel):  # also on Ctrl-C: nothing may continue in the background
            while True:
                self.loop.call_soon_threadsafe(note_step)
                # not future.result(timeout): its TimeoutError could also come from the coroutine
                done, _ = concurrent.futures.wait([future], timeout=_HEARTBEAT_S)
                if done:
                    with exit_is_error():
                        return future.result()
                if time.monotonic() - last_step > stall_s:
                    raise DeadlineExceeded(
                        f"the event loop has been blocked for {stall_s:.0f} s. A coroutine must await, or be a plain "
                        f"function (those run in threads). It is here:\n{self._stack()}"
                    )

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-4:]) if frame is not None else "(no stack)"


_lock = threading.Lock()
_thread: AsyncLoopThread | None = None


def get_async_loop() -> AsyncLoopThread:
    """The loop thread of this process, started on first use."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = AsyncLoopThread()
        return _thread


def run(coro: Coroutine[Any, Any, Result], stall_s: float = _DEFAULT_STALL_S) -> Result:
    """Run a coroutine on the loop of this process from synchronous code. See :meth:`AsyncLoopThread.run`."""
    return get_async_loop().run(coro, stall_s)


class Slots:
    """Limit of ``number`` concurrent holders per event loop."""

    def __init__(self, number: int) -> None:
        self.number = number
        # per loop: an asyncio semaphore belongs to the loop that first waits on it
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[asyncio.Semaphore, asyncio.Lock]]
        self._by_loop = weakref.WeakKeyDictionary()

    def grow(self, number: int) -> None:
        """Raise the limit to ``number``. It is never lowered."""
        more, self.number = max(0, number - self.number), max(number, self.number)
        for loop, (semaphore, _) in list(self._by_loop.items()):
            for _ in range(more):
                loop.call_soon_threadsafe(semaphore.release)

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """The semaphore of the running loop."""
        return self._here()[0]

    @contextlib.asynccontextmanager
    async def several(self, count: int) -> AsyncIterator[None]:
        """Hold ``count`` slots, or all of them if there are fewer."""
        semaphore, taking = self._here()
        taken = 0
        try:
            async with taking:  # one holder acquires at a time: two could deadlock on each other's slots
                while taken < min(count, self.number):  # more than exist would never be available
                    await semaphore.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                semaphore.release()

    def _here(self) -> tuple[asyncio.Semaphore, asyncio.Lock]:
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            self._by_loop[loop] = (asyncio.Semaphore(self.number), asyncio.Lock())
        return self._by_loop[loop]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of ``function`` returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call_user(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Await a user's function, async or plain. Plain functions run in a thread, so they may be slow.

    Raises:
        UserExit: it called ``sys.exit``.
    """
    if is_async(function):
        with exit_is_error():
            return await function(*args, **kwargs)
    result = await call_in_thread(function, *args, **kwargs)
    with exit_is_error():
        # a plain function such as a lambda may return a coroutine
        return await result if inspect.isawaitable(result) else result


async def call_in_thread(function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
    """Await a blocking ``function`` that runs in a new daemon thread.

    In contrast to ``asyncio.to_thread``, a call that never returns blocks neither a pool slot nor the exit of the
    process. Use ``asyncio.wait_for`` for a deadline.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    context = contextvars.copy_context()  # new threads start with an empty context, without the trace span

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return  # the caller was canceled
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def target() -> None:
        try:
            with exit_is_error():
                outcome: tuple[Any, BaseException | None] = (context.run(function, *args, **kwargs), None)
        except StopIteration as error:  # Future.set_exception refuses StopIteration
            outcome = (None, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            outcome = (None, error)
        if not loop.is_closed():  # a call may end after the process has closed its loop
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=target, name=f"slime-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await future


# ---- ``sys.exit`` in a user's function becomes an ordinary error of that function: ``SystemExit`` ends a thread or an
# actor without a message, and stops an event loop that thousands of requests share. All calls of user code convert it
# to :class:`UserExit`, which is handled like any other exception of that code.

Class = TypeVar("Class", bound=type)

_LIBRARIES = (f"{Path(__file__).parents[1]}/", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Traceback frames outside of slime and libraries, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]


class UserExit(RuntimeError):
    """A user's function raised ``SystemExit`` or another exception that ``except Exception`` does not catch."""


@contextlib.contextmanager
def exit_is_error() -> Iterator[None]:
    """Convert such exceptions to :class:`UserExit`, except cancellation and Ctrl-C in the main thread.

    Raises:
        UserExit: with the function, file and line that exited.
    """
    try:
        yield
    except BaseException as error:
        # CancelledError and GeneratorExit derive from BaseException, but they are control flow and must pass.
        if isinstance(error, Exception | asyncio.CancelledError | GeneratorExit):
            raise
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if is_interrupt and threading.current_thread() is threading.main_thread():
            raise
        # the innermost frame of user code, or of any code if a library exits
        frame = (user_frames(error) or traceback.extract_tb(error.__traceback__))[-1]
        what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {error!r}"
        raise UserExit(
            f"{frame.name} ({frame.filename}:{frame.lineno}) {what}, which would end the whole process: raise an "
            "error such as ValueError instead"
        ) from error


def exits_are_errors(cls: Class) -> Class:
    """Wrap every method of a class in :func:`exit_is_error`. For Ray actors that call user code."""
    for name, method in list(vars(cls).items()):
        # static and class methods are not functions in vars(): they stay unchanged
        if inspect.isfunction(method) and not name.startswith("__"):
            setattr(cls, name, exit_is_error()(method))
    return cls
