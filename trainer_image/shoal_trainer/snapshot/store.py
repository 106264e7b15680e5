"""The snapshots of a run: each shard writes its part, and one manifest publishes all parts atomically.

```
snapshots/manifest-0000000007.json               numbers only increase; a manifest is never replaced
snapshots/0000000007-2.shard-0-of-3-1f0c9a7e     number, epoch of PS 0; a random suffix per write
```

A shard may finish its write after the attempt was abandoned and its number used again: the suffix keeps it from
replacing a file that a manifest names. No folder is made for an attempt: some buckets keep it when it is empty.

Two incarnations of a parameter server may run at the same time. Before it publishes, a server reads the claims and the
newest manifest; a higher epoch raises `Fenced`. If another server publishes between this check and the write, the
storage refuses the second manifest of that number, and the check is repeated. So an older epoch never publishes after
a newer one. It may publish in the moment of a newer one's claim, which the claims' check does not see: such a snapshot
is loaded only if the newer one is lost before its own first snapshot.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from statistics import fmean

from shoal_trainer.errors import Fenced, Outrun, SnapshotError, Unreachable
from shoal_trainer.ps import kernels
from shoal_trainer.ps.kernels import Vector
from shoal_trainer.ps.shard import ShardCopy
from shoal_trainer.ps.shard_bounds import bounds
from shoal_trainer.ps.update_rules import Optimizer
from shoal_trainer.snapshot import claims, shard_file
from shoal_trainer.snapshot.claims import FOLDER
from shoal_trainer.snapshot.manifest import Manifest, ShardFile, applied_to_list
from shoal_trainer.snapshot.pruning import Pruner
from shoal_trainer.snapshot.published import Published, numbers, path
from shoal_trainer.snapshot.storage import Storage
from shoal_trainer.snapshot.unread import Unread
from shoal_trainer.wire.messages import Applied

log = logging.getLogger(__name__)

PUBLISH_TRIES = 8
"""After this many refusals the listing is stale; the next interval tries again."""
CONTROLS = 3
"""So many other files are read to tell one that alone cannot be read from an outage."""
LOAD_TRIES = 3
"""So often all snapshots that were listed may be removed while they are read."""


class _Damaged(SnapshotError):
    """A file was read to its end, or to what cannot be in it."""


class SnapshotStore:
    """The snapshots in `storage`, the folder of one run. Use it from one thread at a time."""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage, self._clock = storage, clock
        self._wrote_at: float | None = None
        """When the last bytes went into a shard's file; None: none is being written."""
        self._loaded: int | None = None
        """The number of the snapshot that was loaded, until one is published here: newer ones may be damaged."""
        self._damaged: set[int] = set()
        """The numbers of those that were read, and could not be loaded: one that cannot be read may be sound."""
        self._behind = frozenset[int]()
        """Those of them that are older than one that was published here: nobody needs them."""
        self._unread = Unread(clock)
        self._published = Published(storage, self._unread)
        self._pruner = Pruner(storage, self._published)

    # --- writing --------------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """A number above those of all published snapshots."""
        return self._published.next_number()

    def discard(self, number: int, part: ShardFile) -> None:
        """Remove this part of an attempt at snapshot `number` if nothing was ever published here.

        As where shard 0 has another storage: its `prune` removes nothing here, and each attempt fails.
        """
        if self.next_number() > 1:
            return
        try:
            self._storage.size(path(number))  # the listing may be stale
        except FileNotFoundError:
            self._storage.remove(f"{FOLDER}/{part.file}")

    def write_shard(self, number: int, epoch: int, copy: ShardCopy) -> ShardFile:
        """Write one shard's file of snapshot `number`, at `epoch` of PS 0. Readers ignore it until `publish`.

        `SnapshotError` if a value is not finite: nobody could train on, or return to, such a snapshot.
        """
        for name, values in copy.arrays.items():
            if not kernels.finite(values):
                raise SnapshotError(f"{name} of shard {copy.index} have values that are not finite")
        suffix = f"-{secrets.token_hex(4)}"
        file = f"{number:010d}-{epoch}.shard-{copy.index}-of-{copy.shards}{suffix}"
        pieces = shard_file.Digest(self._noted(shard_file.chunks(copy)))
        try:
            self._storage.write(f"{FOLDER}/{file}", pieces)
        except Unreachable as error:  # without the suffix, so that the same error is logged once
            raise Unreachable(str(error).replace(suffix, "")) from error
        finally:
            self._wrote_at = None
        fields = dict(copy) | {"applied": applied_to_list(copy.applied)}
        return ShardFile(**fields, file=file, size=pieces.size, sha256=pieces.hex)

    def idle_seconds(self) -> float:
        """For how long nothing of the file that `write_shard` is writing was written; 0: it is writing none."""
        since = self._wrote_at
        return 0.0 if since is None else self._clock() - since

    def _noted(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            self._wrote_at = self._clock()
            yield chunk
        self._wrote_at = self._clock()

    def check(self, parts: Sequence[ShardFile]) -> None:
        """`SnapshotError` if the shard of one of these parts was replaced, or a part is not here.

        Its successor did not start from this part, so the part does not match the current parameters. And where each
        server has a storage of its own, nobody could load what is in several.
        """
        newest = claims.highest(self._storage.names(FOLDER))
        for part in parts:
            if part.epoch < newest.get(part.index, 0):
                raise SnapshotError(
                    f"shard {part.index} was replaced while it wrote its part of the snapshot"
                )
            try:
                self._storage.size(f"{FOLDER}/{part.file}")
            except FileNotFoundError:
                raise SnapshotError(
                    f"what shard {part.index} has written is not in the storage of shard 0: several parameter servers "
                    "need one storage, a bucket or a volume claim (with storage.ephemeral each has its own)"
                ) from None

    def publish(self, manifest: Manifest) -> Manifest:
        """Publish a snapshot; returns its manifest with the final number.

        A refused number counts as the newest one, as a stale listing may lack it. `Fenced` if a newer epoch exists,
        `Unreachable` after `PUBLISH_TRIES` refusals, `SnapshotError` if a shard is missing.
        """
        if sorted(shard.index for shard in manifest.shards) != list(range(len(manifest.shards))):
            raise SnapshotError(f"the manifest does not name each of its {len(manifest.shards)} shards once")
        refused = 0
        for _ in range(PUBLISH_TRIES):
            names = self._storage.names(FOLDER)
            if (claimed := claims.highest(names).get(0, 0)) > manifest.epoch:
                raise Fenced(f"incarnation {claimed} has claimed the storage, this is {manifest.epoch}")
            newest = max([*numbers(names), refused])
            if newest:
                self._check_epoch(newest, manifest.epoch)
            manifest = manifest.model_copy(update={"number": max(manifest.number, newest + 1)})
            if self._published.create(manifest):
                self._loaded, self._behind = None, frozenset(self._damaged)
                return manifest
            refused = manifest.number
        raise Unreachable(f"no free snapshot number after {PUBLISH_TRIES} tries: {refused} is taken as well")

    def prune(self, retain: int, epoch: int) -> None:
        """Remove all but the newest `retain` snapshots, the files that none of these names, and outdated claims.

        Call it at this `epoch` of PS 0: what no manifest names then is of attempts that failed, also of servers that
        died. A newer epoch may be writing such files: it removes them. The snapshot that was loaded stays until one is
        published here; then what was newer, and could not be loaded, is none of those that stay. `Unreachable`, without
        a name, if something cannot be removed: it is tried again after all else.
        """
        self._pruner.prune(retain, epoch, self._loaded, self._behind)

    # --- reading --------------------------------------------------------------------------------------------------

    def manifests(self) -> Iterator[Manifest]:
        """The readable manifests, newest first: see `Published.newest_first`."""
        return self._published.newest_first()

    def load_settled(
        self, index: int, shards: int, wanted: Callable[[Manifest], bool] = lambda _: True
    ) -> tuple[Manifest, ShardCopy] | None:
        """As `load_newest`, but loads again if a replaced server published a snapshot in the meantime."""
        while True:
            number = self.next_number()
            found = self.load_newest(index, shards, wanted)
            if self.next_number() == number:
                return found

    def load_newest(
        self, index: int, shards: int, wanted: Callable[[Manifest], bool] = lambda _: True
    ) -> tuple[Manifest, ShardCopy] | None:
        """The newest intact snapshot that is `wanted`, and shard `index` of `shards` from it; None if there is none.

        Not `load_settled`, which would not return while another run publishes faster than this shard loads.
        """
        began = self._clock()
        found = self.load_other(index, shards, wanted)
        if found is None:  # who has none begins from nothing
            self._check_unread(began)
        return found

    def load_other(
        self, index: int, shards: int, wanted: Callable[[Manifest], bool]
    ) -> tuple[Manifest, ShardCopy] | None:
        """As `load_newest`, for who has one already: a file that alone cannot be read is not waited for."""
        return self._load(index, shards, wanted)[0]

    def load_generation(self, generation: int, index: int, shards: int) -> tuple[Manifest, ShardCopy] | None:
        """As `load_newest`, but of this generation or a later one; None if there is none yet.

        `SnapshotError` if there is one, but none that this shard can load.
        """
        began = self._clock()
        found, damage = self._load(index, shards, lambda manifest: manifest.generation >= generation)
        if found is None:
            if damage is not None and self._only(self._unread.since(began)):
                raise damage
            self._check_unread(began)
        return found

    def load_number(self, number: int, index: int, shards: int) -> tuple[Manifest, ShardCopy]:
        """Shard `index` of `shards` from snapshot `number`. `SnapshotError` if it does not exist or is damaged."""
        manifest = self._published.read(number, Manifest)
        copy = self.load_shard(manifest, index, shards)
        self._loaded = number
        return manifest, copy

    def load_shard(self, manifest: Manifest, index: int, shards: int) -> ShardCopy:
        """Shard `index` of `shards` from a snapshot of any number of shards. `SnapshotError` if a file is damaged.

        That is believed when it was read twice: a job may return to an older snapshot for it, or end.
        """
        try:
            return self._read_shard(manifest, index, shards)
        except _Damaged as error:
            log.info("snapshot %d: %s: it is read again", manifest.number, error)
        return self._read_shard(manifest, index, shards)  # what was read is no longer in memory

    # --- internal -------------------------------------------------------------------------------------------------

    def _read_shard(self, manifest: Manifest, index: int, shards: int) -> ShardCopy:
        model = manifest.model
        _check_covers(manifest)
        low, high = bounds(model.size, shards)[index]
        trainable = max(0, min(high, model.parameters) - low)
        arrays = {"parameters": shard_file.empty(high - low)}
        arrays |= Optimizer(model.optimizer, low, trainable).state
        alike = manifest.shards if len(manifest.shards) == shards else ()
        own = next((part for part in alike if part.index == index), None)
        for part in manifest.shards:
            if part is own or (part.low < high and low < part.high):
                self._read_part(part, low, high, arrays)
        parts = list(manifest.shards) if own is None else [own]
        applied: Applied = parts[0].vector if len(parts) == 1 else manifest.applied
        return ShardCopy(
            index=index,
            shards=shards,
            epoch=manifest.epoch,
            version=min(part.version for part in parts),
            samples=min(part.samples for part in parts),
            updates=min(part.updates for part in parts),
            low=low,
            high=high,
            model=model,
            applied=applied,
            arrays=arrays,
            # Of another number of shards, what they differed in is counted for good already (see `Partial.load`).
            pushes=() if own is None else own.pushes,
            begun=() if own is None else own.begun,
            generation=manifest.generation,
            pace=_mean(part.pace for part in parts),
            filled=_mean(part.filled for part in parts),
            agreement=fmean(part.agreement for part in parts),
            usual=_mean(part.usual for part in parts),
        )

    def _load(
        self, index: int, shards: int, wanted: Callable[[Manifest], bool]
    ) -> tuple[tuple[Manifest, ShardCopy] | None, SnapshotError | None]:
        """The newest that can be loaded now, and why the newest wanted one that was skipped cannot be.

        An outage may end after newer ones were tried and before an older one is read: then all are tried again.
        """
        began = self._clock()
        loaded = self._load_listed(index, shards, wanted)
        if loaded[0] is not None and any(map(self._answers, self._unread.since(began))):
            del loaded  # the memory has room for one
            loaded = self._load_listed(index, shards, wanted)
        return loaded

    def _load_listed(
        self, index: int, shards: int, wanted: Callable[[Manifest], bool]
    ) -> tuple[tuple[Manifest, ShardCopy] | None, SnapshotError | None]:
        """As `_load`, each of those that are listed once.

        Again if none can be loaded and newer ones were published: what was listed may have been removed since. `Outrun`
        if that happens again and again.
        """
        began = self._clock()
        for _ in range(LOAD_TRIES):
            number, damage = self.next_number(), None
            for manifest in filter(wanted, self._published.newest_first()):
                try:
                    self._check_files(manifest)
                    copy = self.load_shard(manifest, index, shards)
                except SnapshotError as error:  # shards that do not read this file load this snapshot
                    text = f"snapshot {manifest.number}: {error}: skipped by shard {index} of {shards}"
                    self._published.tell(logging.ERROR, text)
                    if self._unread.since(began).keys().isdisjoint(part.file for part in manifest.shards):
                        self._damaged.add(manifest.number)
                    damage = damage or SnapshotError(str(error))  # itself it keeps what was read in memory
                else:
                    self._loaded = manifest.number
                    self._damaged.discard(manifest.number)
                    return (manifest, copy), damage
            if self.next_number() == number:
                return None, damage
        raise Outrun(f"snapshots were removed {LOAD_TRIES} times before this shard had read one")

    def _only(self, unread: Collection[str]) -> bool:
        """Whether only these files cannot be read, which are none or some: others are now, and these are not then."""
        parts = (part.file for manifest in self._published.newest_first() for part in manifest.shards)
        others = islice((file for file in dict.fromkeys(parts) if file not in unread), CONTROLS)
        return not unread or (any(map(self._answers, others)) and not any(map(self._answers, unread)))

    def _check_unread(self, began: float) -> None:
        """`Unreachable` if files could not be read since then."""
        for why in self._unread.since(began).values():
            raise Unreachable(why)

    def _answers(self, file: str) -> bool:
        """Whether a file that could not be read can be now, to its end: only then is anything loaded again for it."""
        try:
            with self._storage.open(f"{FOLDER}/{file}") as handle:
                while handle.read(shard_file.CHUNK):
                    pass
        except (FileNotFoundError, Unreachable):
            return False
        return True

    def _check_epoch(self, newest: int, epoch: int) -> None:
        try:
            published = self._published.head(newest)
        except SnapshotError as error:
            log.warning("%s: it is kept, and the next snapshot gets a higher number", error)
            return
        if published.epoch > epoch:
            raise Fenced(f"the storage has a snapshot of epoch {published.epoch}, this is {epoch}")

    def _read_part(self, part: ShardFile, low: int, high: int, arrays: dict[str, Vector]) -> None:
        with self._unread.reading(part.file), self._storage.open(f"{FOLDER}/{part.file}") as handle:
            try:
                shard_file.read_into(handle, part.size, part.sha256, low, high, arrays)
            except SnapshotError as error:
                raise _Damaged(f"{part.file}: {error}") from None

    def _check_files(self, manifest: Manifest) -> None:
        for part in manifest.shards:
            with self._unread.looking(part.file):
                size = self._storage.size(f"{FOLDER}/{part.file}")
            if size != part.size:
                raise SnapshotError(f"{part.file} has {size} bytes, expected {part.size}")


def _check_covers(manifest: Manifest) -> None:
    """`SnapshotError` unless the shards hold each value of the model once, as in a manifest that is not damaged."""
    ranges = sorted((part.low, part.high) for part in manifest.shards)
    ends = [0, *(high for _, high in ranges)]
    if [low for low, _ in ranges] != ends[:-1] or ends[-1] != manifest.model.size:
        raise SnapshotError(
            f"its {len(ranges)} shards do not hold the {manifest.model.size} values of its model"
        )


def _mean(told: Iterable[float | None]) -> float | None:
    """The mean of what a snapshot's parts say; None if one does not say it."""
    each = list(told)
    known = [value for value in each if value is not None]
    return fmean(known) if len(known) == len(each) else None
