"""What holds at every moment of a simulated job, and not only of what its end shows.

They look at what is there: at fences, claims and parameters, and not at the code that should have kept them.
"""

from __future__ import annotations

import re
from itertools import pairwise

from shoal_trainer.coordinator.lease_index import overlap
from shoal_trainer.ps.contents import KEPT_INCARNATIONS
from shoal_trainer.snapshot.manifest import Manifest
from tests.unit.trainer.simulation.job import PIECE, STEPS_AT

CLAIM = re.compile(r"snapshots/epoch-(\d+)-(\d+)")


def claimed(storage, index):
    """The highest incarnation that has claimed this shard."""
    claims = map(CLAIM.fullmatch, storage.files)
    return max((int(claim[2]) for claim in claims if claim and int(claim[1]) == index), default=0)


def check_claim(storage, index, epoch):
    """A server serves this shard: it has claimed it, and no newer one has."""
    assert claimed(storage, index) == epoch, (
        f"shard {index}: {claimed(storage, index)} has claimed it, not {epoch}"
    )


def check_published(storage, name, data):
    """Nobody publishes after its successor has claimed the storage, nor a new part of a shard that was replaced."""
    if "/manifest-" not in name:
        return
    manifest = Manifest.model_validate_json(data)
    assert claimed(storage, 0) <= manifest.epoch, f"{name} of {manifest.epoch} follows {claimed(storage, 0)}"
    for part in manifest.shards:
        published = any(part.file.encode() in earlier for _, earlier in storage.created)
        assert published or claimed(storage, part.index) <= part.epoch, f"{name} has {part.file}"


def check_leases(ledger):
    """Nothing is leased twice."""
    segments = sorted(
        (lease.segment for lease in ledger.leases.values()), key=lambda one: (*one[:3], one.end)
    )
    for one, next_one in pairwise(segments):
        assert not overlap(one, next_one), f"{one} and {next_one} are leased at once"


def check_fences(shard):
    """A shard refuses the predecessors of the workers whose pushes it has, as a whole or in part."""
    with shard.lock:
        older = dict(shard.workers.refused()[0])
        pushed = [*shard.history.applied, *((push.slot, push.incarnation) for push in shard.history.begun())]
    for slot, incarnation in pushed:
        assert older.get(slot, 0) >= incarnation, f"workers before {slot}-{incarnation} may push"


def check_lost(coordinator):
    """Whom the coordinator has fenced, or has seen leave, shard 0 refuses. Whose successor has joined, is fenced."""
    members = list(coordinator.members.known.values())
    joined = dict(sorted(member.worker for member in members if member.word_number))
    for member in members:
        if member.present:
            assert member.incarnation >= joined.get(member.slot, 0), (
                f"{member.worker} was replaced and is present"
            )
        else:
            told = refused(coordinator.shard, member.worker)
            assert told, f"{member.worker} is {member.state} and may push"


def check_joined(coordinator, worker, joined):
    """What a worker goes on with when it has joined is leased to it."""
    for renamed in joined.renamed:
        lease = coordinator.record.ledger.leases[renamed.new]
        assert lease.worker == worker, f"{worker} goes on with {lease}"


def check_told(shard, told):
    """Another shard refuses whom shard 0 has told it of."""
    older = dict(shard.workers.refused()[0])
    for slot, incarnation in told.older:
        assert older.get(slot, 0) >= incarnation, (
            f"workers before {slot}-{incarnation} may push to {shard.index}"
        )
    for worker in told.left:
        assert refused(shard, worker), f"{worker} has left and may push to {shard.index}"


def check_heard(shard, worker):
    """This worker, which is greeted, or of which a push begins, is not refused."""
    assert not (told := refused(shard, worker)), f"{worker} {told} and is heard"


def refused(shard, worker):
    """Why a shard refuses a worker, if it does."""
    older, left = map(dict, shard.workers.refused())
    if older.get(worker[0], 0) > worker[1]:
        return "was replaced"
    return "has left" if left.get(worker[0]) == worker[1] else ""


def check_journal(journal, known):
    """An answer tells a worker nothing twice, and a copy names no push that is in a snapshot that its worker knows of.

    Else they would grow without end. `known`: what needs not be told, up to this version.
    """
    told = [entry.version for entry in journal.entries]
    assert all(version > known for version in told), f"{told} after {known}"


def steps_in(world, shard):
    """The last piece's counters of steps."""
    return shard.model.parameters.reshape(-1, PIECE)[-1, STEPS_AT : STEPS_AT + world.steps]


def check_contents(world, shard):
    """A shard has the steps of the pushes that it says it has, and no others (of incarnations that it remembers).

    But for those in what it began with, see `World.unnamed`, also with another number of shards.
    """
    last = steps_in(world, shard)
    contents, newest = shard.history.contents, {}
    for slot, incarnation, *_ in contents.spans():
        newest[slot] = max(incarnation, newest.get(slot, 0))
    for step, pushes in world.sent.items():
        if step >= world.resized_at and all(
            incarnation > newest.get(slot, 0) - KEPT_INCARNATIONS for slot, incarnation, _ in pushes
        ):
            told = any(push in contents for push in pushes)
            known = told or (shard.index, step) in world.unnamed
            assert told <= bool(last[step]) <= known, f"step {step} of {pushes}: {contents.spans()}"
