"""The step time of one worker: one hierarchical model over all networks and accelerators.

    ln t = ln(a_g + b_g W (W / N)^-o + c_g N + e B / C) + r_g ln d + discrepancy

for W = F B / d, F FLOPs of a sample, a batch of B samples on d accelerators of kind g, N tensors, and C cores that feed
it; W / N is the work of a kernel, and large ones fill an accelerator better. The coefficients of an accelerator are its
data sheet's times what was learned of all accelerators and of this one; the discrepancy is a Gaussian process with an
effect of the network, one of the network on this accelerator, one of who measured on it, and a smooth part over the
size of the work that grows where nothing was measured. So a new network, a new accelerator and both at once are
answered by the same posterior, and its variance says how sure it is. docs/sizing-model.md has the derivation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from shoal.sizing.accelerators import CPU, Catalogue, catalogue
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Model
from shoal.sizing.speed.posterior import MOST_ROUNDS, Floats, Posterior, looseness, width_factor

__all__ = ["Configuration", "Observation", "WorkerModel"]


GLOBAL = 7  # ln a, ln b, ln c, ln e, weight of arithmetic, logit of the host's part of overheads, occupancy
OWN = 4  # of an accelerator: deviations of a, b, c, and the loss of efficiency over several devices
ANYBODY = "*"


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
        self.models = [row.model.key for row in rows]
        found = [sheets.sheet(row.device, row.cores) for row in rows]
        self.devices = [sheet.name for sheet in found]
        self.owned = np.array([float(bool(row.model.owner)) for row in rows])
        self.owners = [f"{name} of {row.model.owner}" for name, row in zip(self.devices, rows, strict=True)]
        self.log_devices = np.log([float(row.devices) for row in rows])
        self.work = np.array([_flops(row.model) * row.batch / row.devices for row in rows])
        self.tensors = np.array([float(row.model.tensors) for row in rows])
        self.filled = np.log(self.work / self.tensors / priors.REFERENCE_KERNEL)
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
        fed = [
            row.batch / row.cores if row.cores > 0 and not sheet.is_cpu else 0.0
            for row, sheet in zip(rows, found, strict=True)
        ]
        self.feeding = np.log(np.maximum(fed, 1e-300))
        self.place = np.column_stack(
            [np.log(self.work), np.log(self.tensors), np.log(parameters), cores, self.log_devices]
        )


class WorkerModel:
    """The posterior of a worker's step time, given observations (none: the data sheets' prior).

    `work_sigma`: how well the unit of the FLOPs is known, as the standard deviation of ln b.
    """

    def __init__(
        self,
        observations: Sequence[Observation] = (),
        sheets: Catalogue | None = None,
        *,
        work_sigma: float = priors.GLOBAL_SIGMA[1],
    ) -> None:
        self._sheets = sheets or catalogue()
        rows = [o.configuration for o in observations]
        self._usual = _usual_cores(rows, self._sheets)
        self.devices = sorted({self._sheets.sheet(row.device, row.cores).name for row in rows})
        self._at = {name: i for i, name in enumerate(self.devices)}
        self._seen = _Table([self._fed(row) for row in rows], self._sheets)
        size = GLOBAL + OWN * len(self.devices)
        prior = np.zeros(size)
        prior[:GLOBAL] = priors.GLOBAL_MEAN
        prior[GLOBAL + OWN - 1 :: OWN] = priors.DEVICES_LOSS
        spread = np.array([*priors.GLOBAL_SIGMA, *(s for name in self.devices for s in _own_sigma(name))])
        spread[1] = work_sigma
        noise = np.array([o.variance for o in observations]) + priors.CAMPAIGN**2
        seconds = np.array([o.log_seconds for o in observations])
        self._loose: dict[str, float] = {}
        self._factor = 1.0
        models, owners = self._seen.models, self._seen.owners
        number_of = Counter(device for device, _ in set(zip(self._seen.devices, owners, strict=True)))
        shared = {
            owner for device, owner in zip(self._seen.devices, owners, strict=True) if number_of[device] > 1
        }
        if rows:
            mean, jacobian = self._mean(self._seen, prior)
            own = np.diag(self._kernel(self._seen, self._seen))
            variances = ((jacobian * spread) ** 2).sum(axis=1) + own + noise
            self._loose = self._odd(models, seconds - mean, variances, priors.MODEL)
        for number in range(MOST_ROUNDS):
            kernel = self._kernel(self._seen, self._seen) + np.diag(noise + 1e-10)
            self._posterior = Posterior(
                lambda theta: self._mean(self._seen, theta), seconds, kernel, prior, spread
            )
            if not rows:
                break
            errors, sigmas = self._posterior.held_out(models)
            self._factor = width_factor(errors / sigmas, models)
            found = self._odd(models, errors, sigmas**2 - self._extra(models, priors.MODEL), priors.MODEL)
            if shared:
                errors, sigmas = self._posterior.held_out(owners)
                variances = sigmas**2 - self._extra(owners, priors.OWNER)
                odd = self._odd(owners, errors, variances, priors.OWNER)
                found |= {name: factor for name, factor in odd.items() if name in shared}
            if number:
                # The first fit may clear what only the data sheets did not explain; later ones clear nobody.
                found = self._loose | found
            if found.keys() == self._loose.keys() or number == MOST_ROUNDS - 1:
                break
            self._loose = found

    @staticmethod
    def _odd(names: Sequence[str], errors: Floats, variances: Floats, usual: float) -> dict[str, float]:
        """The models (or owners) that are one of a kind, and how loose, from the errors of predictions without them.

        `variances`: those of the errors if none were one of a kind. `usual`: the effect of one that is not.
        """
        groups = np.array(names, dtype=object)
        found = {
            name: looseness(errors[groups == name], variances[groups == name], usual)
            for name in dict.fromkeys(names)
        }
        return {name: factor for name, factor in found.items() if factor > 1}

    def _looseness(self, names: Sequence[str]) -> Floats:
        """(n,) how many times larger than usual the effects of models, or owners, are."""
        return np.array([self._loose.get(name, 1.0) for name in names])

    def _extra(self, names: Sequence[str], usual: float) -> Floats:
        """(n,) the variance that those have more that are one of a kind."""
        return np.asarray(usual**2 * (self._looseness(names) ** 2 - 1))

    def _owner(self, table: _Table) -> Floats:
        """(n,) the effect of who measured on an accelerator; without a namespace there is none."""
        return np.asarray(priors.OWNER * self._looseness(table.owners) * table.owned)

    def _mean(self, table: _Table, theta: Floats) -> tuple[Floats, Floats]:
        """(n,) ln seconds by the form, and its derivatives (n, p)."""
        n = len(table.models)
        a, b, c, e, weight, host, occupancy = theta[:GLOBAL]
        # The host launches kernels as fast for any accelerator; the rest of an overhead is the accelerator's.
        part = 1 / (1 + np.exp(-np.clip(host, -30.0, 30.0)))
        slower = part + (1 - part) * np.exp(-table.small)
        overhead = np.log(slower)
        work = np.log(table.work) - occupancy * table.filled
        own = np.zeros((n, OWN))
        own[:, -1] = priors.DEVICES_LOSS
        known = np.array([self._at.get(name, -1) for name in table.devices], dtype=int)
        for i, at in enumerate(known):
            if at >= 0:
                own[i] = theta[GLOBAL + OWN * at : GLOBAL + OWN * (at + 1)]
        parts = np.column_stack(
            [
                a + own[:, 0] + overhead,
                b + own[:, 1] - table.memory - weight * table.balance + work,
                c + own[:, 2] + overhead + np.log(table.tensors),
                e + table.feeding,
            ]
        )
        top = parts.max(axis=1, keepdims=True) if n else np.zeros((0, 1))
        whole = top + np.log(np.exp(parts - top).sum(axis=1, keepdims=True))
        share = np.exp(parts - whole)
        jacobian = np.zeros((n, len(theta)))
        jacobian[:, :4] = share
        jacobian[:, 4] = -share[:, 1] * table.balance
        jacobian[:, 5] = (share[:, 0] + share[:, 2]) * part * (1 - part) * (1 - np.exp(-table.small)) / slower
        jacobian[:, 6] = -share[:, 1] * table.filled
        for i, at in enumerate(known):
            if at >= 0:
                jacobian[i, GLOBAL + OWN * at : GLOBAL + OWN * (at + 1)] = [
                    *share[i, :3],
                    table.log_devices[i],
                ]
        return whole[:, 0] + own[:, 3] * table.log_devices, jacobian

    def _kernel(self, one: _Table, other: _Table) -> Floats:
        """(n, m) covariance of the discrepancy."""
        model, device = _equal(one.models, other.models), _equal(one.devices, other.devices)
        far = np.zeros(model.shape)
        for column, length in enumerate(priors.LENGTHS):
            far += (np.subtract.outer(one.place[:, column], other.place[:, column]) / length) ** 2
        smooth = np.exp(-far / 2)
        loose = np.outer(self._looseness(one.models), self._looseness(other.models))
        kernel = priors.MODEL**2 * loose * model + priors.SMOOTH**2 * smooth
        kernel += device * (priors.BOTH**2 * model + priors.SMOOTH_OWN**2 * smooth)
        kernel += np.outer(self._owner(one), self._owner(other)) * _equal(one.owners, other.owners)
        kernel += priors.UNKNOWN_FLOPS**2 * model * np.outer(one.guessed, other.guessed)
        return np.asarray(kernel)

    def predict(self, rows: Sequence[Configuration], *, again: bool = False) -> tuple[Floats, Floats]:
        """(n,) mean and (n,) standard deviation of ln(seconds). `again`: of one more measurement, noise included.

        Where the cores are not known, they are as many for each accelerator as where this model was measured on it, or
        else others were, first of its owner: a step that waits for its input would be predicted to wait for nothing.
        """
        table = _Table([self._fed(row) for row in rows], self._sheets)
        mean, jacobian = self._mean(table, self._posterior.theta)
        variance = priors.SMOOTH**2 + priors.BOTH**2 + priors.SMOOTH_OWN**2 + self._owner(table) ** 2
        variance = variance + (priors.MODEL * self._looseness(table.models)) ** 2
        variance = variance + priors.UNKNOWN_FLOPS**2 * table.guessed
        unseen = self._unseen(table, jacobian)
        cross = self._kernel(self._seen, table)
        mean, variance, form = self._posterior.predict(mean, jacobian, cross, variance)
        # What was made of errors on measured accelerators says nothing of the transfer to others.
        variance = self._factor**2 * (variance + (priors.CAMPAIGN**2 if again else 0.0))
        return mean, np.sqrt(variance + form + unseen)

    def _fed(self, row: Configuration) -> Configuration:
        """With the usual cores, if its own are not known; as it is, where nobody's are.

        Of a model that was measured there without its cores, what was measured holds its input, with whatever cores.
        """
        sheet = self._sheets.sheet(row.device, row.cores)
        whose = row.model.key, row.model.owner, ANYBODY
        usual = next(
            (self._usual[who, sheet.name] for who in whose if (who, sheet.name) in self._usual), None
        )
        if sheet.is_cpu or usual is None or (row.cores > 0 and usual > 0):
            return row
        return replace(row, cores=usual * row.devices)

    def _unseen(self, table: _Table, jacobian: Floats) -> Floats:
        """(n,) variance from the deviations of accelerators that were never measured."""
        new = np.array([float(name not in self._at) for name in table.devices])
        own = np.array([_own_sigma(name) for name in table.devices]).reshape(-1, OWN)
        terms = np.column_stack([jacobian[:, :3], table.log_devices])
        return np.asarray(new * ((terms * own) ** 2).sum(axis=1))


def _usual_cores(rows: Sequence[Configuration], sheets: Catalogue) -> dict[tuple[str, str], float]:
    """The usual cores of an accelerator, by whose they are (a model's, its owner's, anybody's) and its name.

    Of owners as of models it is the median of their medians: whoever reports many rows decides nothing for others.
    0: of a model that was measured there, none are known.
    """
    known, models, owners = (defaultdict[tuple[str, str], list[float]](list) for _ in range(3))
    of = {row.model.key: row.model.owner for row in rows}
    for row in rows:
        name = sheets.sheet(row.device, row.cores).name
        known[row.model.key, name] += [row.cores / row.devices] if row.cores > 0 else []
    for (key, name), cores in known.items():
        if cores:
            models[of[key], name].append(median(cores))
    for (_, name), cores in models.items():
        owners[ANYBODY, name].append(median(cores))
    return {key: median(cores) if cores else 0.0 for key, cores in (known | models | owners).items()}


def _own_sigma(device: str) -> tuple[float, ...]:
    """The standard deviations of an accelerator's own coefficients."""
    factor = priors.CPU_FACTOR if device == CPU else 1.0
    return tuple(factor * sigma for sigma in priors.OWN_SIGMA)


def _equal(one: Sequence[str], other: Sequence[str]) -> Floats:
    """(n, m) 1 where two names are equal."""
    same = np.equal.outer(np.array(one, dtype=object), np.array(other, dtype=object))
    return np.asarray(same, dtype=np.float64)


def _flops(model: Model) -> float:
    """FLOPs of a sample's forward pass; unknown: two for each parameter and position, a guess of a factor."""
    return model.flops if model.flops is not None else priors.FLOPS_PER_PARAMETER * model.parameters
