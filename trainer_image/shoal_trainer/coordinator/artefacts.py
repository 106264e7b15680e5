"""What tasks produce, on its way to the storage: the callbacks' files, and the model with its manifest.

Workers on spot nodes hold no storage credentials: they stream files here. The model exists when `model/manifest.json`
does; it names every file with its SHA-256 and holds the message that ends the job, so a parameter server that is
restarted after that moment ends the job with the same words.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from shoal_trainer.contract import Message, TerminationMessage
from shoal_trainer.errors import Fenced, ProtocolError
from shoal_trainer.snapshot.shard_file import Digest
from shoal_trainer.snapshot.storage import Storage

MANIFEST = "model/manifest.json"


class ModelFile(Message):
    """One file of the exported model."""

    name: str
    size: int
    sha256: str


class ModelManifest(Message):
    """What `model/` holds. `outcome` is the job's last word."""

    version: int = 1
    job_uid: str
    files: tuple[ModelFile, ...] = Field(default=())
    outcome: TerminationMessage


class Artefacts:
    """Files of tasks in the folder of one run. Safe from any thread.

    Tasks are given out one at a time, under tokens that grow: what came is remembered for the newest one only.
    """

    def __init__(self, storage: Storage, job_uid: str) -> None:
        self._storage = storage
        self._job_uid = job_uid
        self._lock = threading.Lock()
        self._token = (-1, -1)
        self._files: dict[str, ModelFile] = {}

    def receive(self, token: tuple[int, int], kind: str, name: str, chunks: Iterator[bytes]) -> None:
        """Write one file of a task: below `model/` for the export, below `logs/` else."""
        if kind == "export":
            target = f"model/{name}"
            if target == MANIFEST:
                raise ProtocolError("a model's file cannot be called manifest.json")
        elif name.startswith("logs/"):
            target = name
        else:
            raise ProtocolError("the files of this task lie below logs/")
        digest = Digest(_views(chunks))
        self._storage.write(target, digest)
        with self._lock:
            if token > self._token:
                self._token, self._files = token, {}
            if token == self._token:
                self._files[name] = ModelFile(name=name, size=digest.size, sha256=digest.hex)

    def check(self, token: tuple[int, int], names: tuple[str, ...]) -> None:
        """All files that a task says it made must be here."""
        here = {file.name for file in self._of(token)}
        missing = [name for name in names if name not in here]
        if missing:
            raise ProtocolError(f"{missing[0]} was not uploaded")

    def publish_model(self, token: tuple[int, int], outcome: TerminationMessage) -> TerminationMessage:
        """Make the model visible; the message with its digest. `Fenced` if another export got there first."""
        files = tuple(sorted(self._of(token), key=lambda file: file.name))
        digest = hashlib.sha256(
            "\n".join(f"{f.sha256} {f.size} {f.name}" for f in files).encode()
        ).hexdigest()
        outcome = outcome.model_copy(
            update={"model_uri": f"{self._storage.uri}/model", "model_digest": digest}
        )
        manifest = ModelManifest(job_uid=self._job_uid, files=files, outcome=outcome)
        if not self._storage.create(MANIFEST, manifest.to_json().encode()):
            there = self.published()
            if there is None:
                raise Fenced("another parameter server published the model")
            return there
        return outcome

    def published(self) -> TerminationMessage | None:
        """The last word of a job whose model is there already."""
        try:
            found: Any = ModelManifest.model_validate_json(self._storage.read(MANIFEST))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise Fenced(f"{MANIFEST} cannot be read: {str(error).splitlines()[0]}") from None
        return found.outcome if found.job_uid == self._job_uid else None

    def _of(self, token: tuple[int, int]) -> list[ModelFile]:
        with self._lock:
            return list(self._files.values()) if token == self._token else []


def _views(chunks: Iterator[bytes]) -> Iterator[bytes | memoryview]:
    yield from chunks
