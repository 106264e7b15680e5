"""Progress output of the commands of `dev`, on stderr so that stdout can be piped."""

from __future__ import annotations

import contextlib
import fcntl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console

from dev.commands import pause

_WIDTH = None if sys.stderr.isatty() else 140
console = Console(stderr=True, highlight=False, soft_wrap=True, width=_WIDTH)
tables = Console(stderr=True, highlight=False, width=_WIDTH)
"""For what is drawn again and again: a line that is not wrapped would be cut off."""

_one_live = threading.Lock()
"""A terminal has one live line; concurrent steps print lines."""


def say(text: str) -> None:
    """Print one line of progress."""
    console.print(f"[bold]==>[/bold] {text}")


@contextmanager
def alone(lock: Path, doing: str) -> Iterator[None]:
    """Wait, and say so, while another command holds the lock file.

    Raises:
        DevError: Ctrl-C, or a failure of what runs beside this, came first.
    """
    with lock.open("w") as file:
        if not _taken(file):
            say(f"another command is {doing}; waiting for it")
            while not _taken(file):
                pause(0.2)  # and no wait in flock: in a thread, Ctrl-C would not end it
        yield


def _taken(file: TextIO) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


class Step:
    """A long step. `progress` may be set from within; it is shown while the step runs."""

    def __init__(self) -> None:
        self.progress = ""


@contextmanager
def step(what: str, *, every: float = 10.0, clock: Callable[[], float] = time.monotonic) -> Iterator[Step]:
    """Print the step, its progress and its duration.

    A terminal has one live line; otherwise (a log, CI) a line is printed every `every` seconds.
    """
    start = clock()
    state = Step()
    live = console.is_terminal and _one_live.acquire(blocking=False)
    if live:
        with (
            contextlib.ExitStack() as stack,
            console.status(f"{what} …") as status,
            _ticker(1.0, lambda: status.update(f"{what} … {state.progress} {clock() - start:.0f} s")),
        ):
            stack.callback(_one_live.release)
            yield state
    else:
        with _ticker(every, lambda: say(f"{what} … {state.progress} {clock() - start:.0f} s")):
            yield state
    say(f"{what}: {clock() - start:.1f} s")


@contextmanager
def _ticker(seconds: float, tick: Callable[[], None]) -> Iterator[None]:
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            tick()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
