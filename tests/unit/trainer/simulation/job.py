"""The simulated job: its size, and a model whose parameters are counters.

The update of a batch is 1 at each of its samples, so the parameters count how often each sample of each epoch was
applied. Each piece of each shard has these counters, and one per computed step, which shows the steps that only some
shards or pieces contain, and those that a rollback has undone.

Gradients are -1 there, of SGD at the rate 1: then the counters of a step are not 1 but the weight of its push.
"""

from itertools import pairwise

import numpy as np

from shoal_trainer.ps import coding
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard_bounds import GRAIN
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig

SAMPLES, BATCH, EPOCHS = 96, 2, 2
MODEL_FILE = "model/manifest.json"
STEPS_AT = 1024
"""The index of the first step counter in each piece."""
PIECES = 4
"""Per shard."""
PIECE = 2 * GRAIN // PIECES


def lengths(random):
    """Of the files that hold the samples: one is empty, another has one sample."""
    cuts = sorted(random.sample(range(2, SAMPLES), 4))
    parts = [0, 1, *(high - low for low, high in pairwise([1, *cuts, SAMPLES]))]
    random.shuffle(parts)
    return parts


def model(shards, *, gradients=False):
    """The model: two grains for each of so many shards.

    `gradients`: updates are gradients of an optimizer, with its weights.
    """
    parameters = shards * PIECES * PIECE
    return ModelSpec(
        fingerprint="0" * 64,
        parameters=parameters,
        optimizer=OptimizerConfig(name="sgd" if gradients else "delta", learning_rate=1.0, batch_size=BATCH),
    )


def encoded(values):
    """In bf16."""
    result = coding.coded(values.size, values.size, np.uint16)
    coding.encode(np.ascontiguousarray(values), result, values.size)
    return result


def decoded(values):
    """In fp32, of bf16."""
    result = aligned(values.size)
    coding.decode(values, result, values.size)
    return result
