"""What is known of the job's model beside its parameters. One worker is asked to count its FLOPs, in the background."""

from __future__ import annotations

import math

from shoal_trainer.contract import MOST_FLOPS, ModelReport
from shoal_trainer.wire.messages import ModelSpec

ASK_AGAIN_SECONDS = 300.0
"""A worker that was asked may have been lost."""


class ModelFacts:
    """Set by the joins and heartbeats of the workers."""

    def __init__(self) -> None:
        self.tensors, self.precision = 0, ""
        self._flops: float | None = None
        self._ask_at = -math.inf

    def wants_flops(self, now: float) -> bool:
        """Whether to ask the worker that makes contact now; it then counts as asked."""
        if self._flops is not None or now < self._ask_at:
            return False
        self._ask_at = now + ASK_AGAIN_SECONDS
        return True

    def counted(self, flops: float) -> None:
        """A worker has counted; 0: they cannot be counted."""
        self._flops = flops if 0 < flops <= MOST_FLOPS else 0.0

    def report(self, spec: ModelSpec) -> ModelReport:
        """Its entry in the status report."""
        return ModelReport(
            fingerprint=spec.fingerprint,
            parameters=spec.parameters,
            tensors=self.tensors,
            flops_per_sample=self._flops,
            precision=self.precision,
        )
