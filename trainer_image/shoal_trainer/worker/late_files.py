"""Sends the files of callbacks later, when the storage takes none: their task is done meanwhile, and training goes on.

What is sent are copies, because the callbacks of the next epochs change and delete the files. All of them take at most
half of what is free on the disk without them; then the callbacks wait for the storage, and training for them. They are
lost with this worker, so the coordinator knows which files there are.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from shoal_trainer.background import Background
from shoal_trainer.coordinator.protocol import LATE
from shoal_trainer.errors import Overtaken, ProtocolError, Unauthorized, Unreachable, has_no_room
from shoal_trainer.retry import Backoff
from shoal_trainer.worker.work import About, StatusText, Token

log = logging.getLogger(__name__)


class Plane(Protocol):
    """Of `ControlPlane`, what is needed here."""

    def announce(self, names: Iterable[str]) -> None:
        """Say which files come later. `Overtaken` if another worker has run callbacks since."""

    def uploaded(self, token: Token, name: str, path: Path) -> bool:
        """Upload a file, unless the storage can never have it."""

    def leave_out(self, name: str, why: str) -> None:
        """Tell that the storage lacks this file, until it is uploaded."""

    def forget(self, names: Iterable[str]) -> None:
        """These files will not be sent."""

    def set_message(self, message: StatusText, about: About) -> None:
        """Set a message for the heartbeats."""


class LateFiles(Background):
    """The copies of one worker. Thread-safe."""

    def __init__(self, plane: Plane) -> None:
        super().__init__("late-files", self._send)
        self._plane = plane
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._copies: dict[str, Path] = {}
        self._announced = False
        """Whether the coordinator may wait for files of this worker."""
        self._numbers = itertools.count()
        self._trouble = Unreachable("files of callbacks wait for the storage")
        self._backoff = Backoff()

    @property
    def trouble(self) -> Unreachable | None:
        """Why files wait; None if there are none."""
        return self._trouble if self._copies else None

    def add(self, files: Mapping[str, Path], trouble: Unreachable) -> None:
        """Take copies of these files, which replace those of an earlier epoch, and send them later.

        Raises `trouble` if there is no room for them, or the coordinator is of a version that does not wait for them.
        """
        with self._lock:
            copies = dict[str, Path]()
            try:
                self._announce({*self._copies, *files})
                for name, path in files.items():
                    copies[name] = self._copy(path)
            except BaseException as error:
                _remove(copies.values())
                self.wake()  # to tell the coordinator that these files do not come
                if has_no_room(error) or (
                    isinstance(error, ProtocolError) and not isinstance(error, Unauthorized)
                ):
                    raise trouble from error
                raise
            if not self._copies:
                log.warning("training goes on, and files of callbacks wait for the storage: %s", trouble)
            self._trouble = trouble
            _remove(self._copies[name] for name in copies if name in self._copies)
            self._copies |= copies
        self.wake()

    def close(self) -> None:
        """End, and delete the copies."""
        self.stop()
        with self._lock:
            if self._copies:
                log.warning(
                    "files of callbacks are lost with this worker: %s", ", ".join(sorted(self._copies))
                )
            self._copies.clear()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _copy(self, path: Path) -> Path:
        """Raises an error for which `has_no_room` is true if all copies would take more than half of what is free."""
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="shoal-late-"))
        held = sum(copy.stat().st_size for copy in self._folder.iterdir())
        if 2 * (held + path.stat().st_size) > held + shutil.disk_usage(self._folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
        copy = self._folder / str(next(self._numbers))
        try:
            shutil.copyfile(path, copy)
        except BaseException:
            _remove([copy])
            raise
        return copy

    def _announce(self, names: Iterable[str]) -> None:
        """Call it under the lock, so that the coordinator hears of no older state later."""
        names = list(names)
        if names or self._announced:
            self._announced = True
            self._plane.announce(names)
            self._announced = bool(names)

    def _send(self) -> float | None:
        """One attempt to send all, with pauses after one that fails."""
        try:
            while True:
                with self._lock:
                    self._announce(self._copies)
                    if not self._copies:
                        break
                    name, copy = next(iter(self._copies.items()))
                try:
                    self._plane.uploaded((LATE, int(copy.name)), name, copy)
                except FileNotFoundError:
                    self._gone(name, copy)
                else:
                    self._done(name, copy)
        except Overtaken as error:
            self._drop(error)
        except Unreachable as error:
            self._trouble = error
            if self._backoff.is_new(error):
                log.warning("files of callbacks wait for the storage: %s", error)
            self._plane.set_message(f"files of callbacks wait for the storage: {error}", About.FILES)
            self._backoff.wait(self.stopped)
            return 0.0
        self._backoff.reset()
        self._plane.set_message("", About.FILES)
        return None

    def _done(self, name: str, copy: Path) -> None:
        with self._lock:
            if self._copies.get(name) == copy:
                _remove([self._copies.pop(name)])

    def _gone(self, name: str, copy: Path) -> None:
        """There is no such copy: it was replaced just now, or deleted by others."""
        with self._lock:
            if self._copies.get(name) == copy:
                del self._copies[name]
                self._plane.leave_out(name, "its copy was deleted from the disk of the worker")
                self._plane.forget([name])

    def _drop(self, error: Overtaken) -> None:
        """Others run the callbacks now, and have written files of these names, or will."""
        with self._lock:
            if self._copies:
                log.warning("files of callbacks are lost: %s: %s", ", ".join(sorted(self._copies)), error)
            self._plane.forget(self._copies)
            _remove(self._copies.values())
            self._copies.clear()
            self._announced = False


def _remove(copies: Iterable[Path]) -> None:
    for copy in copies:
        copy.unlink(missing_ok=True)
