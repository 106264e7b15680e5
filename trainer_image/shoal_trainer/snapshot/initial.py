"""The snapshot of another run that this run starts from: the same one for all shards, and after a restart.

The other run may publish and remove snapshots meanwhile. Shard 0 therefore chooses one and records its number in this
run's storage, in `snapshots/initial.json`. The other shards wait for this record.
"""

from __future__ import annotations

import logging

from shoal_trainer.contract import Message
from shoal_trainer.errors import OtherFormat, Outrun, SnapshotError, Unreachable, UserError
from shoal_trainer.ps.shard import ShardCopy
from shoal_trainer.snapshot.claims import FOLDER
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.storage import Storage, open_storage
from shoal_trainer.snapshot.store import SnapshotStore

log = logging.getLogger(__name__)

RECORD = f"{FOLDER}/initial.json"


class InitialSnapshot(Message):
    """The content of the record: the number of a snapshot of the other run, and its folder.

    "" in records of versions that did not write it.
    """

    number: int
    uri: str = ""


def load_initial(
    own: Storage,
    uri: str,
    index: int,
    shards: int,
    *,
    follows: bool = False,
    other: SnapshotStore | None = None,
) -> tuple[Manifest, ShardCopy]:
    """Shard `index` of `shards` from the chosen snapshot of the run in `uri`. `own`: the storage of this run.

    `follows`: this shard may have had parameters, so workers may have copies; if the chosen snapshot is gone, the
    newest one is better than the end of the job. `other`: the snapshots in `uri`, which know across calls for how long
    a file of them could not be read. `Unreachable` before shard 0 has chosen; `UserError` if there is no
    snapshot, or the chosen one cannot be loaded.
    """
    other = other or SnapshotStore(open_storage(uri))
    number = _recorded(own, uri)
    if number is None:
        if index > 0:
            raise Unreachable("shard 0 has not chosen it yet")
        found = _newest(other, uri, index, shards)
        if found is None:
            raise UserError(
                f"There is no complete snapshot to start from in {uri}. Set initialFrom.uri (--initial-from) "
                "to the folder of a run, <storage>/<namespace>/<job>/<uid>."
            )
        number = _record(own, InitialSnapshot(number=found[0].number, uri=uri))
        if number == found[0].number:
            return found
    try:
        return other.load_number(number, index, shards)
    except SnapshotError as error:
        if follows and (found := _newest(other, uri, index, shards)) is not None:
            log.warning(
                "snapshot %d of %s, from which this run started, cannot be loaded: %s; taking snapshot %d instead",
                number, uri, error, found[0].number,
            )  # fmt: skip
            return found
        raise UserError(
            f"Snapshot {number} of {uri}, which this run starts from, cannot be loaded: {error}. Start a new run: it "
            f"chooses the newest snapshot again. If snapshot {number} is damaged, remove its manifest first. If the "
            "other run still trains, raise its snapshot.retain."
        ) from None


def _newest(other: SnapshotStore, uri: str, index: int, shards: int) -> tuple[Manifest, ShardCopy] | None:
    try:
        return other.load_newest(index, shards)
    except Outrun as error:
        raise UserError(
            f"The run in {uri} still trains, and {error}. Raise its snapshot.retain or snapshot.everySeconds, or start "
            "from it when it has ended."
        ) from None
    except OtherFormat as error:
        raise UserError(
            f"Another version of Shoal wrote what is in {uri}, which this run starts from: {error}. Use that version's "
            "images, or set initialFrom.uri (--initial-from) to a run of this version. Nothing was changed."
        ) from None


def _record(own: Storage, chosen: InitialSnapshot) -> int:
    """Record the choice; returns the number in the record, which may be that of another incarnation of shard 0."""
    content = chosen.to_json().encode()
    if own.create(RECORD, content):
        return chosen.number
    recorded = _recorded(own, chosen.uri)
    if recorded is None:
        own.write(RECORD, [content])
        return chosen.number
    return recorded


def _recorded(own: Storage, uri: str) -> int | None:
    """The number in the record; None if there is none, or its writer was killed on a volume without hard links.

    Nor is there one of this other run if a job before this one has begun this run, `storage.run`, with another.
    """
    try:
        found = InitialSnapshot.model_validate_json(own.read(RECORD))
        return found.number if found.uri in {"", uri} else None
    except (FileNotFoundError, ValueError):
        return None
