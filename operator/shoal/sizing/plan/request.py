"""The PlanRequest: what the planner is asked for, and the API group of the planner's files.

The planner reads a TrainingJob as the cluster stores it. What no TrainingJob has (a deadline, a budget, the pools to
choose from) is in a PlanRequest. PlanRequests, CapacityPools and SpeedProfiles are files for the command line, so their
group is not the group of the CRDs.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal.api.base import Strict
from shoal.api.rules import DECIMAL

__all__ = ["PLANNER_API", "PlanRequest"]

PLANNER_API = "plan.shoal.dev/v1alpha1"


class RequestedObjective(Strict):
    """The limits of time and cost, and what to minimize."""

    deadline_seconds: int | None = Field(None, ge=1)
    """Seconds from the start of the job, or from now if it has not started."""
    max_cost: str | None = Field(None, pattern=DECIMAL)
    """The budget, a decimal in quotes."""
    prefer: Literal["MinCost", "MinTime"] = "MinCost"
    """MinCost: the cheapest plan within the limits. MinTime: the fastest."""


class RequestedWorkers(Strict):
    """Where the workers may run."""

    pools: tuple[str, ...] = ()
    """CapacityPools to choose from. Empty: every pool with an accelerator."""
    zone_policy: Literal["Same", "Preferred", "Any"] = "Same"
    """Same: only in the zone of the parameter servers."""
    on_demand_base: int = Field(0, ge=0)
    """The least number of on-demand workers."""


class RequestedServers(Strict):
    """Where the parameter servers may run."""

    pools: tuple[str, ...] = ()
    """The first one is used. Empty: the cheapest on-demand pool without an accelerator."""


class PlanRequest(Strict):
    """What to plan a TrainingJob for."""

    api_version: str = PLANNER_API
    kind: Literal["PlanRequest"] = "PlanRequest"
    objective: RequestedObjective = RequestedObjective()
    workers: RequestedWorkers = RequestedWorkers()
    parameter_servers: RequestedServers = RequestedServers()
