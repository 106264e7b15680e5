"""What comes out when a job ends: the termination message of its pods."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shoal_trainer.contract.figures import Count, Figure, Metrics
from shoal_trainer.contract.message import Message
from shoal_trainer.contract.status import DataReport


class Outcome(StrEnum):
    """How a job ended."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


FAILURE_REASONS = frozenset({
    "UserError", "InternalError", "NoAccelerator", "FaultyDevice", "OutOfMemory", "DiskFull", "CallbackOutage",
    "HungStep",
})  # fmt: skip
"""The reasons of failures. A reader treats any other reason as part of the message."""


class Ranges(Message):
    """The number of ranges that were trained once, more than once, on some shards only, and never."""

    once: Count = 0
    repeated: Count = 0
    partial: Count = 0
    never: Count = 0


class TerminationMessage(Message):
    """The termination message with which PS 0 ends the job when it exits 0.

    Kubernetes keeps at most 4,096 bytes of it. For an error in the user's code, a worker writes one with
    `outcome=Failed` and exits `EXIT_USER`; the operator copies `reason` and `message` to `status.lastFailure`.
    """

    outcome: Outcome
    reason: str = ""
    message: str = ""
    model_uri: str | None = None
    model_digest: str | None = None
    """SHA-256 of the manifest of `model/`."""
    step: Count = 0
    epoch: Count = 0
    samples: Count = 0
    loss: Figure = None
    metrics: Metrics = Field(default_factory=dict)
    wasted_steps: Count = 0
    data: DataReport = DataReport()
    ranges: Ranges = Ranges()
