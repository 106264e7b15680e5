"""What every process of the chart does: end at a signal, and keep buffers of TLS and garbage collections small.

It also opens as many files as it may.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn

from shoal.errors import ShoalError

logger = logging.getLogger("shoal")

TLS_BUFFER = 4 * 1024
"""A report of ten workers. asyncio's own choice, 256 KiB, is held by every connection, of which each job has one; those
to the API server take more once they need it (`cluster.http`)."""
OPEN_FILES = 65_536
"""Of which each running job takes one, for its coordinator; a common default is 1,024."""


def signalled() -> asyncio.Event:
    """Set at SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def end_with(work: Coroutine[Any, Any, int]) -> NoReturn:
    """Run it, and end the process with the exit code that it returns, at once.

    Neither `asyncio.run` nor the interpreter ends before the threads do, and a plan may take longer than the kubelet
    waits. Nothing waits for that plan any more.
    """
    with asyncio.Runner() as runner:
        code = runner.run(work)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


async def until(
    stop: asyncio.Event, what: str, main: Coroutine[Any, Any, None], *beside: Coroutine[Any, Any, None]
) -> int:
    """Run until `stop` or the end of `main`; returns the exit code: 1 if `main` ended with an error.

    What fails beside it is logged, and ends nothing.
    """
    running = asyncio.create_task(main, name=what)
    stopped = asyncio.create_task(stop.wait())
    others = [asyncio.create_task(each) for each in beside]
    for other in others:
        other.add_done_callback(_log_failure)
    await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    for task in (running, stopped, *others):
        task.cancel()
    results = await asyncio.gather(running, stopped, *others, return_exceptions=True)
    error = results[0]
    if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
        cause = innermost(error)
        expected = isinstance(cause, ShoalError)  # such as a lost Lease: a new process takes over
        logger.error("the %s stopped: %s", what, cause, exc_info=None if expected else error)
        return 1
    return 0


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        name = getattr(task.get_coro(), "__qualname__", "a task")
        logger.error("%s ended: %s", name, innermost(error), exc_info=error)


def innermost(error: BaseException) -> BaseException:
    """The first error of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def allow_open_files() -> None:
    """Raise this process's limit of open files to `OPEN_FILES`, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        # The kernel's own limit (fs.nr_open) may be below the hard one.
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (ValueError, OSError) as error:
            logger.warning("the limit of open files stays %d: %s", soft, error)


def keep_tls_small() -> None:
    """Give TLS connections that are opened from now on a read buffer of `TLS_BUFFER`."""
    asyncio.sslproto.SSLProtocol.max_size = TLS_BUFFER


def exempt_what_is_loaded() -> None:
    """Have garbage collections walk no longer what exists now: modules, which stay.

    They are 78,000 objects, most of what an operator of a thousand pods has, and each full collection, of which a ramp
    brings several, holds the event loop while it walks them.
    """
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Have the C library give the system back what is free; glibc by itself does that with the end of its heap only."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
