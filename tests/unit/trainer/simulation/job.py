"""The simulated job: its size, and a model whose parameters count.

The "gradient" of a batch is 1 at each of its samples, so the parameters say how often each sample of each pass was
applied. With several shards, each shard has such counters, and one more for each step that a worker computed: they say
which steps are in some of the shards only.
"""

from shoal_trainer.ps.layout import GRAIN
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig

SAMPLES, BATCH, PASSES = 96, 2, 2
MODEL_FILE = "model/manifest.json"
STEPS_AT = 1024
"""Where the step counters begin in each shard."""


def model(shards):
    """The counters; with several shards, one part of the size that `bounds` makes for each."""
    parameters = SAMPLES * PASSES if shards == 1 else shards * GRAIN
    return ModelSpec(
        fingerprint="0" * 64,
        parameters=parameters,
        optimizer=OptimizerConfig(name="delta", batch_size=BATCH),
    )
