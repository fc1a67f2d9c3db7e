"""One background event loop per process, and threads for what would block it.

Rollout functions are synchronous to their caller; inside, thousands of requests share the loop that lives here. A loop
that stops turning (a coroutine that blocks) is noticed by the waiting caller, which says where it is stuck.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
import sys
import threading
import time
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from slime.utils.errors import DeadlineExceeded
from slime.utils.user_exit import exit_is_error

__all__ = ["AsyncLoopThread", "Places", "call_in_thread", "call_user", "get_async_loop", "is_async", "run"]

Result = TypeVar("Result")

_HEARTBEAT_S = 1.0
_DEFAULT_STALL_S = 600.0


class AsyncLoopThread:
    """An event loop on a daemon thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="slime-async", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            with contextlib.suppress(BaseException):  # SystemExit of a task stops the loop; the task keeps it
                self.loop.run_forever()
                return

    def run(self, coroutine: Coroutine[Any, Any, Result], stall_s: float = _DEFAULT_STALL_S) -> Result:
        """Run ``coroutine`` on the loop and return its result.

        The coroutine may take as long as its own deadlines allow. When the loop itself does not turn for ``stall_s``
        seconds, somebody blocks it, and :class:`DeadlineExceeded` shows the stack that does.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("run() was called on the loop that would have to run it; use await instead")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        last_turn = time.monotonic()

        def turned() -> None:
            nonlocal last_turn
            last_turn = time.monotonic()

        try:
            while True:
                self.loop.call_soon_threadsafe(turned)
                done, _ = concurrent.futures.wait([future], timeout=_HEARTBEAT_S)
                if done:
                    with exit_is_error():
                        return future.result()
                if time.monotonic() - last_turn > stall_s:
                    raise DeadlineExceeded(
                        f"the event loop has been blocked for {stall_s:.0f} s. A coroutine must await, or be a plain "
                        f"function (those run in threads). It is here:\n{self._stack()}"
                    )
        except BaseException:
            future.cancel()  # also on Ctrl-C: nothing goes on in the background
            raise

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-4:]) if frame is not None else "(no stack)"


_lock = threading.Lock()
_thread: AsyncLoopThread | None = None


def get_async_loop() -> AsyncLoopThread:
    """The process-wide loop thread, started on first use."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = AsyncLoopThread()
        return _thread


def run(coro: Coroutine[Any, Any, Result], stall_s: float = _DEFAULT_STALL_S) -> Result:
    """Run a coroutine on the process-wide loop from ordinary code; see :meth:`AsyncLoopThread.run`."""
    return get_async_loop().run(coro, stall_s)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - objects with an async __call__
    )


async def call_user(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Await a function of users', async or plain; plain ones run in a thread, so they may be slow.

    Raises:
        UserExit: it called ``sys.exit``.
    """
    if is_async(function):
        with exit_is_error():
            return await function(*args, **kwargs)
    result = await call_in_thread(function, *args, **kwargs)
    with exit_is_error():
        return await result if inspect.isawaitable(result) else result


async def call_in_thread(function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
    """Await a blocking ``function`` that runs in a daemon thread of its own.

    Unlike ``asyncio.to_thread`` a call that never returns keeps neither a pool slot nor the process alive; put a
    deadline on it with ``asyncio.wait_for``.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def target() -> None:
        try:
            with exit_is_error():
                outcome: tuple[Any, BaseException | None] = (context.run(function, *args, **kwargs), None)
        except StopIteration as error:  # a future refuses it
            outcome = (None, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=target, name=f"slime-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await future


# Places for running samples: how many requests the engines get at a time. Held during generation only.


@dataclass(frozen=True)
class _OfLoop:
    semaphore: asyncio.Semaphore
    taking: asyncio.Lock


class Places:
    """``number`` places in every event loop: a semaphore belongs to the loop it waits on."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OfLoop] = weakref.WeakKeyDictionary()

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """One place per running sample."""
        return self._here().semaphore

    @asynccontextmanager
    async def of_a_group(self, count: int) -> AsyncIterator[None]:
        """Hold a place per sample. One group at a time takes places, or two could wait for each other's."""
        here, taken = self._here(), 0
        try:
            async with here.taking:
                while taken < min(count, self.number):
                    await here.semaphore.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                here.semaphore.release()

    def _here(self) -> _OfLoop:
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            self._by_loop[loop] = _OfLoop(asyncio.Semaphore(self.number), asyncio.Lock())
        return self._by_loop[loop]
