"""The manifests of a run, each of which publishes a snapshot: their numbers, and what they say.

None is ever replaced. A damaged one is skipped; one that another version of Shoal wrote is not.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

from shoal_trainer.errors import OtherFormat, SnapshotError
from shoal_trainer.snapshot.claims import FOLDER
from shoal_trainer.snapshot.manifest import FORMAT, Head, Manifest, Written, is_whole, sealed
from shoal_trainer.snapshot.storage import Storage
from shoal_trainer.snapshot.unread import Unread

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Head)

_MANIFEST = re.compile(r"manifest-(\d{10})\.json")
MAX_MANIFEST = 256 << 20


class Published:
    """The manifests in `storage`. `unread`: where files are noted that cannot be read."""

    def __init__(self, storage: Storage, unread: Unread) -> None:
        self._storage, self._unread = storage, unread
        self._heads: dict[int, Head] = {}
        """Of the manifests that were published or read here: each takes long to read."""
        self._told: set[str] = set()
        """What was logged of snapshots that are skipped."""

    def next_number(self) -> int:
        """A number above those of all published snapshots."""
        return max(numbers(self._storage.names(FOLDER)), default=0) + 1

    def create(self, manifest: Manifest) -> bool:
        """Publish a snapshot; False if its number is taken. `SnapshotError` if nobody could read it."""
        content = sealed(manifest.to_json())
        if len(content) > MAX_MANIFEST:
            raise SnapshotError(f"its manifest would have more than {MAX_MANIFEST} bytes")
        if not self._storage.create(path(manifest.number), content):
            return False
        self._heads[manifest.number] = manifest.model_copy(update={"ledger": {}})
        return True

    def newest_first(self) -> Iterator[Manifest]:
        """The readable manifests; damaged ones are logged and skipped.

        `OtherFormat` instead of those that are older than one of another version: nobody may train on from them and
        remove what was trained since.
        """
        for number in reversed(numbers(self._storage.names(FOLDER))):
            try:
                yield self.read(number, Manifest)
            except OtherFormat:
                raise
            except SnapshotError as error:
                self.tell(logging.WARNING, f"{error}: skipped")

    def among(self, names: Iterable[str]) -> list[int]:
        """The numbers of all snapshots. `names`: in the folder, as listed: that may be stale and lack one."""
        return sorted({*numbers(names), *self._heads})

    def keep(self, kept: Iterable[int]) -> None:
        """Forget the others."""
        self._heads = {number: self._heads[number] for number in kept}

    def head(self, number: int) -> Head:
        """What a manifest says, without its ledger. `SnapshotError` if it cannot be read."""
        if number not in self._heads:
            self._heads[number] = self.read(number, Head)
        return self._heads[number]

    def read(self, number: int, kind: type[T]) -> T:
        """A manifest. `SnapshotError` if it is damaged or is not there, `OtherFormat` if another version wrote it."""
        name = path(number)
        try:
            with self._unread.reading(file_of(number), "no longer exists"):
                if self._storage.size(name) > MAX_MANIFEST:
                    raise SnapshotError(f"{name} has more than {MAX_MANIFEST} bytes")
                content = self._storage.read(name)
            head = kind.model_validate_json(content)
        except ValueError as error:
            why = f"{name} is not a valid manifest: {str(error).splitlines()[0]}"
            if not is_whole(content):
                raise SnapshotError(why) from None
            with contextlib.suppress(ValueError):
                _check_format(name, Written.model_validate_json(content))
            raise OtherFormat(why) from None
        if not is_whole(content):
            raise SnapshotError(f"{name} is damaged: it does not have the SHA-256 that it says")
        _check_format(name, head)
        return head

    def tell(self, level: int, text: str) -> None:
        """Log once: who waits for what cannot be read tries again and again."""
        if text not in self._told:
            self._told.add(text)
            log.log(level, "%s", text)


def path(number: int) -> str:
    """Of a manifest, in the storage."""
    return f"{FOLDER}/{file_of(number)}"


def file_of(number: int) -> str:
    """Of a manifest, in the folder."""
    return f"manifest-{number:010d}.json"


def numbers(names: Iterable[str]) -> list[int]:
    """Of the manifests among these names."""
    return sorted(int(match[1]) for name in names if (match := _MANIFEST.fullmatch(name)))


def _check_format(name: str, written: Written) -> None:
    if written.format > FORMAT:
        raise OtherFormat(
            f"{name} has format {written.format}, and this version of Shoal reads up to {FORMAT}"
        ) from None
