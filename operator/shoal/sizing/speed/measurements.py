"""What was measured: step times of models on accelerators, and the work of parameter servers. One table for all.

The rows are those of SpeedProfile.status. Times are kept as mean and variance of their logarithm, since step times
differ by factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from shoal.errors import UsageError
from shoal.sizing.accelerators import CPU

__all__ = [
    "Basis",
    "Evaluation",
    "Kind",
    "LeftOut",
    "LogMean",
    "Model",
    "Profile",
    "Row",
    "ServerLoad",
    "of_an_update",
]

LEAST_SECONDS, MOST_SECONDS = 1e-7, 1e7
"""No time beyond these was measured: the clock, and a third of a year for one step."""
MOST_COUNT = 1e18
LEAST_CORES = 1e-3
ALIKE_FLOPS = 0.05
"""FLOPs that differ by less are those of one size: more make a step longer than it differs from day to day."""


class Basis(StrEnum):
    """What the speed of a worker rests on; all but the first are predictions."""

    MEASURED = "measured"
    OTHER_BATCHES = "other batch sizes of the model on this accelerator"
    OTHER_SIZES = "other input sizes of the model on this accelerator"
    OTHER_ACCELERATORS = "the model on other accelerators"
    OTHER_MODELS = "other models"
    DATA_SHEETS = "data sheets"


@dataclass(frozen=True)
class LogMean:
    """Mean and variance of ln(seconds), how many times were measured, and their plain mean; None: not known."""

    mean_log: float
    variance_log: float = 0.0
    count: float = 1.0
    mean: float | None = None

    def __post_init__(self) -> None:
        mean = math.exp(min(self.mean_log, 50.0)) if self.mean is None else self.mean
        for name, value in (("median", math.exp(min(self.mean_log, 50.0))), ("mean", mean)):
            if not LEAST_SECONDS <= value <= MOST_SECONDS:
                raise UsageError(
                    f"the {name} of a measured time is {value:g} s: give one between "
                    f"{LEAST_SECONDS:g} and {MOST_SECONDS:g} s"
                )
        if not (0 <= self.variance_log <= 1e4 and 0 < self.count <= MOST_COUNT):
            raise UsageError(
                f"a measured time needs a variance >= 0 and a count > 0, not {self.variance_log} and {self.count}"
            )

    @classmethod
    def of(cls, seconds: float, spread: float = 0.0, count: float = 1.0) -> LogMean:
        """From a mean time and its standard deviation, both in s."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"a measured time must be a number of seconds greater than 0, not {seconds:g}")
        if not 0 <= spread <= seconds:
            raise UsageError(
                f"the spread of a time of {seconds:g} s must be between 0 and that time, not {spread:g}: both are "
                "in seconds"
            )
        variance = math.log1p((spread / seconds) ** 2)
        return cls(math.log(seconds) - variance / 2, variance, count, seconds)

    @property
    def seconds(self) -> float:
        """The mean time in s: what many of them take together. Without it, that of a lognormal distribution."""
        return self._lognormal if self.mean is None else self.mean

    @property
    def _lognormal(self) -> float:
        return math.exp(self.mean_log + min(self.variance_log, 4.0) / 2)

    def doubt(self, weight: float = 1.0) -> float:
        """The variance of ln(seconds), where what was measured has this weight."""
        return self.variance_log / max(self.count * weight, 1e-3) + self.stalled(weight)

    def stalled(self, weight: float = 1.0) -> float:
        """What of `doubt` is for stalls: a single one tells nearly nothing of how often one comes.

        A mean beyond that of a lognormal distribution is of few long steps. How many, mean and variance say together.
        """
        long = 1 - self._lognormal / self.seconds
        if long < 0.01:
            return 0.0
        longer = max(math.log(self.seconds * long * self.count) - self.mean_log, 1.0)
        stalls = max(min(self.variance_log / longer**2, 1.0) * self.count, 1.0)
        return long**2 / (stalls * max(weight, 1e-3))


class Kind(NamedTuple):
    """What the work of a step is: measurements of alike kinds count together, and those of others are told from them.

    A fingerprint alone does not say it. Variables have the same shapes at each size of an image or length of a text,
    and with mixed precision.
    """

    fingerprint: str = ""
    flops: float | None = None
    """Of one sample's forward pass; None or 0: not known."""
    precision: str = ""

    def alike(self, other: Kind) -> bool:
        """Whether nothing that is known of both differs: an earlier version stores no precision, and may lack FLOPs."""
        return (
            (self.fingerprint == other.fingerprint or not (self.fingerprint and other.fingerprint))
            and (self.precision == other.precision or not (self.precision and other.precision))
            and not (self.flops and other.flops and abs(self.sizes - other.sizes) >= 1)
        )

    @property
    def sizes(self) -> float:
        """The logarithm of the FLOPs, in those by which the kinds of one model differ."""
        return math.log(self.flops) / math.log1p(ALIKE_FLOPS) if self.flops else 0.0


@dataclass(frozen=True)
class Model:
    """What determines a model's speed. `flops`: of one sample's forward pass, two for each multiply-add.

    `owner`: who measures it, a namespace. What another one says of the same model is told from it: only what is common
    to accelerators goes from one to the other. `precision`: as its jobs report it; "": not known.
    """

    fingerprint: str
    flops: float | None
    parameters: int
    tensors: int
    owner: str = ""
    precision: str = ""

    def __post_init__(self) -> None:
        if self.flops is not None and not 0 < self.flops <= 1e20:
            raise UsageError(
                f"flopsPerSample of {self.fingerprint} must be a number above 0 and at most 1e20, not {self.flops}"
            )
        if not (1 <= self.parameters <= 10**15 and 1 <= self.tensors <= 10**9):
            raise UsageError(f"the model {self.fingerprint} needs at least 1 parameter and 1 tensor")

    @property
    def kind(self) -> Kind:
        """Of what its measurements are."""
        return Kind(self.fingerprint, self.flops, self.precision)

    @property
    def key(self) -> str:
        """The network of this owner, which has effects of its own whatever the size of its input."""
        return f"{self.owner}/{self.fingerprint}{self.precision and f'/{self.precision}'}"


@dataclass(frozen=True)
class Row:
    """The times of one configuration; `workers` and `parameter_servers` were active meanwhile.

    `compute` is a worker's compute and input; `pull` and `push` its exchange, which overlaps with it. `step` is the
    whole step, with the waits for other workers. A row weighs half after each half-life of its `age`.
    """

    device: str
    devices: int = 1
    cores: float = 0.0
    batch_size: int = 1
    workers: int = 1
    parameter_servers: int = 1
    compute: LogMean | None = None
    pull: LogMean | None = None
    push: LogMean | None = None
    step: LogMean | None = None
    age_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if not least <= value <= most:
                raise UsageError(
                    f"{name} of a measured row must be between {least:g} and {most:g}, not {value}"
                )
        if 0 < self.cores < LEAST_CORES:
            raise UsageError(f"a worker was measured on {self.cores:g} cores: give at least {LEAST_CORES:g}")
        _ = self.alone  # its parts together are a time, too

    @property
    def alone(self) -> LogMean | None:
        """The time of a worker alone: compute and input, at any number of workers; or the step of a single one.

        How long its exchange takes, which may be longer, one row does not say (`exchange.py`).
        On a CPU the exchange takes its time from the same cores as the compute: beside it or not, it makes it longer.
        So the step is no longer than all parts in turn, and no longer than it was, with waits for others and all.
        """
        if self.compute is not None and self.device == CPU and self.pull and self.push:
            whole = sum(part.seconds for part in (self.compute, self.pull, self.push))
            whole = min(whole, self.step.seconds) if self.step else whole
            more = math.log(whole / self.compute.seconds)
            return replace(self.compute, mean_log=self.compute.mean_log + more, mean=whole)
        if self.compute is not None:
            return self.compute
        return self.step if self.workers == 1 else None

    @property
    def exchange_seconds(self) -> float | None:
        """Seconds of a pull and a push together, if both were measured."""
        return self.pull.seconds + self.push.seconds if self.pull and self.push else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step: measured, or the longer of compute and exchange, which overlap."""
        if self.step is not None:
            return self.step.seconds
        if self.compute is None:
            return None
        return max(self.compute.seconds, self.exchange_seconds or 0.0)


_RANGES = (
    ("devices", 1, 1024),
    ("cores", 0, 1e6),
    ("batch_size", 1, 10**9),
    ("workers", 1, 10**6),
    ("parameter_servers", 1, 10**6),
    ("age_seconds", 0, 1e12),
)


@dataclass(frozen=True)
class ServerLoad:
    """The work of all shards together: seconds busy, updates applied (one a shard and push), bytes received.

    `batches_per_update`: see `of_an_update`; 0: nobody told.
    """

    busy_seconds: float
    updates: float
    bytes: float = 0.0
    batches_per_update: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.updates <= MOST_COUNT and 0 <= self.bytes <= MOST_COUNT):
            raise UsageError(f"servers that were measured applied updates, not {self.updates}")
        if self.busy_seconds and not LEAST_SECONDS <= self.busy_seconds / self.updates <= MOST_SECONDS:
            raise UsageError(
                f"an update keeps a server busy for a time, not {self.busy_seconds} s / {self.updates}"
            )
        if not (self.batches_per_update == 0 or 1 <= self.batches_per_update <= MOST_COUNT):
            raise UsageError(f"an update is of one batch or more, not {self.batches_per_update}")


def of_an_update(known: Iterable[tuple[float, float]]) -> float:
    """The batches of one update, by numbers of updates and how many batches each is of; 0: nobody told.

    How many they are is in the code of a job, and jobs of one model differ. It is their harmonic mean, as the parts of
    steps are means over updates of what each takes for a batch. Who does not tell has as many as who does.
    """
    told = [
        (n, k) for n, k in known if k > 0 and n / k > 0
    ]  # what a hostile status says may be as good as none
    return max(sum(n for n, _ in told) / sum(n / k for n, k in told), 1.0) if told else 0.0


@dataclass(frozen=True)
class Profile:
    """One model and everything measured of it. `server_load` by the number of parameter servers."""

    model: Model
    rows: tuple[Row, ...] = ()
    server_load: Mapping[int, ServerLoad] = field(default_factory=dict)


@dataclass(frozen=True)
class LeftOut:
    """A profile without which the predictor is made, and the fault that it brings with it."""

    profile: Profile
    fault: str


@dataclass(frozen=True)
class Evaluation:
    """A metric's `value` after `samples` of the whole run; `workers` (their mean) trained since the one before."""

    samples: float
    value: float
    workers: float = 1.0
