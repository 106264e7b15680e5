"""How an error ends a process of a job, whatever its role: what is logged, its termination message, its exit code."""

from __future__ import annotations

import logging
import sys

from shoal_trainer.contract import EXIT_FENCED, EXIT_USER, Outcome, TerminationMessage
from shoal_trainer.errors import Fenced, RunTaken, UserError
from shoal_trainer.termination.termination_log import write_termination

log = logging.getLogger(__name__)


def log_to_stderr() -> None:
    """What the log of a pod has."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


def write_failure(reason: str, message: str) -> None:
    """A termination message of the job's own failure; `reason` is one of the contract's."""
    write_termination(TerminationMessage(outcome=Outcome.FAILED, reason=reason, message=message))


def exit_code(error: UserError | Fenced) -> int:
    """Say why the process ends; returns its exit code."""
    if isinstance(error, Fenced) and not isinstance(error, RunTaken):
        log.error("fenced: %s", error)
        return EXIT_FENCED
    log.error("%s", error)
    write_failure("UserError", str(error))
    return EXIT_USER
