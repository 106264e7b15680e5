"""The termination message of a process, where Kubernetes (or `shoal-trainer run`) reads it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from shoal_trainer.contract import TERMINATION_LOG, TerminationMessage

TERMINATION_LOG_ENV = "SHOAL_TERMINATION_LOG"
MAX_MESSAGE_BYTES = 4000

log = logging.getLogger(__name__)


def write_termination(message: TerminationMessage) -> None:
    """Write the message, its text cut to what Kubernetes keeps."""
    text = message.message
    while len(message.to_json().encode()) > MAX_MESSAGE_BYTES and text:
        text = text[: len(text) * 3 // 4]
        message = message.model_copy(update={"message": text + " …"})
    try:
        Path(os.environ.get(TERMINATION_LOG_ENV, TERMINATION_LOG)).write_text(message.to_json())
    except OSError as error:
        log.warning("cannot write the termination message: %s", error)
