"""The exported model: its files from the object store, or from a volume of the cluster.

Its manifest says which files it has, and their digests: what else lies beside them, of an export that was not the last
or of a killed server, is not taken, and what does not arrive as it was exported is an error. When all have arrived,
they replace those of an earlier model, and never somebody else's manifest. That of a model goes first and comes last:
a folder without one has no whole model.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from shoal.client import claim
from shoal.client.store import reached
from shoal.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from shoal.client.api import Api
    from shoal.client.job import Job

Read = Callable[[str], Iterable[bytes]]
"""The content of a file of the model, by its name there. Raises `ShoalError`."""
MANIFEST = "manifest.json"
BEGINNINGS = b'{"run":', b'{"jobUid":'
"""Of a manifest, by which one that is cut is known."""
ON_THE_WAY = ".shoal-model"
"""The folder beside the files for those that are to replace them; one name, so a killed download leaves one folder."""
CHUNK = 4 << 20


def download(uri: str, target: Path, job: Job, api: Api) -> Path:
    """Copy the files of a model into a folder, which is created; returns it.

    Raises:
        UsageError: the model went with its pod, a package for the store is missing, or the files do not fit here.
        Refused, Forbidden: the pod that reads a claim may not be created, or nothing may be run in it.
        Unavailable: the store does not answer or does not let this user in, the volume cannot be read, or what arrived
            is not what the job exported.
    """
    output = job.seen.status.output
    local = urlsplit(uri).scheme in {"", "file"}
    where = unquote(urlsplit(uri).path) if local else uri
    reader = claim.reading(where, job, api) if local and not Path(where).is_dir() else _stored(uri, where)
    with reader as read:
        copy(read, uri, target, output.digest if output else None)
    return target


def copy(read: Read, uri: str, target: Path, digest: str | None) -> None:
    """Copy what the manifest of the model in `uri` names. `digest`: of the model, as its job has it.

    Raises:
        UsageError: the files cannot be written here, or would replace what is not of a model.
        Unavailable: it is of another model, or a file did not arrive as the job exported it.
    """
    written = b"".join(read(MANIFEST))
    try:
        theirs, files = _parsed(written)
    except (ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"{uri}/{MANIFEST} is not of a model: {error!r}") from error
    if theirs != digest:
        raise Unavailable(f"{uri}/{MANIFEST} is of another model than this job's")
    earlier = _earlier(target / MANIFEST)
    with _on_the_way(target) as new:
        for name, sha256 in files.items():
            with _writing(target / name):
                if _write(read(str(name)), new / name) != sha256:
                    raise Unavailable(
                        f"{name} did not arrive as the job exported it: try again; if that does not help, it was "
                        f"changed in {uri}"
                    )
        with _writing(target / MANIFEST):
            _write([written], new / MANIFEST)
            (target / MANIFEST).unlink(missing_ok=True)
        for name in earlier - files.keys():
            with _writing(target / name):
                _remove(target, name)
        for name in (*files, PurePosixPath(MANIFEST)):
            with _writing(target / name):
                _move(new / name, target / name)


def _parsed(manifest: bytes) -> tuple[str, dict[PurePosixPath, str]]:
    """The digest of a model, and those of its files. Raises ValueError, KeyError or TypeError: it is not of a model."""
    read = json.loads(manifest)
    files = {PurePosixPath(each["name"]): each["sha256"] for each in read["files"]}
    for name in files:
        if name.is_absolute() or ".." in name.parts:
            raise ValueError(f"it has a file {name}, which lies outside of it")
    return read["outcome"]["modelDigest"], files


def _earlier(manifest: Path) -> set[PurePosixPath]:
    """The files of the model that is there; none are known where a crash left its manifest empty, or cut it.

    Raises:
        UsageError: somebody else's file has the manifest's name.
    """
    try:
        written = manifest.read_bytes()
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise UsageError(
            f"cannot read {manifest}: {error.strerror or error}: choose another folder"
        ) from error
    try:
        return set(_parsed(written)[1])
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ValueError) and (not written.strip(b"\0 \n") or written.startswith(BEGINNINGS)):
            return set()
        raise UsageError(f"{manifest} is not of a model: choose another folder") from error


@contextlib.contextmanager
def _on_the_way(target: Path) -> Iterator[Path]:
    """An empty folder for files on the way; it is deleted. What a killed download left in it goes first."""
    folder = target / ON_THE_WAY
    with _writing(target):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove(target: Path, name: PurePosixPath) -> None:
    """Delete a file, and the folders that are empty without it."""
    if (target / name).is_file():
        (target / name).unlink()
    with contextlib.suppress(OSError):  # not empty, or no folder
        for folder in name.parents[:-1]:
            (target / folder).rmdir()


def _move(file: Path, here: Path) -> None:
    """Put a file in the place of another one."""
    here.parent.mkdir(parents=True, exist_ok=True)
    try:
        file.replace(here)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(file, here)  # a part of the folder is a mount, or a link to another volume


@contextlib.contextmanager
def _writing(here: Path) -> Iterator[None]:
    """What keeps this file from being written is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {here}: {error.strerror or error}") from error


def _write(chunks: Iterable[bytes], here: Path) -> str:
    """Write a file; returns its digest."""
    digest = hashlib.sha256()
    here.parent.mkdir(parents=True, exist_ok=True)
    with here.open("wb") as out:
        for chunk in chunks:
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _stored(uri: str, where: str) -> Iterator[Read]:
    """Reads from an object store or a folder."""
    import fsspec

    with reached(uri, "read"):
        filesystem, path = fsspec.core.url_to_fs(where)

    def read(name: str) -> Iterator[bytes]:
        with (
            reached(f"{uri}/{name}", "read"),
            filesystem.open(f"{path.rstrip('/')}/{name}", "rb", block_size=CHUNK) as content,
        ):
            while chunk := content.read(CHUNK):
                yield chunk

    yield read


def load(uri: str, job: Job, api: Api) -> Any:
    """The model as Keras loads it. Its files are deleted when it is loaded.

    Raises:
        UsageError: Keras is not installed here, could not save a whole model, or does not know a class of it here.
    """
    try:
        import keras
    except ImportError as error:
        raise UsageError(
            "loading a model needs keras: install it, or give a folder to download the files to"
        ) from error
    folder = download(uri, Path(tempfile.mkdtemp(prefix=f"shoal-{job.name}-")), job, api)
    file = folder / "model.keras"
    there = ", ".join(sorted(path.name for path in folder.iterdir()))
    if not file.exists():
        raise UsageError(f"the job saved no model.keras, since Keras could not; {folder} has {there}")
    try:
        model = keras.models.load_model(file)
    except Exception as error:  # whatever a class of the user's raises
        why = str(error).partition(" Full object config")[0]
        raise UsageError(
            f"Keras cannot load model.keras here: {type(error).__name__}: {why}\n"
            "Where a class of yours is missing, import the module that has it, and ask again; or load what you need "
            f"yourself: {folder} has {there}"
        ) from error
    shutil.rmtree(folder)
    return model
