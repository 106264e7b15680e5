"""Claims in the storage: only the highest incarnation that has claimed a shard may serve it.

```
snapshots/epoch-0-3     parameter server 0 has an incarnation 3: lower ones exit. In it is the uid of the job
```

A server on a node that is partitioned from the cluster may run for a long time alongside its successor, because its
workers stay connected. Only the storage is visible to both. A successor claims its shard there before it reads
anything, and every server polls for a claim higher than its own. While the storage is unreachable no server exits.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath

from shoal_trainer.background import Background
from shoal_trainer.errors import Fenced, RunTaken, Unreachable, UserError
from shoal_trainer.snapshot.storage import Storage

log = logging.getLogger(__name__)

FOLDER = "snapshots"
LISTED_AFTER = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Pauses, in seconds, until what is written should be listed: on some mounted file systems a listing is cached."""
LOOK_SECONDS = 5.0
"""How long a replaced server continues at most while the storage is reachable."""
_NAME = re.compile(r"epoch-(\d{1,6})-(\d{1,18})")
_BY = re.compile(r"job ([\w.-]{1,253})\n")
"""The content of a claim: not of half a one, nor of one that an earlier version made."""


def highest(names: Iterable[str]) -> dict[int, int]:
    """The highest claimed epoch of each shard, from the names in the folder."""
    found: dict[int, int] = {}
    for _, index, epoch in _claims(names):
        found[index] = max(epoch, found.get(index, 0))
    return found


def outdated(names: Iterable[str]) -> list[str]:
    """The names of claims below the highest one of their shard."""
    names = list(names)
    newest = highest(names)
    return [name for name, index, epoch in _claims(names) if epoch < newest[index]]


def check_storage(storage: Storage, name: str, pause: Callable[[float], bool]) -> None:
    """`UserError` unless the storage refuses to create what exists and lists it: claims and manifests rely on both.

    `name`: of a process that tries it, and of no other one that may run at the same time. `pause`: waits for so many
    seconds; returns whether the process ends.
    """
    probe = f"{FOLDER}/probe-{name}"
    _remove_probe(storage, probe)  # an earlier try may have left it
    twice = storage.create(probe, b"1") and storage.create(probe, b"2")
    listed = _is_listed(storage, probe, pause)
    _remove_probe(storage, probe)
    if not listed:
        raise UserError(
            f"The storage {storage.uri} does not list what is written there: no snapshot would be found again. Apply a "
            "new job with one slash after the bucket (s3://BUCKET/PATH), another object store, or a volume."
        )
    if twice:
        raise UserError(
            f"The storage {storage.uri} created one object twice: it ignores conditional writes (If-None-Match: *), so "
            "two parameter servers could replace each other's snapshots. Use an object store that supports them, as "
            "AWS S3 and Google Cloud Storage do, or a volume."
        )


def _is_listed(storage: Storage, probe: str, pause: Callable[[float], bool]) -> bool:
    """Whether it is in its folder's listing, by and by. `Unreachable` if the process ends before."""
    for seconds in LISTED_AFTER:
        if pause(seconds):
            raise Unreachable(f"{probe} is not listed yet")
        if PurePosixPath(probe).name in storage.names(FOLDER):
            return True
    return False


def _remove_probe(storage: Storage, probe: str) -> None:
    with contextlib.suppress(Unreachable):  # it may keep everything; nothing reads this file
        storage.remove(probe)


class Claim:
    """The claim of shard `index` at `epoch` by the job with this uid, in the run's storage. Thread-safe."""

    def __init__(self, storage: Storage, index: int, epoch: int, uid: str = "") -> None:
        self._storage = storage
        self._index, self._epoch, self._uid = index, epoch, uid

    def make(self) -> None:
        """Claim the shard, which fences lower incarnations; `Fenced` if a higher one exists."""
        if self._epoch > 0:  # incarnation 0 has no predecessor
            name = f"{FOLDER}/epoch-{self._index}-{self._epoch}"
            self._storage.create(name, f"job {self._uid}\n".encode())  # after a restart in place it exists
        self.check()

    def check(self) -> None:
        """`Fenced` if a higher incarnation has claimed the shard; `RunTaken` if it is of another job."""
        newest = highest(self._storage.names(FOLDER)).get(self._index, 0)
        if newest > self._epoch:
            found = f"incarnation {newest} of shard {self._index} exists, this is incarnation {self._epoch}"
            if (uid := self._claimed_by(newest)) not in {"", self._uid}:
                raise RunTaken(
                    f"The job with uid {uid}, of another cluster or an earlier object of this name, uses this run in "
                    f"{self._storage.uri}: {found}. Give each job a storage.uri or a storage.run of its own."
                )
            raise Fenced(found)

    def _claimed_by(self, epoch: int) -> str:
        """The uid of the job whose claim this is; "" if it is not known: then it is as one of this job."""
        try:
            content = self._storage.read(f"{FOLDER}/epoch-{self._index}-{epoch}").decode("utf-8", "replace")
        except (FileNotFoundError, Unreachable):
            return ""
        return match[1] if (match := _BY.fullmatch(content)) else ""


class Watch(Background):
    """A thread that checks a claim every `LOOK_SECONDS`, and calls `superseded` once if it is fenced."""

    def __init__(self, claim: Claim, superseded: Callable[[Fenced], None]) -> None:
        super().__init__("claims", self._look_again, pause=LOOK_SECONDS)
        self._claim, self._superseded = claim, superseded

    def look(self) -> bool:
        """Check once; returns whether to continue."""
        try:
            self._claim.check()
        except Fenced as error:
            self._superseded(error)
            return False
        except Unreachable as error:
            log.debug("cannot check for a newer incarnation: %s", error)
        return True

    def _look_again(self) -> float:
        if not self.look():
            self.stop()
        return LOOK_SECONDS


def _claims(names: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    for name in names:
        if match := _NAME.fullmatch(name):
            yield name, int(match[1]), int(match[2])
