"""The termination message of a process, where Kubernetes (or `shoal-trainer run`) reads it."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from shoal_trainer.contract import TerminationMessage

TERMINATION_LOG = "/dev/termination-log"
TERMINATION_LOG_ENV = "SHOAL_TERMINATION_LOG"
MAX_MESSAGE_BYTES = 4000
MAX_TEXT = 1000
"""The bytes of the text that take precedence over metrics."""
ELEMENT = re.compile(r"_\d+$")
"""The end of the name of one value of a metric with several (`val_f1_score_0`)."""

log = logging.getLogger(__name__)


def write_termination(message: TerminationMessage) -> None:
    """Write the message, shortened to what Kubernetes keeps. The model's manifest has it in full."""
    try:
        Path(os.environ.get(TERMINATION_LOG_ENV, TERMINATION_LOG)).write_text(_shortened(message).to_json())
    except OSError as error:
        log.warning("cannot write the termination message: %s", error)


def _shortened(message: TerminationMessage) -> TerminationMessage:
    """The message within `MAX_MESSAGE_BYTES`: with less text, then with fewer metrics, then without text."""
    message = _with_less_text(message, MAX_TEXT)
    # Values of metrics with several go first.
    metrics = dict(sorted(message.metrics.items(), key=lambda item: bool(ELEMENT.search(item[0]))))
    while metrics and _too_long(message):
        metrics.popitem()
        message = message.model_copy(update={"metrics": metrics})
    return _with_less_text(message, 0)


def _with_less_text(message: TerminationMessage, least: int) -> TerminationMessage:
    text = message.message
    while len(text.encode()) > least and _too_long(message):
        text = text[: len(text) * 3 // 4]
        message = message.model_copy(update={"message": text + " …"})
    return message


def _too_long(message: TerminationMessage) -> bool:
    return len(message.to_json().encode()) > MAX_MESSAGE_BYTES
