"""Places for running samples: how many requests the engines get at a time. Held during generation only."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

__all__ = ["Places"]


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
