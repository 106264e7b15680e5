"""Read spotDNN's inputs: a workload (JSON) and a table of instance types (CSV).

docs/simulate.md documents the fields and columns. The same two files feed spotDNN's own formulas and Shoal's model.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.sizing.plan.problem import LossWork, Objective, Pool, Problem, Servers
from shoal.sizing.plan.spotdnn import Network, SpotDnn
from shoal.sizing.types import PsModel

__all__ = ["Workload", "read_pools", "read_workload"]

NAMES = ("type_in_repo", "type", "name", "pool")
SPEEDS = ("img_per_s(instance)", "img_per_s", "samples_per_second")
PRICES = ("spot_price_usd_h", "price_per_hour", "price")
QUOTAS = ("quota", "limit", "nodes")
TYPICAL_STARTUP = 120.0
"""Default seconds from the request of a node to its first step."""
TYPICAL_INTERRUPTIONS = 0.05
"""Default revocations per spot node and hour."""


@dataclass(frozen=True)
class Workload:
    """The content of a workload file."""

    network: Network
    curve: Mapping[str, float]
    batch_range: tuple[float, float] | None
    ps_price: float

    def work(self, target: float) -> LossWork:
        """Train to this loss."""
        return LossWork(target, **self.curve, batch_range=self.batch_range)

    def spotdnn(self, pools: Sequence[Pool], target: float, objective: Objective) -> SpotDnn:
        """The published model."""
        return SpotDnn(tuple(pools), self.network, self.work(target), objective)

    def problem(
        self, pools: Sequence[Pool], target: float, objective: Objective, *, servers: Sequence[int] = (1,)
    ) -> Problem:
        """The problem for Shoal's model: the bandwidth of a parameter server limits its updates."""
        notes = []
        if self.ps_price == 0:
            notes.append("Parameter servers are not priced: give their price per hour to count it.")
        update = 2 * self.network.model_mb / self.network.server
        return Problem(
            pools=tuple(pools),
            work=self.work(target),
            servers=Servers(
                counts=tuple(servers),
                price=self.ps_price,
                model=PsModel(update),
                bytes_per_step=2 * self.network.model_mb * 1e6,
                startup_seconds=min((p.startup_seconds for p in pools), default=0.0),
                snapshot_seconds=3 * self.network.model_mb / 5000,
                measured=1,
            ),
            objective=objective,
            notes=tuple(notes),
        )


def read_workload(path: Path) -> Workload:
    """Read W.json."""
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"cannot read the workload {path} as JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold one JSON object, not a {type(data).__name__}")
    share, loss = _part(data, "P", path), _part(data, "loss", path)
    network = Network(
        model_mb=_field(data, "S_param_MB", path),
        requested=_field(data, "B_req_MBps", path),
        server=_field(data, "B_ps_MBps", path),
        pcie=_field(data, "B_pcie_MBps", path),
        a=_field(share, "alpha1", path),
        b=_field(share, "minus_beta1", path),
    )
    curve = {name: _field(loss, name, path) for name in ("r1", "r2", "r3", "r4")}
    fitted = loss.get("batch_range")
    if fitted is not None and not (
        isinstance(fitted, list)
        and len(fitted) == 2
        and all(isinstance(b, int | float) for b in fitted)
        and 0 < fitted[0] <= fitted[1]
    ):
        raise UsageError(
            f"loss.batch_range in {path} must be [least, most] weighted batch size, not {fitted}"
        )
    price = data.get("ps_price_per_hour", 0.0)
    if not isinstance(price, int | float) or not (math.isfinite(price) and price >= 0):
        raise UsageError(f"ps_price_per_hour in {path} must be a price of 0 or more, not {price}")
    return Workload(network, curve, tuple(fitted) if fitted else None, float(price))


def read_pools(
    path: Path, limits: Sequence[int] | None = None, prices: Sequence[float] | None = None
) -> list[Pool]:
    """Read P.csv; `limits` and `prices`, one for each row, replace its columns."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read the pools in {path} as CSV: {error}") from error
    if not rows:
        raise UsageError(f"{path} has no pools: give a header line and one line for each pool")
    for values, what in ((limits, "limits"), (prices, "prices")):
        if values is not None and len(values) != len(rows):
            raise UsageError(
                f"--{what} has {len(values)} numbers and {path} has {len(rows)} pools: give one for each"
            )
    pools = [
        _pool(
            row,
            f"{path} line {number + 2}",
            None if limits is None else limits[number],
            None if prices is None else prices[number],
        )
        for number, row in enumerate(rows)
    ]
    names = [pool.name for pool in pools]
    return [
        replace(pool, name=f"{pool.name}#{names[:i].count(pool.name) + 1}")
        if names.count(pool.name) > 1
        else pool
        for i, pool in enumerate(pools)
    ]


def _pool(row: dict[str, str | None], where: str, limit: float | None, price: float | None) -> Pool:
    gpus = _cell(row, ("gpus",), where, default=1.0)
    if _find(row, ("batch_per_gpu",)) is not None and _find(row, ("batch_instance",)) is None:
        batch = _cell(row, ("batch_per_gpu",), where) * gpus
    else:
        batch = _cell(row, ("batch_instance", "batch"), where)
    if any(name in row for name in SPEEDS):
        step = batch / _cell(row, SPEEDS, where)
    else:
        step = _cell(row, (SPEEDS[0], "iter_time_s", "step_seconds"), where)
    kind = (_find(row, ("capacity_type",)) or "Spot").strip().lower().replace("-", "").replace("_", "")
    if kind not in ("spot", "ondemand"):
        raise UsageError(f"{where}: capacity_type must be Spot or OnDemand, not {row.get('capacity_type')!r}")
    if not float(batch).is_integer():
        raise UsageError(f"{where}: the batch size must be a whole number, not {batch:g}")
    if limit is None:
        limit = _cell(row, QUOTAS, where, least=0.0, instead="--limits")
    if not float(limit).is_integer():
        raise UsageError(f"{where}: the quota must be a whole number, not {limit:g}")
    if price is None:
        price = _cell(row, PRICES, where, instead="--prices")
    return Pool(
        name=(_find(row, NAMES) or "").strip() or f"pool-{where.rsplit(' ', 1)[1]}",
        limit=int(limit),
        price=price,
        step_seconds=step,
        batch=int(batch),
        spot=kind == "spot",
        zone=(row.get("zone") or "").strip(),
        startup_seconds=_cell(row, ("startup_seconds",), where, default=TYPICAL_STARTUP, least=0.0),
        interruptions_per_hour=_cell(
            row,
            ("interruptions_per_hour",),
            where,
            default=TYPICAL_INTERRUPTIONS if kind == "spot" else 0.0,
            least=0.0,
        ),
        transfer_per_gib=_cell(row, ("transfer_per_gib",), where, default=0.0, least=0.0),
    )


def _find(row: Mapping[str, str | None], names: Sequence[str]) -> str | None:
    return next((value for name in names if (value := row.get(name)) is not None and value.strip()), None)


def _cell(
    row: Mapping[str, str | None],
    names: Sequence[str],
    where: str,
    *,
    default: float | None = None,
    least: float | None = None,
    instead: str = "",
) -> float:
    text = _find(row, names)
    if text is None:
        if default is not None and not any(name in row for name in names):
            return default
        state = "is empty" if any(name in row for name in names) else "is missing"
        or_give = f", or give {instead}" if instead else ""
        raise UsageError(f"{where}: the column {names[0]} {state}: fill it in{or_give}")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    good = math.isfinite(value) and (value > 0 if least is None else value >= least)
    if not good:
        raise UsageError(
            f"{where}: {names[0]} is {text.strip()}; it must be a number "
            f"{'greater than 0' if least is None else f'of {least:g} or more'}"
        )
    return value


def _part(data: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    part = data.get(name)
    if not isinstance(part, dict):
        raise UsageError(f"{path} has no object {name!r}: add it, as described in docs/simulate.md")
    return part


def _field(data: Mapping[str, Any], name: str, path: Path) -> float:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{path}: {name} must be a number, not {value!r}")
    return float(value)
