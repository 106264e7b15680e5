"""One worker and one shard in this thread, so that a trained model can be compared with plain Keras."""

import keras
import numpy as np

from shoal_trainer.data.source import Part
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.coding import coded, decode, values
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import ModelSpec, PushMeta
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.optimizers import place
from shoal_trainer.worker.send import Pile
from tests.unit.trainer.ps.shards import pull_from, push_to
from tests.unit.trainer.worker.models import DATA

BATCHES = list(DATA.read(Part(0, 160), 16))
SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
schedules = keras.optimizers.schedules


def parameters(flat_model):
    """The first parameters of a model, where its step takes them."""
    return flat_model.vector.on_devices(flat_model.vector.alias(flat_model.coded(flat_model.vector.dtype)))


class Server:
    """One shard and one worker without staleness, without a network between them.

    `on_host`: see `FlatModel`; None: as the test's `engine` says.
    """

    def __init__(self, model, wire="fp32", *, on_host=None, example=BATCHES[0]):
        self.flat_model = FlatModel(model, example, wire, on_host=on_host)
        self.flat_model.trace()
        found = self.flat_model.found
        self.placement = place(model, self.flat_model.layout, 16, found.without_gradient, found.whole)
        layout, averages = self.flat_model.layout, self.flat_model.averages
        self.store = ShardStore(0, 1, 0)
        self.store.hello(0, 0, ModelSpec(
            fingerprint=layout.fingerprint, parameters=layout.trainable,
            statistics=layout.size - layout.trainable, averages=averages, optimizer=self.placement.config,
        ))  # fmt: skip
        self.store.offer(0, 0, self.flat_model.initial())
        self.coded = coded(layout.size, layout.trainable, np.uint16 if wire == "bf16" else np.float32)
        self.io = values(self.coded, layout.trainable)
        self.buffer = self.flat_model.coded(self.flat_model.vector.dtype)
        self.tensor = self.flat_model.vector.alias(self.buffer)
        self.version = pull_from(self.store, 0, self.io).version
        self.seq = self.samples = 0

    def take(self):
        """Copy the last answer into the worker's parameters."""
        if self.buffer.dtype == self.coded.dtype:
            self.buffer[:] = self.coded
        else:
            decode(self.coded, self.buffer, self.flat_model.layout.trainable)

    def step(self, batch):
        self.take()
        result = self.flat_model.step(self.tensor, batch, self.samples // 16)
        self.seq += 1
        self.coded[:] = result.update
        rate = None if self.placement.rate is None else self.placement.rate(self.samples)
        meta = PushMeta(batch.samples, learning_rate=rate)
        self.version = push_to(self.store, 0, 0, self.seq, self.version, meta, self.io).version
        self.samples += batch.samples
        return result.loss

    def flat(self):
        out = aligned(self.flat_model.layout.size)
        pull_from(self.store, 0, out)
        return out


def pushed(server, batches):
    """Make several steps and send them as one push."""
    server.take()
    pile = Pile(server.flat_model.mean())
    for batch in batches:
        pile.add(server.flat_model.step(server.tensor, batch), Ready(None, batch))
    push(server, pile)


def push(server, pile):
    server.coded[:] = pile.update()
    server.seq += 1
    server.samples += pile.samples
    meta = PushMeta(pile.samples, len(pile), skipped=pile.skipped)
    server.version = push_to(server.store, 0, 0, server.seq, server.version, meta, server.io).version
