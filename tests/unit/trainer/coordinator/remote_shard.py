"""Shard 0's client of another shard, without a network."""

from shoal_trainer.coordinator.follower import Follower
from shoal_trainer.coordinator.protocol import (
    AskPushes,
    AskReport,
    FenceWorkers,
    Pushes,
    RollBackShard,
    SnapshotShard,
)
from shoal_trainer.errors import Unreachable


class RemoteShard:
    """`down`: it does not answer."""

    def __init__(self, shard, store):
        self.handlers, self.down = Follower(shard, store).handlers(), False

    def reach(self):
        """The handlers of who answers."""
        if self.down:
            raise Unreachable("the shard is down")
        return self.handlers

    def _call(self, name, request):
        return self.reach()[name](type(request).model_validate_json(request.to_json()))

    def snapshot(self, number, epoch, published, generation):
        return self._call(
            "snapshot", SnapshotShard(number=number, epoch=epoch, published=published, generation=generation)
        )

    def pushes(self, wanted):
        return Pushes.model_validate_json(self._call("pushes", AskPushes(wanted=wanted)).to_json())

    def fence(self, epoch, older, left):
        self._call("fence", FenceWorkers(epoch=epoch, older=older, left=left))

    def report(self):
        return self._call("report", AskReport())

    def roll_back(self, generation):
        self._call("roll-back", RollBackShard(generation=generation))
