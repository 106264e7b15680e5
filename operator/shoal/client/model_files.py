"""The exported model: its files from the object store, or from a volume of the cluster.

Its manifest says which files it has, and their digests: what else lies beside them, of an export that was not the last
or of a killed server, is not taken, and what does not arrive as it was exported is an error. When all have arrived,
they replace those of an earlier model, and never somebody else's manifest.
"""

from __future__ import annotations

import contextlib
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
        exported = json.loads(written)
        theirs = exported["outcome"]["modelDigest"]
        files = [(PurePosixPath(each["name"]), each["sha256"]) for each in exported["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"{uri}/{MANIFEST} is not of a model: {error!r}") from error
    if theirs != digest:
        raise Unavailable(f"{uri}/{MANIFEST} is of another model than this job's")
    for name, _ in files:
        if name.is_absolute() or ".." in name.parts:
            raise Unavailable(f"the model has a file {name}, which lies outside of it")
    _must_be_of_a_model(target / MANIFEST)
    with _below(target) as new:
        for name, sha256 in files:
            with _writing(target / name):
                if _write(read(str(name)), new / name) != sha256:
                    raise Unavailable(
                        f"{name} did not arrive as the job exported it: try again; if that does not help, it was "
                        f"changed in {uri}"
                    )
        with _writing(target / MANIFEST):
            _write([written], new / MANIFEST)
        for here in (*(target / name for name, _ in files), target / MANIFEST):
            with _writing(here):
                here.parent.mkdir(parents=True, exist_ok=True)
                (new / here.relative_to(target)).replace(here)


def _must_be_of_a_model(manifest: Path) -> None:
    """Raise UsageError if somebody else's file has the manifest's name."""
    try:
        json.loads(manifest.read_bytes())["outcome"]["modelDigest"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{manifest} is not of a model: choose another folder") from error


@contextlib.contextmanager
def _below(target: Path) -> Iterator[Path]:
    """A folder for files on the way, from which they are renamed; it is deleted."""
    with _writing(target):
        target.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".shoal-", dir=target, ignore_cleanup_errors=True)
    with folder as name:
        yield Path(name)


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
