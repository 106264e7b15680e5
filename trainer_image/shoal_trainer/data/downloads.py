"""Finds files and makes them local: on a disk or a volume, or in an object store, which TensorFlow cannot read.

A file of an object store is downloaded with fsspec to a temporary folder. Each store has its own error classes, so
every error but "no such file" counts as an outage and is retried.
"""

from __future__ import annotations

import errno
import stat
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal_trainer.data.read_errors import NOT_THERE
from shoal_trainer.errors import DiskFull, TrainerError, Unreachable, UserError, has_no_room

MOUNTED = {"file", "local"}
"""Protocols of files that are mounted on this machine."""


def matching(pattern: str) -> tuple[str, ...]:
    """The files that match, sorted, each with its protocol. Raises `UserError` if there is none."""
    filesystem, path = _opened(pattern, f"Files({pattern!r})")
    folders: list[str] = []
    try:
        found = _found(filesystem, path, remote=is_remote(pattern))
        names = sorted(name for name, details in found.items() if _is_file(filesystem, name, details))
        if not names:
            folders = sorted(name for name in found if filesystem.isdir(name))
    except FileNotFoundError:
        names = []
    except Exception as error:
        # fsspec raises ValueError for a malformed pattern; stores raise their own classes.
        if type(error) is ValueError:
            raise _refused(pattern, error) from error
        raise Unreachable(f"Files({pattern!r}): {error!r}") from error
    if folders:
        raise UserError(
            f"{filesystem.unstrip_protocol(folders[0])} is a folder. Use a pattern, for example "
            f"{pattern.rstrip('/')}/*.parquet."
        )
    if not names:
        raise UserError(f"No file matches {pattern!r}. Use a pattern of files that every worker can read.")
    return tuple(filesystem.unstrip_protocol(name) for name in names)


def is_remote(name: str) -> bool:
    """Whether a file must be downloaded before it can be read."""
    import fsspec

    return fsspec.utils.get_protocol(name) not in MOUNTED


class Download:
    """A context manager for the local path of a file; a file of an object store is downloaded, and deleted on exit.

    `head`: only so many bytes from its beginning are downloaded. None: all.
    """

    def __init__(self, name: str, head: int | None = None) -> None:
        self.name, self._head = name, head
        self._store: tuple[Any, str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._path: str | None = None

    def open(self) -> Download:
        """Open the file system, in the calling thread: fsspec keeps its connections per thread."""
        if self._store is None:
            self._store = _opened(self.name, self.name)
        return self

    def fetch(self) -> Download:
        """Download the file if needed. Raises `UserError` (it does not exist), `DiskFull` or `Unreachable` (retry)."""
        if self._path is None:
            filesystem, path = self._store or _opened(self.name, self.name)
            self._path = self._fetched(filesystem, path) if is_remote(self.name) else self._seen(path)
        return self

    def close(self) -> None:
        """Delete the downloaded file."""
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> str:
        self.fetch()
        assert self._path is not None
        return self._path

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _seen(self, path: str) -> str:
        try:
            mode = Path(path).stat().st_mode
        except OSError as error:
            if error.errno in NOT_THERE:
                raise self._gone() from error
            raise Unreachable(f"{self.name}: {error}") from error
        if stat.S_ISDIR(mode):
            raise UserError(f"{self.name} is a folder. The training data must not change during a run.")
        return path

    def _fetched(self, filesystem: Any, path: str) -> str:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="shoal-data-")
        except OSError as error:
            raise self._no_room(filesystem, path, error) from error
        target = Path(self._folder.name) / Path(path).name
        try:
            if self._head is None:
                filesystem.get_file(path, str(target))
            else:
                target.write_bytes(filesystem.cat_file(path, start=0, end=self._head))
        except FileNotFoundError as error:
            self.close()
            raise self._gone() from error
        except Exception as error:
            self.close()
            if has_no_room(error):
                raise self._no_room(filesystem, path, error) from error
            raise Unreachable(f"{self.name}: {error}") from error
        return str(target)

    def _gone(self) -> UserError:
        return UserError(
            f"{self.name} does not exist (any more). The training data must not change during a run."
        )

    def _no_room(self, filesystem: Any, path: str, error: Exception) -> DiskFull:
        try:
            size = f" ({filesystem.size(path) / 1e6:,.1f} MB)"
        except Exception:
            size = ""
        return DiskFull(
            f"{self.name}{size} does not fit on the worker's disk: {error}. Raise ephemeral-storage in the resources "
            "of container worker (spec.workers.template), or split the data into smaller files."
        )


class Prefetch:
    """A download of a file in the background, while another file is read."""

    def __init__(self, name: str) -> None:
        self._future: Future[Download] = Future()
        try:
            download = Download(name).open()
        except TrainerError as error:
            self._future.set_exception(error)
        else:
            threading.Thread(target=self._run, args=(download,), name="fetch", daemon=True).start()

    def get(self, timeout: float) -> Download:
        """Wait for the file. Raises the errors of `Download.fetch`, or the built-in TimeoutError."""
        return self._future.result(timeout)

    def discard(self) -> None:
        """Delete the file once it is downloaded."""
        self._future.add_done_callback(_delete)

    def _run(self, download: Download) -> None:
        try:
            self._future.set_result(download.fetch())
        except TrainerError as error:
            self._future.set_exception(error)
        except BaseException as error:
            self._future.set_exception(Unreachable(f"{download.name}: {error!r}"))


def _delete(future: Future[Download]) -> None:
    if future.exception() is None:
        future.result().close()


def _opened(name: str, label: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(name)
    except (ValueError, ImportError) as error:  # unknown protocol, or its package is not installed
        raise _refused(name, error) from error
    except Exception as error:  # it may look for credentials over the network
        raise Unreachable(f"{label}: {error!r}") from error
    return filesystem, path


def _refused(name: str, error: Exception) -> UserError:
    return UserError(f"Files({name!r}): {error}. Use a path, file://, s3:// or gs://.")


def _found(filesystem: Any, path: str, *, remote: bool) -> dict[str, dict[str, Any]]:
    """The matching paths with their details. By default, `glob` skips folders that it cannot list."""
    if not any(character in path for character in "*?["):
        return {path: filesystem.info(path)}
    options = {} if remote else {"on_error": _raise_outage}
    found: dict[str, dict[str, Any]] = filesystem.glob(path, detail=True, **options)
    return found


def _raise_outage(error: OSError) -> None:
    """Skip a folder that does not exist or may not be read; any other error may hide files."""
    if error.errno not in NOT_THERE | {errno.EACCES, errno.EPERM}:
        raise error


def _is_file(filesystem: Any, name: str, details: dict[str, Any]) -> bool:
    """Whether the path is a file or a link to one."""
    kind = details["type"]
    return kind == "file" or (kind != "directory" and bool(filesystem.isfile(name)))
