"""`spec.elasticity` of a TrainingJob: who decides how many workers there are, and by which objective."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from shoal.api.base import Strict
from shoal.api.rules import Amount, Confidence, Natural, Positive, rules


class Objective(Strict):
    """What a plan aims at."""

    deadline_seconds: Positive | None = None
    """Finish within this many seconds of the job's start. Suspended time counts. Unset: no deadline."""
    max_cost: Amount | None = None
    """Spend at most this much, in the currency of the CapacityPools' prices, on the nodes of workers and, where
    parameterServers.pools names a pool with a price, of parameter servers. What was spent is their time with a pod of
    the job: not while nodes boot or stand idle, and without transfers. Unset: no limit."""
    confidence: Confidence = 0.95
    """Probability with which the deadline and the budget are to be kept, from 0.5 to 0.999. More of it costs more."""
    prefer: Literal["MinCost", "MinTime"] = "MinCost"
    """Among the plans that keep the deadline and the budget: the cheapest (MinCost) or the fastest (MinTime)."""


class Stabilization(Strict):
    """For how long a change must be planned before it is made: as far as all plans of that time agree to it."""

    up: Natural = 30
    """Seconds during which more workers were planned before workers are added."""
    down: Natural = 300
    """Seconds during which fewer workers were planned before workers are removed."""


class Elasticity(Strict):
    """Who decides how many workers there are."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                # The server checks the default `{}` too, before it fills in the fields.
                "!has(self.objective) || (has(self.mode) && self.mode in ['Advise', 'Auto']) ||"
                " !has(self.objective.deadlineSeconds)",
                "objective is used by mode Advise and Auto only: set mode, or remove deadlineSeconds and maxCost",
            )
        )
        | {
            "anyOf": [  # as the rule; CEL does not see maxCost, which may be in quotes
                {"not": {"required": ["objective"], "properties": {"objective": {"required": ["maxCost"]}}}},
                {"required": ["mode"], "properties": {"mode": {"enum": ["Advise", "Auto"]}}},
            ]
        }
    )

    mode: Literal["Off", "Manual", "Advise", "Auto"] = "Manual"
    """`"Off"` (in quotes: in YAML, Off without them is false) and Manual: `workers.replicas`, which `kubectl scale` and
    autoscalers may change. Advise: the same, and what Shoal would do is in status.plan, in events and in metrics.
    Auto: Shoal chooses, between `workers.minReplicas` and `workers.maxReplicas`, and begins with
    `workers.replicas`."""
    objective: Objective = Objective()
    """What a plan aims at."""
    stabilization_seconds: Stabilization = Stabilization()
    """For how long a change must be planned before mode Auto makes it: as far as all plans of that time agree to it."""
