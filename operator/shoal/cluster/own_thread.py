"""An event loop in a thread of its own: what runs there goes on while the main loop is busy, or stands still."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

T = TypeVar("T")


class Runs(Protocol):
    """Runs a coroutine somewhere, and returns its result here."""

    def __call__(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Run it."""
        ...


def here(work: Coroutine[Any, Any, T]) -> Awaitable[T]:
    """Run it in this event loop."""
    return work


class OwnThread:
    """The thread, as a context manager; called with a coroutine, it runs that one."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __call__(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Run it in the thread. Cancelled here, it is cancelled there."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
