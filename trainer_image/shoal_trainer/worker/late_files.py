"""Sends the files of callbacks later, when the storage takes none: their task is done meanwhile, and training goes on.

What is sent are copies, because the callbacks of the next epochs change and delete the files. All of them take at most
half of what is free on the disk without them; then the callbacks wait for the storage, and training for them. They are
lost with this worker, so the coordinator knows which files there are.
"""

from __future__ import annotations

import errno
import itertools
import logging
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_trainer.background import Background
from shoal_trainer.coordinator.protocol import LATE
from shoal_trainer.errors import Overtaken, ProtocolError, Unauthorized, Unreachable, has_no_room
from shoal_trainer.retry import Backoff
from shoal_trainer.worker.work import About

if TYPE_CHECKING:
    from shoal_trainer.worker.coordination import ControlPlane

log = logging.getLogger(__name__)

BUSY = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""The worker itself has too much open. Whatever else keeps a file from being read, such as that others deleted it, may
last for ever."""


class LateFiles(Background):
    """The copies of one worker. Thread-safe."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__("late-files", self._send)
        self._plane = plane
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self.copies: dict[str, Path] = {}
        """Of the files that wait, in the order in which they are sent."""
        self.written: dict[str, int] = {}
        """Of the files that wait, and of those that were to and that the storage has not taken: the epoch."""
        self._count = itertools.count()
        self._trouble = Unreachable("files of callbacks wait for the storage")
        self._backoff = Backoff()

    @property
    def trouble(self) -> Unreachable | None:
        """Why files wait; None if there are none."""
        return self._trouble if self.copies else None

    @property
    def numbers(self) -> dict[str, int]:
        """Of the copies, which they are uploaded under."""
        return {name: int(copy.name) for name, copy in dict(self.copies).items()}

    def add(self, files: Mapping[str, Path], epoch: int, trouble: Unreachable) -> Collection[str]:
        """Take copies of these files of this epoch, which replace those of an earlier one, and send them later.

        Those that cannot be read are left out; returns the others. Raises `trouble` if there is no room for them, or
        the coordinator is of a version that does not wait for them.
        """
        with self._lock:
            try:
                copies = self._copied(files, epoch, trouble)
            except BaseException as error:
                self.wake()  # to tell the coordinator that these files do not come
                busy = has_no_room(error) or (isinstance(error, OSError) and error.errno in BUSY)
                if busy or (isinstance(error, ProtocolError) and not isinstance(error, Unauthorized)):
                    raise trouble from error
                raise
            if copies and not self.copies:
                log.warning("training goes on, and files of callbacks wait for the storage: %s", trouble)
            self._trouble = trouble
            _remove(self.copies[name] for name in files if name in self.copies)
            kept = {n: copy for n, copy in self.copies.items() if n in copies or n not in files}
            self.copies = {n: copies[n] for n in copies if n not in kept} | kept | copies
            earlier = {n: e for n, e in self.written.items() if n not in files}
            self.written = earlier | dict.fromkeys(files, epoch)
        self.wake()
        return copies.keys()

    def _copied(self, files: Mapping[str, Path], epoch: int, trouble: Unreachable) -> dict[str, Path]:
        """Copies of the files that can be read, once the coordinator knows of them: all or none."""
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="shoal-late-"))
        self._folder.mkdir(mode=0o700, exist_ok=True)  # others may have deleted it
        held = sum(copy.stat().st_size for copy in self._folder.iterdir())
        if 2 * (held + sum(map(_size, files.values()))) > held + shutil.disk_usage(self._folder).free:
            raise trouble
        new = {name: next(self._count) for name in files}
        self._plane.announce(self.numbers | new, self.written | dict.fromkeys(files, epoch))
        copies = dict[str, Path]()
        try:
            for name, path in files.items():
                copies[name] = self._folder / str(new[name])
                try:
                    shutil.copyfile(path, copies[name])
                except OSError as error:
                    if error.errno in BUSY or has_no_room(error):
                        raise
                    _remove([copies.pop(name)])
                    self._plane.leave_out(name, why_unread(error))
        except BaseException:
            _remove(copies.values())
            raise
        return copies

    def close(self) -> None:
        """End, and delete the copies."""
        self.stop()
        with self._lock:
            if self.copies:
                log.warning(
                    "files of callbacks are lost with this worker: %s", ", ".join(sorted(self.copies))
                )
            self.copies = {}
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _next(self) -> list[tuple[str, Path]]:
        """Tell which files come; returns those to send before it is told again: of many a sixteenth, for its cost."""
        with self._lock:  # so that the coordinator hears of no older state later
            self._plane.announce(self.numbers, self.written)
            return list(self.copies.items())[: 1 + len(self.copies) // 16]

    def _send(self) -> float | None:
        """One attempt to send all, until one fails. Then there is a pause, and what failed comes last."""
        try:
            while waiting := self._next():
                for name, copy in waiting:
                    self._send_one(name, copy)
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

    def _send_one(self, name: str, copy: Path) -> None:
        lost: OSError | Overtaken | None = None
        stored = False
        try:
            stored = self._plane.uploaded((LATE, int(copy.name)), name, copy)
        except Unreachable:
            with self._lock:
                order = sorted(self.copies, key=name.__eq__)
                self.copies = {each: self.copies[each] for each in order}
            raise
        except (OSError, Overtaken) as error:
            lost = error
        with self._lock:
            if self.copies.get(name) != copy:  # it was replaced just now
                return
            if isinstance(lost, OSError):
                self._plane.leave_out(name, f"its copy on the disk of the worker is lost: {lost.strerror}")
                self._plane.forget(name)
            if isinstance(lost, Overtaken):
                log.warning("a copy of %s is not sent: others have written it since", name)
            if stored:
                self.written.pop(name, None)
            _remove([self.copies.pop(name)])

    def _drop(self, error: Overtaken) -> None:
        """Others run the callbacks now, and have written files of these names, or will.

        So this worker's are uploaded only once its callbacks write them anew: as they are they would pass for newer.
        """
        with self._lock:
            if self.copies:
                log.warning("files of callbacks are lost: %s: %s", ", ".join(sorted(self.copies)), error)
            _remove(self.copies.values())
            self.copies = {}


def why_unread(error: OSError) -> str:
    """Why a file is left out."""
    return f"the worker cannot read it: {error.strerror or error}"


def _size(path: Path) -> int:
    """Of a file that cannot be read, which is told as it is copied, 0."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _remove(copies: Iterable[Path]) -> None:
    for copy in copies:
        copy.unlink(missing_ok=True)
