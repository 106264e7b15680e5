"""Work that a process repeats beside its requests: a daemon thread that calls one function, and goes on for ever.

An error never ends it: the call is repeated after `RETRY_SECONDS`, whoever wakes it meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shoal_trainer.errors import TrainerError

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


class Wish:
    """Something that is to be done, or done again: a wish during an attempt is not fulfilled by this attempt."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._made = self._fulfilled = 0

    @property
    def number(self) -> int:
        """That of the newest wish: an attempt that begins now fulfils those up to it."""
        return self._made

    @property
    def open(self) -> bool:
        """Whether there is an attempt to make."""
        return self._fulfilled < self._made

    def make(self) -> None:
        """Wish it once more."""
        with self._changed:
            self._made += 1

    def fulfil(self, number: int) -> None:
        """An attempt that began when the newest wish was `number` has succeeded."""
        with self._changed:
            self._fulfilled = max(number, self._fulfilled)
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until all are fulfilled; False if they are not after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.open, timeout)


class Background:
    """Calls `call` when it is woken, and when the pause is over: at first `pause`, then what each call returns.

    Seconds; None: only when it is woken.
    """

    def __init__(self, name: str, call: Callable[[], float | None], *, pause: float | None = None) -> None:
        self._call, self._pause = call, pause
        self._woken = threading.Event()
        self.stopped = threading.Event()
        """On which a call may wait, whoever wakes it meanwhile."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Call soon; once more, if a call is in progress."""
        self._woken.set()

    def stop(self) -> None:
        """Begin no further call."""
        self.stopped.set()
        self._woken.set()

    def _run(self) -> None:
        while True:
            self._woken.wait(self._pause)
            self._woken.clear()
            if self.stopped.is_set():
                return
            try:
                self._pause = self._call()
                continue
            except TrainerError as error:
                log.debug("%s: %s; trying again", self._thread.name, error)
            except Exception:
                log.exception("%s: trying again", self._thread.name)
            self._pause = 0.0
            self.stopped.wait(RETRY_SECONDS)
