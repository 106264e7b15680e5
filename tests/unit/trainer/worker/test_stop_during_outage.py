"""A worker that learns after an outage that training has ended."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np

from shoal_trainer.data.batch import Batch
from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.wire.messages import Journal, OptimizerConfig, Pulled, ShardWelcome, Welcome
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.flat_model import Step
from shoal_trainer.worker.leases import Leases
from shoal_trainer.worker.loop import Loop, Policy
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.work import DataWork

SIZE, TERM = 4, 111
PULLED = Pulled((5,), ({},), 0, 1, (0,), journals=(Journal(),))
MODEL = SimpleNamespace(
    layout=SimpleNamespace(size=SIZE, trainable=SIZE), dtype=np.float32, alias=lambda flat: flat
)


class Unanswered:
    """The server is lost again before it answers a pull."""

    def pull(self, *_arguments, **_options):
        future = Future()
        future.set_exception(Unreachable("lost again"))
        return future

    def connect(self, _copy):
        return Future()


def test_lease_of_dropped_local_steps_is_not_presented_to_a_successor():
    """A successor that knows of no stop would grant it again, and the dropped samples would never be pushed."""
    leases = Leases()
    loop = Loop(
        MODEL, Placement(OptimizerConfig()), Unanswered(), None, None, leases, None, threading.Event(), Policy(),
        clock=lambda: 0.0,
    )  # fmt: skip
    loop._use(PULLED)
    loop._boots = ((0, TERM),)
    work = DataWork((TERM, 1), 0, 0, 8)
    leases.grant(work)
    loop._begin_outage(Unreachable("lost"), None)
    batch = Batch(np.arange(2), None, np.ones(2, np.float32), 2, 4)
    loop._local_step(Step(aligned(SIZE), 0.1, finite=True), Ready(work, batch))
    welcome = ShardWelcome(index=0, epoch=0, boot=TERM, version=5, initialized=True, stopped=TERM)
    loop._end_outage(Welcome((welcome,)))
    assert leases.held() == {}
