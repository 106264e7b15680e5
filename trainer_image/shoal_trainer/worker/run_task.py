"""Runs a task and sends its result, with retries during outages; drops the result of a reassigned task."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from shoal_trainer import retry
from shoal_trainer.errors import Interrupted, Overtaken, ProtocolError, Unauthorized, Unreachable, UserError
from shoal_trainer.retry import FIRST_PAUSE, Backoff
from shoal_trainer.worker.coordination import ControlPlane
from shoal_trainer.worker.tasks import Outcome
from shoal_trainer.worker.work import SLOW_WORK_SECONDS, TaskWork, waiting_for

log = logging.getLogger(__name__)

LONGEST_PAUSE = 4.0
"""Between two attempts to compute a result, which may each read much data before the unreachable part."""
LONGEST_SEND_PAUSE = 1.0
"""Between two attempts to send it; or as long as the last attempt took, so that a large file does not fill the link."""


def run_task(
    work: TaskWork,
    run: Callable[[], Outcome],
    coordinator: ControlPlane,
    drain: threading.Event,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return once the coordinator has the result, the task is reassigned, the job has finished or `drain` is set.

    The heartbeats report a task that takes long, and data or storage that is unreachable. Raises `UserError` if the
    coordinator rejects the result, because a retry cannot succeed.
    """
    waiting = waiting_for(f"the task {work.kind} of epoch {work.epoch + 1}", slow=SLOW_WORK_SECONDS)
    coordinator.set_message(waiting)
    outcome, backoff = None, Backoff(FIRST_PAUSE, LONGEST_PAUSE)
    try:
        while not (drain.is_set() or coordinator.finished()):
            began = clock()
            try:
                if outcome is None:
                    outcome, backoff = run(), Backoff(FIRST_PAUSE, LONGEST_SEND_PAUSE)
                    coordinator.set_message(waiting)
                    _warn_of_non_finite(work, outcome)
                    began = clock()
                coordinator.task_done(
                    work,
                    outcome.metrics,
                    outcome.files,
                    stop=outcome.stop,
                    message=outcome.message,
                    learning_rate=outcome.learning_rate,
                )
                return
            except Unreachable as error:
                if backoff.is_new(error):
                    log.warning("%s: %s; retrying", work.kind, error)
                coordinator.set_message(f"{work.kind}: {error}")
                if outcome is not None:
                    backoff.longest = max(LONGEST_SEND_PAUSE, min(clock() - began, retry.LONGEST_PAUSE))
                backoff.wait(drain)
    except Interrupted:
        return
    except Overtaken as error:
        log.warning("the task %s was reassigned: %s", work.kind, error)
    except Unauthorized:  # a ProtocolError, but not the fault of the result
        raise
    except ProtocolError as error:
        raise UserError(f"The coordinator rejected the result of the task {work.kind!r}: {error}") from error
    finally:
        coordinator.set_message("")


def _warn_of_non_finite(work: TaskWork, outcome: Outcome) -> None:
    if names := sorted(name for name, value in outcome.metrics.items() if not math.isfinite(value)):
        log.warning("%s of epoch %d is not finite and is left out", ", ".join(names), work.epoch + 1)
