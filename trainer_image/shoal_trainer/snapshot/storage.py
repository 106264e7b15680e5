"""The files of a run, on a volume or in an object store.

`create` is the atomic operation on which claims and manifests are built: it creates a small file only if the name does
not exist (a hard link on a file system, a conditional put in an object store). Failures of the storage raise
`Unreachable`, missing files `FileNotFoundError`. What concerns one name and no retry mends is a `BadName`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, cast
from urllib.parse import unquote, urlsplit

from shoal_trainer.errors import BadName, TrainerError, Unreachable, UserError
from shoal_trainer.snapshot.advice import with_advice

SYNC_BYTES = 64 << 20
"""As much of a file is synced at once: the writer is as fast as the disk, and the last sync is as short as each."""
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV}
"""Errors of `link` on file systems without hard links."""
NO_SUCH_NAME = {errno.ENAMETOOLONG, errno.ENOTDIR}
"""There is no file of this name, and there can be none: it is too long, or the folder is a file."""
NO_NAME = NO_SUCH_NAME | {errno.EISDIR, errno.EEXIST, errno.EINVAL, errno.EILSEQ}
"""Errors of `mkdir`, `stat` and `rename`: there is a folder or a file in its way, or characters that it cannot have."""


class Storage(Protocol):
    """A folder, local or remote. Names are relative paths with slashes."""

    uri: str

    def write(
        self, name: str, chunks: Iterable[bytes | memoryview], confirm: Callable[[], object] = lambda: None
    ) -> None:
        """Write a file, which is visible only when complete, and durable on return.

        `confirm` is called when all of it is written, just before it becomes visible, and may raise: a write of
        gigabytes takes long, in which the writer may have been replaced.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Create a file atomically; False if the name exists."""

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a file for sequential reading."""

    def read(self, name: str) -> bytes:
        """The content of a small file."""

    def size(self, name: str) -> int:
        """The size of a file in bytes."""

    def names(self, folder: str) -> list[str]:
        """The entries of a folder, sorted, without the folder's name; empty if it does not exist."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder and its content; does nothing if it does not exist."""

    def sweep(self, folder: str = "") -> None:
        """Remove the incomplete files that earlier processes of this writer left there when they were killed."""

    def close(self) -> None:
        """Begin no further file, and remove the incomplete ones: the process ends while its threads write them."""


def open_storage(uri: str, prefix: str = "", writer: str = "") -> Storage:
    """The folder `prefix` under `uri`: a path, `file://…`, or any URI that fsspec supports (`s3://`, `gs://`, …).

    `writer`: which of the job's processes writes there; only one at a time has this name. `UserError` if the scheme is
    not supported.
    """
    parts = urlsplit(uri)
    if parts.scheme in {"", "file"}:
        path = unquote(parts.path) if parts.scheme else uri
        return LocalStorage(Path(path) / prefix, writer)
    return RemoteStorage(
        "/".join(part.strip("/") if i else part.rstrip("/") for i, part in enumerate([uri, prefix]) if part)
    )


@contextlib.contextmanager
def _translated(
    failure: str, *, absent: tuple[type[Exception], ...] = (FileNotFoundError,)
) -> Iterator[None]:
    """Raise `Unreachable` for all errors except `absent`. A write has none: what is absent is its bucket or folder."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:  # each object store raises its own classes
        if isinstance(error, absent):
            raise
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        number = getattr(error, "errno", None)
        if number in NO_SUCH_NAME and absent:
            raise FileNotFoundError(number, reason) from error
        if number == errno.ENAMETOOLONG:
            raise BadName(f"{failure}: {reason}. Choose a shorter name.") from error
        raise Unreachable(f"{failure}: {with_advice(str(reason))}") from error


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """`BadName` where a file system refuses the name: never put a write of bytes in here."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_NAME:
            raise
        raise BadName(
            f"cannot write {path}: {error.strerror}. Choose another name, or remove what is in its way."
        ) from error


class LocalStorage:
    """A local folder or a mounted volume."""

    def __init__(self, root: Path, writer: str = "") -> None:
        self.root = root.absolute()
        self.uri = self.root.as_uri()
        self._writer, self._process = writer, secrets.token_hex(4)
        self._unfinished: set[Path] = set()
        self._closed = False

    def write(
        self, name: str, chunks: Iterable[bytes | memoryview], confirm: Callable[[], object] = lambda: None
    ) -> None:
        """Write a temporary file, sync it, and rename it."""
        path = self.root / name
        with _translated(f"cannot write {path}", absent=()):
            with self._write_temporary(path, chunks) as part:
                confirm()
                with _naming(path):
                    part.replace(path)
            self._sync_folder(path.parent)

    def create(self, name: str, data: bytes) -> bool:
        """Write a temporary file and create a hard link to it, which never replaces a file."""
        path = self.root / name
        with _translated(f"cannot write {path}", absent=()):
            with self._write_temporary(path, [data]) as part:
                try:
                    os.link(part, path)
                except FileExistsError:
                    return False
                except OSError as error:
                    if error.errno not in NO_LINKS:
                        raise
                    return self._create_in_place(path, data)
            self._sync_folder(path.parent)
            return True

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open the file."""
        with _translated(f"cannot read {self.root / name}"), (self.root / name).open("rb") as handle:
            yield handle

    def read(self, name: str) -> bytes:
        """The whole file."""
        with self.open(name) as handle:
            return handle.read()

    def size(self, name: str) -> int:
        """The size that the file system reports."""
        with _translated(f"cannot read {self.root / name}"):
            return (self.root / name).stat().st_size

    def names(self, folder: str) -> list[str]:
        """The folder's entries, sorted."""
        with _translated(f"cannot read {self.root / folder}", absent=()):
            try:
                return sorted(entry.name for entry in (self.root / folder).iterdir())
            except FileNotFoundError:
                return []

    def remove(self, name: str) -> None:
        """Remove a file or a directory tree."""
        path = self.root / name
        # Absent is also what another process removes as well.
        with contextlib.suppress(FileNotFoundError), _translated(f"cannot remove {path}"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def sweep(self, folder: str = "") -> None:
        """Remove the temporary files under this writer's name that another process made.

        Earlier versions began the name with that of the file: `.model.keras.ps-0-…`.
        """
        writer = re.escape(self._writer)
        left = re.compile(rf"\.(.*\.)?{writer}-(?!{self._process}\.).{{8}}\..{{8}}\.part", re.DOTALL)
        with _translated(f"cannot clean {self.root}", absent=()):
            for found, _, names in os.walk(
                self.root / folder
            ):  # `rglob` ends where a folder is removed meanwhile
                for name in filter(left.fullmatch, names):
                    Path(found, name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove this process's temporary files."""
        self._closed = True
        for part in list(self._unfinished):
            with contextlib.suppress(OSError):
                part.unlink()

    @staticmethod
    def _create_in_place(path: Path, data: bytes) -> bool:
        """Without hard links (SMB, some FUSE): readers may see an incomplete file, and a killed writer leaves it."""
        try:
            handle = path.open("xb", buffering=0)
        except FileExistsError:
            return False
        try:
            with handle:
                _write_durably(handle, [data])
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return True

    @contextlib.contextmanager
    def _write_temporary(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Iterator[Path]:
        """All of a file beside `path`, under a short name: the file's may be as long as the file system takes.

        At the end it is removed, unless it was moved.
        """
        part = path.with_name(f".{self._writer}-{self._process}.{secrets.token_hex(4)}.part")
        self.root.mkdir(parents=True, exist_ok=True)  # of the volume, as `open`, and not of this name
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # before all of it is written in vain
                if stat.S_ISDIR(path.stat().st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        handle = part.open("xb", buffering=0)
        try:
            with handle:
                self._unfinished.add(part)
                if self._closed:
                    raise Unreachable("this process ends")
                _write_durably(handle, chunks)
            yield part
        finally:
            part.unlink(missing_ok=True)
            self._unfinished.discard(part)

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # not supported by all network file systems
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_durably(handle: FileIO, chunks: Iterable[bytes | memoryview]) -> None:
    unsynced = 0
    for chunk in chunks:
        view = memoryview(chunk)
        unsynced += len(view)
        while view:
            view = view[handle.write(view) :]
        if unsynced >= SYNC_BYTES:
            os.fsync(handle.fileno())
            unsynced = 0
    os.fsync(handle.fileno())


class RemoteStorage:
    """A prefix of an object store, through fsspec. An object is visible only after its upload is complete."""

    def __init__(self, uri: str, **options: Any) -> None:
        import fsspec

        self.uri = uri
        try:
            self._fs, root = fsspec.core.url_to_fs(uri, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise UserError(f"storage {uri}: {error}. Use a folder, s3://… or gs://…") from None
        self._root = str(root).rstrip("/")

    def write(
        self, name: str, chunks: Iterable[bytes | memoryview], confirm: Callable[[], object] = lambda: None
    ) -> None:
        """Upload in parts, and confirm when the last one is there; a failed upload leaves no object.

        The bucket's library sends a part again that is refused for some seconds. After that nobody knows whether the
        upload has the chunk, so none goes on: an object that lacks one would be taken for whole.
        """
        with _translated(f"cannot write {self.uri}/{name}", absent=()):
            handle = self._fs.open(self._path(name), "wb", block_size=16 << 20)
            handle.autocommit = False  # `close` sends the rest, up to a block, and `commit` makes it visible
            try:
                for chunk in chunks:
                    handle.write(chunk)
                handle.close()
                confirm()
                handle.commit()
            except BaseException:
                with contextlib.suppress(Exception):
                    handle.discard()
                handle.closed = True
                raise

    def create(self, name: str, data: bytes) -> bool:
        """A conditional put."""
        with _translated(f"cannot write {self.uri}/{name}", absent=()):
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
            return True

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open the object, reading ahead in blocks."""
        path = self._path(name)
        with (
            _translated(f"cannot read {self.uri}/{name}"),
            self._fs.open(path, "rb", block_size=16 << 20) as handle,
        ):
            yield handle

    def read(self, name: str) -> bytes:
        """The whole object."""
        with _translated(f"cannot read {self.uri}/{name}"):
            return cast(bytes, self._fs.cat_file(self._path(name)))

    def size(self, name: str) -> int:
        """The size in the object's metadata."""
        with _translated(f"cannot read {self.uri}/{name}"):
            return int(self._fs.info(self._path(name))["size"])

    def names(self, folder: str) -> list[str]:
        """The names directly under a prefix, sorted."""
        with _translated(f"cannot list {self.uri}/{folder}"):
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._path(folder), detail=False, refresh=True)
            except FileNotFoundError:
                return []
            return sorted(PurePosixPath(entry).name for entry in entries)

    def remove(self, name: str) -> None:
        """Delete an object, or all objects under a prefix."""
        with contextlib.suppress(FileNotFoundError), _translated(f"cannot remove {self.uri}/{name}"):
            for path in self._fs.find(self._path(name)):
                self._fs.rm_file(path)  # not `rm`, which takes [, * and ? in a name for a pattern

    def sweep(self, folder: str = "") -> None:
        """Nothing: the rules of a bucket end uploads that are incomplete."""

    def close(self) -> None:
        """Nothing: see `sweep`."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root
