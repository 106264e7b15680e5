"""The folder of the callbacks' files, in which callbacks of the user write as on a laptop: `open("log.txt", "a")`.

In a pod, the current folder cannot be written, and in a rehearsal it has files of the user, which must not change. So
this one is current while a hook runs. A process has one current folder, and other threads read data meanwhile: in a
pod, this folder links to all that a relative path, also one by `..`, would find from the folder that it stands for. In
a rehearsal it has no links, through which a callback would write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

MISSING = ("FileNotFoundError", "NotFoundError")
"""Names of errors of Python and TensorFlow."""


def can_be_written(folder: Path) -> bool:
    """Whether files can be made there."""
    return os.access(folder, os.W_OK)


class CallbackFolder:
    """A temporary folder. `contained`: nothing is written elsewhere under a relative path."""

    def __init__(self, *, contained: bool) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="shoal-callbacks-")
        self.path, current = Path(self._temporary.name), Path.cwd()
        self._becomes_current = contained or not can_be_written(current)
        if self._becomes_current and not contained:
            self.path = _standing_for(current, self.path)

    def current(self) -> contextlib.AbstractContextManager[None]:
        """In this block, relative paths are below this folder if the process cannot, or must not, write in its own."""
        return contextlib.chdir(self.path) if self._becomes_current else contextlib.nullcontext()

    def make_room(self, path: Path) -> None:
        """Let a callback of Keras write here, where the folder that this one stands for may have such files."""
        for parent in reversed(path.relative_to(self.path).parents[:-1]):
            if (self.path / parent).is_symlink():
                (self.path / parent).unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        for each in path.parent.glob(re.sub(r"\{[^}]*\}", "*", path.name)):
            if each.is_symlink():
                each.unlink()

    def remedy(self, error: BaseException | None) -> str:
        """What to change where a relative path of a callback is not the one that it would be in `fit`; else ""."""
        if not self._becomes_current:
            return ""
        if type(error).__name__ in MISSING:
            return (
                ". A callback's relative path is in logs/ of the run: what it reads needs an absolute one, such as "
                "Path(__file__).with_name(…)"
            )
        if isinstance(error, OSError) and error.errno == errno.EROFS:
            return (
                ". What the image has cannot be written: a new relative path is stored, in logs/ of the run"
            )
        return ""

    def files(self) -> Iterator[tuple[str, Path]]:
        """The files that were written, with their relative names."""
        for path in sorted(self.path.rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield str(path.relative_to(self.path)), path

    def clear(self) -> None:
        """Delete these files."""
        for path in self.path.iterdir():
            if path.is_symlink():
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def close(self) -> None:
        """Delete the folder."""
        self._temporary.cleanup()


def _standing_for(current: Path, root: Path) -> Path:
    """A folder below `root`, in which and above which is linked what is in and above `current`."""
    folder, copy = Path(current.anchor), root
    for name in (*current.parts[1:], ""):
        with contextlib.suppress(OSError):  # of a folder that may not be listed
            for each in folder.iterdir():
                if each.name != name:
                    (copy / each.name).symlink_to(each)
        folder, copy = folder / name, copy / name
        copy.mkdir(exist_ok=True)
    return copy
