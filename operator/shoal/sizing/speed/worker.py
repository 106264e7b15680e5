"""The step time of one worker: one hierarchical model over all networks and accelerators.

    ln t = ln(a_g + b_g F B / d + c_g N) + r_g ln d + discrepancy

for F FLOPs of a sample, a batch of B samples on d accelerators of kind g, and N tensors. The coefficients of an
accelerator are its data sheet's times what was learned of all accelerators and of this one; the discrepancy is a
Gaussian process with an effect of the network, one of the network on this accelerator, and a smooth part over the
size of the work that grows where nothing was measured. So a new network, a new accelerator and both at once are
answered by the same posterior, and its variance says how sure it is. docs/sizing.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.accelerators import Catalogue, catalogue
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Model

__all__ = ["Configuration", "Observation", "WorkerModel"]

Floats = NDArray[np.float64]

GLOBAL = 5  # ln a, ln b, ln c, the weight of arithmetic, the exponent of overheads
OWN = 4  # of an accelerator: deviations of a, b, c, and the loss of efficiency over several devices


@dataclass(frozen=True)
class Configuration:
    """A worker: a model with `batch` samples in a step on `devices` accelerators of one kind, fed by `cores`."""

    model: Model
    device: str
    batch: float
    devices: int = 1
    cores: float = 0.0


@dataclass(frozen=True)
class Observation:
    """The measured time of a configuration: ln(seconds) and the variance of that mean."""

    configuration: Configuration
    log_seconds: float
    variance: float


class _Table:
    """Configurations as arrays, each (n,)."""

    def __init__(self, rows: Sequence[Configuration], sheets: Catalogue) -> None:
        self.models = [row.model.fingerprint for row in rows]
        found = [sheets.sheet(row.device, row.cores) for row in rows]
        self.devices = [sheet.name for sheet in found]
        self.log_devices = np.log([float(row.devices) for row in rows])
        self.work = np.array([_flops(row.model) * row.batch / row.devices for row in rows])
        self.tensors = np.array([float(row.model.tensors) for row in rows])
        parameters = np.array([float(row.model.parameters) for row in rows])
        self.guessed = np.array([float(row.model.flops is None) for row in rows])
        arithmetic = np.log([sheet.arithmetic_tflops / priors.REFERENCE_TFLOPS for sheet in found])
        memory = np.log([sheet.bandwidth_gbs / priors.REFERENCE_BANDWIDTH for sheet in found])
        self.balance = arithmetic - memory
        self.memory = memory
        self.small = np.where([sheet.is_cpu for sheet in found], 0.0, (arithmetic + memory) / 2)
        cores = np.log(
            [max(row.cores, 1e-3) if sheet.is_cpu else 1.0 for row, sheet in zip(rows, found, strict=True)]
        )
        self.place = np.column_stack(
            [np.log(self.work), np.log(self.tensors), np.log(parameters), cores, self.log_devices]
        )


class WorkerModel:
    """The posterior of a worker's step time, given observations (none: the data sheets' prior)."""

    def __init__(self, observations: Sequence[Observation] = (), sheets: Catalogue | None = None) -> None:
        self._sheets = sheets or catalogue()
        rows = [o.configuration for o in observations]
        self.devices = sorted({self._sheets.sheet(row.device, row.cores).name for row in rows})
        self._at = {name: i for i, name in enumerate(self.devices)}
        self._seen = _Table(rows, self._sheets)
        self._y = np.array([o.log_seconds for o in observations])
        size = GLOBAL + OWN * len(self.devices)
        self._prior = np.zeros(size)
        self._prior[:GLOBAL] = priors.GLOBAL_MEAN
        self._prior[GLOBAL + OWN - 1 :: OWN] = priors.DEVICES_LOSS[0]
        self._spread = np.array([*priors.GLOBAL_SIGMA, *(priors.OWN_SIGMA * len(self.devices))])
        self._theta = self._prior.copy()
        self._root: Floats = np.zeros((0, 0))
        self._covariance = np.diag(self._spread**2)
        if rows:
            noise = np.array([o.variance for o in observations]) + priors.CAMPAIGN**2
            kernel = self._kernel(self._seen, self._seen, same=True) + np.diag(noise)
            self._root = np.asarray(np.linalg.cholesky(kernel), dtype=np.float64)
            self._fit()

    # -- fitting ------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        """Gauss-Newton with damping on the log posterior of the coefficients."""
        precision = 1 / self._spread**2
        theta, damping = self._theta, 1e-3
        loss = self._loss(theta)
        for _ in range(priors.MOST_ITERATIONS):
            mean, jacobian = self._mean(self._seen, theta)
            J = np.linalg.solve(self._root, jacobian)
            r = np.linalg.solve(self._root, self._y - mean)
            H = J.T @ J + np.diag(precision)
            step = np.linalg.solve(
                H + damping * np.diag(np.diag(H)), J.T @ r - precision * (theta - self._prior)
            )
            tried = self._loss(theta + step)
            if tried > loss:
                damping *= 10
                if damping > 1e8:
                    break
                continue
            theta, done = theta + step, loss - tried < 1e-9 * (1 + loss)
            loss, damping = tried, max(damping / 10, 1e-9)
            if done:
                break
        self._theta = theta
        mean, jacobian = self._mean(self._seen, theta)
        self._J = np.linalg.solve(self._root, jacobian)
        self._covariance = np.linalg.inv(self._J.T @ self._J + np.diag(precision))
        self._residual = np.linalg.solve(self._root, self._y - mean)

    def _loss(self, theta: Floats) -> float:
        r = np.linalg.solve(self._root, self._y - self._mean(self._seen, theta)[0])
        return float(r @ r + np.sum(((theta - self._prior) / self._spread) ** 2))

    def _mean(self, table: _Table, theta: Floats) -> tuple[Floats, Floats]:
        """(n,) ln seconds by the form, and its derivatives (n, p)."""
        n = len(table.models)
        a, b, c, weight, overhead = theta[:GLOBAL]
        own = np.zeros((n, OWN))
        own[:, -1] = priors.DEVICES_LOSS[0]
        known = np.array([self._at.get(name, -1) for name in table.devices], dtype=int)
        for i, at in enumerate(known):
            if at >= 0:
                own[i] = theta[GLOBAL + OWN * at : GLOBAL + OWN * (at + 1)]
        parts = np.column_stack(
            [
                a + own[:, 0] - overhead * table.small,
                b + own[:, 1] - table.memory - weight * table.balance + np.log(table.work),
                c + own[:, 2] - overhead * table.small + np.log(table.tensors),
            ]
        )
        top = parts.max(axis=1, keepdims=True) if n else np.zeros((0, 1))
        whole = top + np.log(np.exp(parts - top).sum(axis=1, keepdims=True))
        share = np.exp(parts - whole)
        jacobian = np.zeros((n, len(theta)))
        jacobian[:, :3] = share
        jacobian[:, 3] = -share[:, 1] * table.balance
        jacobian[:, 4] = -(share[:, 0] + share[:, 2]) * table.small
        for i, at in enumerate(known):
            if at >= 0:
                jacobian[i, GLOBAL + OWN * at : GLOBAL + OWN * (at + 1)] = [*share[i], table.log_devices[i]]
        return whole[:, 0] + own[:, 3] * table.log_devices, jacobian

    def _kernel(self, one: _Table, other: _Table, *, same: bool) -> Floats:
        """(n, m) covariance of the discrepancy."""
        model = np.equal.outer(
            np.array(one.models, dtype=object), np.array(other.models, dtype=object)
        ).astype(float)
        device = np.equal.outer(
            np.array(one.devices, dtype=object), np.array(other.devices, dtype=object)
        ).astype(float)
        far = np.zeros(model.shape)
        for column, length in enumerate(priors.LENGTHS):
            far += (np.subtract.outer(one.place[:, column], other.place[:, column]) / length) ** 2
        smooth = np.exp(-far / 2)
        kernel = priors.MODEL**2 * model + priors.SMOOTH**2 * smooth
        kernel += device * (priors.BOTH**2 * model + priors.SMOOTH_OWN**2 * smooth)
        kernel += priors.UNKNOWN_FLOPS**2 * model * np.outer(one.guessed, other.guessed)
        if same:
            kernel += 1e-10 * np.eye(len(one.models))
        return np.asarray(kernel)

    # -- predicting ---------------------------------------------------------------------------------------------

    def predict(self, rows: Sequence[Configuration], *, again: bool = False) -> tuple[Floats, Floats]:
        """(n,) mean and (n,) standard deviation of ln(seconds). `again`: of one more measurement, noise included."""
        table = _Table(rows, self._sheets)
        mean, jacobian = self._mean(table, self._theta)
        prior = np.full(len(rows), priors.MODEL**2 + priors.SMOOTH**2 + priors.BOTH**2 + priors.SMOOTH_OWN**2)
        prior += priors.UNKNOWN_FLOPS**2 * table.guessed
        prior += self._unseen(table, jacobian)
        if len(self._y):
            across = np.linalg.solve(self._root, self._kernel(self._seen, table, same=False))
            mean = mean + across.T @ self._residual
            prior -= (across**2).sum(axis=0)
            jacobian = jacobian - across.T @ self._J
        variance = np.maximum(prior, 1e-8) + np.einsum("ij,jk,ik->i", jacobian, self._covariance, jacobian)
        return mean, np.sqrt(variance + (priors.CAMPAIGN**2 if again else 0.0))

    def _unseen(self, table: _Table, jacobian: Floats) -> Floats:
        """(n,) variance from the deviations of accelerators that were never measured."""
        new = np.array([float(name not in self._at) for name in table.devices])
        share = jacobian[:, :3]
        own = np.array(priors.OWN_SIGMA)
        spread = share**2 @ own[:3] ** 2 + (own[3] * table.log_devices) ** 2
        cpu = np.array([name == "CPU" for name in table.devices])
        return np.asarray(new * np.where(cpu, priors.CPU_FACTOR**2, 1.0) * spread)


def _flops(model: Model) -> float:
    """FLOPs of a sample's forward pass; unknown: two for each parameter and position, a guess of a factor."""
    return model.flops if model.flops is not None else priors.FLOPS_PER_PARAMETER * model.parameters
