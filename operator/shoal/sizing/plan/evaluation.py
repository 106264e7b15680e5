"""The interface between the search and the models of time and cost: many combinations in, arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.sizing.availability import Floats
from shoal.sizing.plan.problem import Problem

__all__ = ["Evaluated", "Evaluator", "Model"]


@dataclass(frozen=True)
class Evaluated:
    """Time and cost of m combinations. All arrays are (m,); infinite where a combination is not allowed.

    `sure_seconds` is the time that is met with the requested confidence: it must meet the deadline.
    """

    seconds: Floats
    sure_seconds: Floats
    cost: Floats
    iterations: Floats


class Evaluator(Protocol):
    """A model in which only the numbers of workers are free."""

    @property
    def servers(self) -> int:
        """How many parameter servers."""
        ...

    @property
    def zone(self) -> str:
        """Their zone; empty if it does not matter."""
        ...

    def __call__(self, counts: Floats) -> Evaluated:
        """Evaluate counts (k, m), whole numbers of workers of k pools in m combinations."""
        ...


class Model(Protocol):
    """A model of time and cost: one evaluator for each choice of parameter servers."""

    @property
    def problem(self) -> Problem:
        """What is to be planned; its pools are in the order of the counts."""
        ...

    def evaluators(self) -> Sequence[Evaluator]:
        """One for each choice of parameter servers, fewer servers first."""
        ...
