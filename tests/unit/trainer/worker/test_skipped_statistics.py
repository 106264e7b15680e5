"""A step without a gradient moves the statistics as far as Keras does, and nothing else."""

import numpy as np
import pytest

from shoal_trainer.ps.aligned import aligned
from shoal_trainer.wire.messages import OptimizerConfig, Progress
from shoal_trainer.worker.outage import Outage


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_local_step_without_gradient_skips_the_optimizer(name):
    config = OptimizerConfig(name=name, momentum=0.9 if name == "sgd" else 0.0, batch_size=2)
    outage = Outage(aligned(2), config, 1, 0.1, lambda: 0.0)
    update = aligned(2)
    update[:] = 1.0, 0.01
    outage.step(update, 2, [Progress(0, -1, 0, 2)])
    moved = outage.master.copy()
    update[:] = 0.0, 0.01
    outage.step(update, 2, [Progress(0, -1, 2, 4)], gradient=False)
    assert outage.master[0] == moved[0] != 0  # momentum would have moved it on
    assert outage.master[1] == pytest.approx(0.02)
    assert outage.steps == 2
    assert np.isfinite(outage.master).all()
