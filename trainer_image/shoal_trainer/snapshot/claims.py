"""Which incarnation of each shard may go on: the highest one that has claimed its shard in the storage.

```
snapshots/epoch-0-3     parameter server 0 has an incarnation 3: every lower one ends
```

A server on a node that is cut off from the cluster may go on for a long time alongside its successor, because its
workers stay connected. Both reach the storage only. So a successor claims its shard there before it reads anything, and
every server keeps looking for a claim higher than its own. An unreachable storage ends no server.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator

from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.snapshot.storage import Storage

log = logging.getLogger(__name__)

FOLDER = "snapshots"
LOOK_SECONDS = 5.0
"""How long a replaced server goes on at most while it can reach the storage."""
_NAME = re.compile(r"epoch-(\d{1,6})-(\d{1,18})")


def highest(names: Iterable[str]) -> dict[int, int]:
    """Of the names in the folder: for each shard that was ever claimed, the highest epoch."""
    found: dict[int, int] = {}
    for _, index, epoch in _claims(names):
        found[index] = max(epoch, found.get(index, 0))
    return found


def outdated(names: Iterable[str]) -> list[str]:
    """Those of the names in the folder that are claims below the highest one of their shard."""
    names = list(names)
    newest = highest(names)
    return [name for name, index, epoch in _claims(names) if epoch < newest[index]]


class Claim:
    """The claim of shard `index` at `epoch`, in the storage of the run. Thread-safe."""

    def __init__(self, storage: Storage, index: int, epoch: int) -> None:
        self._storage = storage
        self._index, self._epoch = index, epoch

    def make(self) -> None:
        """Fence all lower incarnations; `Fenced` by a higher one. Incarnation 0 has none to fence."""
        if self._epoch > 0:
            name = f"{FOLDER}/epoch-{self._index}-{self._epoch}"
            self._storage.create(name, b"claimed\n")  # it exists after a restart in place
        self.check()

    def check(self) -> None:
        """`Fenced` where a higher incarnation has claimed the shard."""
        newest = highest(self._storage.names(FOLDER)).get(self._index, 0)
        if newest > self._epoch:
            raise Fenced(
                f"incarnation {newest} of shard {self._index} exists, this is incarnation {self._epoch}"
            )


class Watch:
    """A thread that looks every `LOOK_SECONDS`, and calls `superseded` once."""

    def __init__(self, claim: Claim, superseded: Callable[[Fenced], None]) -> None:
        self._claim = claim
        self._superseded = superseded
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="claims", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()

    def look(self) -> bool:
        """Look once; returns whether to look again."""
        try:
            self._claim.check()
        except Fenced as error:
            self._superseded(error)
            return False
        except Unreachable as error:
            log.debug("cannot see whether a newer incarnation exists: %s", error)
        except Exception:
            log.exception("cannot see whether a newer incarnation exists")
        return True

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS) and self.look():
            pass


def _claims(names: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    for name in names:
        if match := _NAME.fullmatch(name):
            yield name, int(match[1]), int(match[2])
