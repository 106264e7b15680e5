"""A task is done once and its result given back, after an outage again; what is somebody else's by now is left."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

from shoal_trainer.errors import Overtaken, ProtocolError, Unauthorized, Unreachable, UserError
from shoal_trainer.worker.tasks import Outcome
from shoal_trainer.worker.work import Coordinator, TaskWork

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.25
LONGEST_PAUSE = 4.0
"""Between two tries to make a result: each may read far before it finds the data away again."""


def run_task(
    work: TaskWork, make: Callable[[], Outcome], coordinator: Coordinator, drain: threading.Event
) -> None:
    """Return when the coordinator has the result, or another worker the task, the job has finished or `drain` is set.

    What `make` cannot reach is told with the heartbeats. Raises `UserError` where the coordinator will never take what
    `make` made: it would wait for it for ever.
    """
    waiting, made, pause = False, None, RETRY_SECONDS
    while not (drain.is_set() or coordinator.finished()):
        try:
            if made is None:
                made = make()
                if waiting:
                    coordinator.say("")
                if odd := sorted(name for name, value in made.metrics.items() if not math.isfinite(value)):
                    log.warning("%s of pass %d is not finite: left out", ", ".join(odd), work.epoch + 1)
            coordinator.task_done(work, made.metrics, made.files, stop=made.stop, message=made.message)
        except Unreachable as error:
            if not waiting:
                log.warning("%s: %s; trying again until it answers", work.kind, error)
            waiting = True
            if made is not None:
                drain.wait(RETRY_SECONDS)
                continue
            coordinator.say(f"{work.kind}: {error}")
            drain.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        except Overtaken as error:
            log.warning("%s is no longer ours: %s", work.kind, error)
            return
        except Unauthorized:  # nothing is wrong with the result
            raise
        except ProtocolError as error:
            raise UserError(f"What the task {work.kind!r} made cannot be taken: {error}") from error
        else:
            return
