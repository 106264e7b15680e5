"""Writes the output of tasks to the storage: the callbacks' files, and the model with its manifest.

Workers on spot nodes have no storage credentials: they stream files here, and the export gets those of the callbacks
from here. The model exists when `model/manifest.json`
does. It names every file with its SHA-256 and holds the job's termination message, so a parameter server that restarts
afterwards ends the job with the same message.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

from pydantic import AliasChoices, Field

from shoal_trainer.contract import Message, TerminationMessage
from shoal_trainer.errors import Fenced, Overtaken, ProtocolError, Unreachable
from shoal_trainer.ps.contents import Worker
from shoal_trainer.snapshot.shard_file import Digest
from shoal_trainer.snapshot.storage import Storage

log = logging.getLogger(__name__)

FOLDER = "model"
MANIFEST = f"{FOLDER}/manifest.json"
CHUNK = 1 << 20
BEING_PUBLISHED = "the model is being published"
AGAIN_SECONDS = 300.0
"""How long a file that is sent again waits for the one that is being written: half as long as who sends it."""


class ModelFile(Message):
    """One file of the exported model."""

    name: str
    size: int
    sha256: str


class MadeBy(Message):
    """What a model was made by, as its job says it."""

    entrypoint: str
    args: dict[str, Any]
    batch_size: int


class ModelManifest(Message):
    """The files of `model/`. `outcome` is the job's termination message."""

    run: str = Field(validation_alias=AliasChoices("run", "jobUid"))
    """`JobIdentity.run_id`; an earlier version called it `jobUid`."""
    files: tuple[ModelFile, ...] = Field(default=())
    outcome: TerminationMessage
    made_by: MadeBy | None = None


class Artefacts:
    """Files of tasks in the folder of one run. Thread-safe.

    Tasks are assigned one at a time, under increasing tokens: only the files of the newest one are kept in memory,
    and what is below `model/`, whichever export wrote it.
    """

    def __init__(self, storage: Storage, run: str, made_by: MadeBy | None = None) -> None:
        self._storage = storage
        self._run, self._made_by = run, made_by
        self._lock = threading.Condition()
        self._publishing = threading.Lock()
        self._writing: set[tuple[tuple[int, ...], str]] = set()
        self._newest: dict[tuple[Worker, str], int] = {}
        """Of each worker and file that is sent later: the number of the newest copy that it began to send."""
        self._token = (-1, -1)
        self._files: dict[str, ModelFile] = {}
        self._model: dict[str, ModelFile] = {}
        """Below `model/`, as far as this process has written or read them."""

    def receive(
        self,
        token: tuple[int, int],
        kind: str,
        name: str,
        chunks: Iterator[bytes],
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """Write one file of a task: below `model/` for the export, otherwise below `logs/`.

        `confirm` raises if the task was reassigned meanwhile: the file then replaces none. A file that is sent again,
        because the answer was lost or late, is written once: it waits for the first, and is compared with it. One of
        kind "late" (`protocol.LATE`) is written again.
        """
        if kind == "export":
            target = f"{FOLDER}/{name}"
            if target == MANIFEST:
                raise ProtocolError("a file of the model is named manifest.json. Choose another name.")
        elif name.startswith("logs/"):
            target = name
        else:
            raise ProtocolError(f"the file {name!r} of this task is not below logs/")
        digest, late = Digest(chunks), kind == "late"
        with self._turn(() if late else token, name):  # all copies in one turn, whatever their numbers
            known = next((file for file in self._files_of(token) if file.name == name), None)
            if known is None:
                with self._lock:
                    self._model.pop(name, None)  # it may be replaced, and the answer lost
                self._storage.write(target, digest, confirm)
            else:
                deque(digest, maxlen=0)
                confirm()
            sent = ModelFile(name=name, size=digest.size, sha256=digest.hex)
            with self._lock:
                if token > self._token and not late:
                    self._token, self._files = token, {}
                if known is not None and known != sent:
                    self._files.pop(name, None)
                    raise Unreachable(f"{name} is not what was sent before: it must be sent again")
                if token == self._token:
                    self._files[name] = sent
                if known is None and kind == "export":
                    self._model[name] = sent

    def check_newest(self, worker: Worker, number: int, name: str) -> None:
        """`Overtaken` if this worker has begun to send a newer copy of this file."""
        with self._lock:
            if number < self._newest.get((worker, name), number):
                raise Overtaken(f"a newer copy of {name} follows")
            self._newest[worker, name] = number

    @contextlib.contextmanager
    def _turn(self, token: tuple[int, ...], name: str) -> Iterator[None]:
        """One writes this file at a time."""
        with self._lock:
            if not self._lock.wait_for(lambda: (token, name) not in self._writing, AGAIN_SECONDS):
                raise Unreachable(f"{name} is still being written to the storage")
            self._writing.add((token, name))
        try:
            yield
        finally:
            with self._lock:
                self._writing.remove((token, name))
                self._lock.notify_all()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[tuple[int, IO[bytes]]]:
        """The size and the content of a file below `logs/`; of size 0 if it does not exist."""
        if not name.startswith("logs/"):
            raise ProtocolError(f"the file {name!r} is not below logs/")
        try:
            size = self._storage.size(name)
        except FileNotFoundError:
            yield 0, io.BytesIO()
            return
        with self._storage.open(name) as content:
            yield size, content

    def check(self, token: tuple[int, int], names: tuple[str, ...]) -> None:
        """`ProtocolError` unless all files that a task reports were uploaded."""
        uploaded = {file.name for file in self._files_of(token)}
        missing = [name for name in names if name not in uploaded]
        if missing:
            raise ProtocolError(f"{missing[0]} was not uploaded")

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """The model is published, by the holder of the export: no file of a later export replaces one of it.

        The storage may take its time, and the export may be another's by then. `Unreachable` if it is under way.
        """
        if not self._publishing.acquire(blocking=False):
            raise Unreachable(BEING_PUBLISHED)
        try:
            yield
        finally:
            self._publishing.release()

    def publish_model(self, token: tuple[int, int], outcome: TerminationMessage) -> TerminationMessage:
        """Publish the model; returns the message with its digest, or that of an export that was published before.

        Call `Claim.check` first: an unreadable manifest is replaced, and one that names other files than these: its put
        was given up, and has arrived late. `Fenced` if the model is another run's, `Overtaken` if files of a newer
        export have arrived.
        """
        with self._lock:
            if token < self._token:
                raise Overtaken("the export was reassigned to another worker")
        files = tuple(sorted(self._files_of(token), key=lambda file: file.name))
        digest = hashlib.sha256(
            "\n".join(f"{f.sha256} {f.size} {f.name}" for f in files).encode()
        ).hexdigest()
        outcome = outcome.model_copy(
            update={"model_uri": f"{self._storage.uri}/model", "model_digest": digest}
        )
        manifest = ModelManifest(run=self._run, files=files, outcome=outcome, made_by=self._made_by)
        content = manifest.to_json().encode()
        if self._storage.create(MANIFEST, content):
            return outcome
        existing = self._read()
        if existing is not None and existing.run != self._run:
            raise Fenced("another parameter server published the model")
        if existing is not None and existing.files == files:
            return existing.outcome
        log.warning("replacing the %s %s", "unreadable" if existing is None else "outdated", MANIFEST)
        self._storage.write(MANIFEST, [content])
        return outcome

    def published(self) -> TerminationMessage | None:
        """The termination message of a job whose model is published; None if it is not, or its manifest unreadable.

        Nor is one whose files an export has begun to replace. `Unreachable` while a model is published.
        """
        if self._publishing.locked():
            raise Unreachable(BEING_PUBLISHED)
        existing = self._read()
        if existing is None or existing.run != self._run:
            return None
        return existing.outcome if all(map(self._stands, existing.files)) else None

    def _stands(self, file: ModelFile) -> bool:
        """Whether this file of the model is the one in the storage. A process that did not write it reads it, once."""
        with self._lock:
            stored = self._model.get(file.name)
        if stored is None:
            try:
                with self._storage.open(f"{FOLDER}/{file.name}") as content:
                    digest = Digest(iter(partial(content.read, CHUNK), b""))
                    deque(digest, maxlen=0)
            except FileNotFoundError:
                return False
            read = ModelFile(name=file.name, size=digest.size, sha256=digest.hex)
            with self._lock:
                stored = self._model.setdefault(file.name, read)
        return stored == file

    def _read(self) -> ModelManifest | None:
        try:
            return ModelManifest.model_validate_json(self._storage.read(MANIFEST))
        except FileNotFoundError:
            return None
        except ValueError as error:  # its writer was killed on a volume without hard links
            log.warning("%s cannot be read: %s", MANIFEST, str(error).splitlines()[0])
            return None

    def _files_of(self, token: tuple[int, int]) -> list[ModelFile]:
        with self._lock:
            return list(self._files.values()) if token == self._token else []
