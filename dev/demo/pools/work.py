"""How much the jobs of the story have to do: so much that they last as long on a fast machine as on a slow one.

The first job is taken its pool when a sixth of the work is done: on a fast machine before its speed could be measured,
and without any need of on-demand machines afterwards, if it had as much to do as on a slow one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dev.commands import command
from dev.paths import ROOT

EXAMPLE = ROOT / "examples" / "digits"
FIRST_SECONDS = 90.0
"""What the machines that the first job begins with would take for its steps alone. What is beside them, the start and
the time without machines come to that."""
SECOND_SECONDS = 45.0
FEWEST_EPOCHS = 10


def measured() -> tuple[float, int]:
    """Samples of the example that a core trains in a second here, and those of an epoch; takes ten seconds.

    Raises:
        DevError: the example does not run.
    """
    path = os.pathsep.join([str(EXAMPLE), str(ROOT / "trainer_image"), os.environ.get("PYTHONPATH", "")])
    script = str(Path(__file__).with_name("rate.py"))
    rate, samples = command(sys.executable, script, env={**os.environ, "PYTHONPATH": path}).split()[-2:]
    return float(rate), int(samples)


def epochs(seconds: float, rate: float, samples: int) -> int:
    """Epochs of `samples` that take so long at `rate` samples a second; where these are not known, the fewest."""
    return max(FEWEST_EPOCHS, round(seconds * rate / samples)) if samples else FEWEST_EPOCHS
