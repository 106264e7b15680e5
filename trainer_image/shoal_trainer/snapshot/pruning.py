"""What is removed of a run's snapshots: old ones, files that no manifest names, and outdated claims."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Set

from shoal_trainer.errors import SnapshotError, Unreachable
from shoal_trainer.snapshot import claims
from shoal_trainer.snapshot.claims import FOLDER
from shoal_trainer.snapshot.published import Published, file_of
from shoal_trainer.snapshot.storage import Storage

_ATTEMPT = re.compile(r"\d{10}-\d+(\..+)?", re.DOTALL)
"""A shard's file, or the folder in which an earlier version had those of an attempt."""
_ENTRY = re.compile(rf"{FOLDER}/(?:manifest-|epoch-|\d{{10}}-)[^\s:,'\"]*")
REFUSALS = 3
"""After this many refusals nothing may be removed, or what may not was tried again."""


class Pruner:
    """Removes, and remembers what it could not."""

    def __init__(self, storage: Storage, published: Published) -> None:
        self._storage, self._published = storage, published
        self._refused: set[str] = set()
        """What could not be removed, as names in the folder."""

    def prune(self, retain: int, epoch: int, loaded: int | None, unsound: Set[int] = frozenset()) -> None:
        """Remove all but the newest `retain` snapshots and the one that is `loaded`; see `SnapshotStore.prune`.

        `unsound`: those that are removed first.
        """
        names = self._storage.names(FOLDER)
        if claims.highest(names).get(0, 0) > epoch:
            return
        numbers = self._published.among(names)
        sound = [number for number in numbers if number not in unsound]
        keep = [*(n for n in sound[: -max(1, retain)] if n == loaded), *sound[-max(1, retain) :]]
        doomed = [*claims.outdated(names), *(file_of(number) for number in numbers if number not in keep)]
        cannot: list[Unreachable] = []
        with contextlib.suppress(SnapshotError):  # until an unreadable manifest is removed, all files stay
            heads = [self._published.head(number) for number in keep]
            named = {shard.file.split("/")[0] for head in heads for shard in head.shards}
            self._published.keep(keep)
            doomed += [name for name in filter(_ATTEMPT.fullmatch, names) if name not in named]
        self._refused.intersection_update(doomed)
        refused = 0
        for name in sorted(doomed, key=self._refused.__contains__):
            self._refused.add(name)
            with _noted(cannot):
                self._storage.remove(f"{FOLDER}/{name}")
                self._refused.remove(name)
            if name in self._refused and (refused := refused + 1) == REFUSALS:
                break
        if cannot:
            raise Unreachable(_ENTRY.sub(FOLDER, str(cannot[0])))


@contextlib.contextmanager
def _noted(errors: list[Unreachable]) -> Iterator[None]:
    """The other calls are made all the same."""
    try:
        yield
    except Unreachable as error:
        errors.append(error)
