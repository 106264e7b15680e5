"""A coordinator with a real shard, in virtual time."""

from shoal_trainer.contract import JobIdentity, StopAfter
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.protocol import DataSpec, Join, Next
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import Held, ModelSpec, OptimizerConfig, Progress, PushMeta
from tests.unit.trainer.ps.shards import push_to

MODEL = ModelSpec(fingerprint="0" * 64, parameters=4, optimizer=OptimizerConfig(name="delta", batch_size=2))


def next_work(coordinator, slot, incarnation=0, generation=None, *, number=None, **said):
    """What a worker of the current generation gets; by default it has read the answer to its last request."""
    known = coordinator.members.known.get((slot, incarnation))
    return coordinator.next_work(
        Next(
            slot=slot,
            incarnation=incarnation,
            number=number or 1 + (known.request_number if known else 0),
            generation=coordinator.shard.history.generation if generation is None else generation,
            **said,
        )
    )


class Bench:
    """A job of 8 samples in batches of 2, with workers whose calls the test makes."""

    def __init__(
        self, *, stop=None, validation=False, callbacks=False, boot=1, epoch=0, model=MODEL, workers=0
    ):
        self.now, self.model = 0.0, model
        self.shard = ShardStore(0, 1, epoch, boot=boot, clock=lambda: self.now)
        job = JobIdentity(namespace="n", name="j", uid="u")
        self.coordinator = Coordinator(
            job,
            stop or StopAfter(epochs=1),
            2,
            self.shard,
            clock=lambda: self.now,
            wall=lambda: 1000 + self.now,
        )
        self.data = DataSpec(size=8, validation=validation, callbacks=callbacks)
        self.seq = {}
        self.version = 0
        for slot in range(workers):
            self.join(slot)

    def join(self, slot, incarnation=0, data=None, **fields):
        self.shard.workers.connect(slot, incarnation)
        if self.shard.hello(slot, incarnation, self.model, Held()).wants_copy:
            self.shard.offer(slot, incarnation, aligned(4))
        return self.coordinator.join(
            Join(
                slot=slot,
                incarnation=incarnation,
                data=data or self.data,
                batch_size=2,
                node=f"node-{slot}",
                **fields,
            )
        )

    def ask(self, slot, incarnation=0, **said):
        self.coordinator.tick()
        return next_work(self.coordinator, slot, incarnation, **said)

    def push(self, slot, lease, end, incarnation=0, samples=2, loss=0.5, metrics=(), left_out=0):
        self.seq[slot, incarnation] = seq = self.seq.get((slot, incarnation), 0) + 1
        mark = Progress(lease.epoch, lease.number, end - samples, end)
        meta = PushMeta(samples=samples, loss=loss, progress=(mark,), metrics=metrics, left_out=left_out)
        push_to(self.shard, slot, incarnation, seq, self.shard.history.version, meta, aligned(4), delta=True)

    def train(self, slot, incarnation=0, **said):
        """Train until the coordinator assigns something other than data."""
        while (work := self.ask(slot, incarnation, **said)).kind == "data":
            self.finish(slot, work.lease, incarnation)
        return work

    def finish(self, slot, lease, incarnation=0):
        """Push every batch of a lease."""
        for end in range(lease.start + 2, lease.stop + 1, 2):
            self.push(slot, lease, end, incarnation)

    def successor(self, *, boot=2, epoch=1):
        """A restarted parameter server 0, with a snapshot of this moment."""
        new = Bench(boot=boot, epoch=epoch)
        new.shard.restore(self.shard.copy())
        new.coordinator.load(self.coordinator.record.dump())
        return new
