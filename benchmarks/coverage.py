"""Whether 90 % intervals of a worker's speed hold 90 % of the truths: of many hidden laws, and not of one campaign.

`python -m benchmarks.coverage` draws 1,000 laws of what a step takes on an accelerator, measures 12 networks on two
accelerators by each, and predicts what was left out: a network, an accelerator, and both. The law has an overhead, a
part in proportion to the FLOPs and one in proportion to the tensors, as the predictor's has; how large they are, how
well data sheets say it, and how far networks and pairs of both are from the law is drawn anew for each, as widely as
what is published differs (docs/sizing-model.md). None of it is a draw of the predictor's prior.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from shoal.sizing.accelerators import catalogue
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import LogMean, Model, Profile, Row
from shoal.sizing.speed.model import SpeedModel

__all__ = ["WANTED", "Law", "asked"]

LAWS, NETWORKS = 1000, 12
MEASURED, NEW = ("K80", "P100"), "V100"
BATCH, STEPS = 128, 500
WANTED = "a network", "an accelerator", "both", "neither"
"""What was never measured."""


class Law:
    """What a step takes: by a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = np.random.default_rng(seed)
        self.overhead, self.tensor = rng.lognormal(math.log(6e-3), 0.6), rng.lognormal(math.log(3e-4), 0.6)
        self.used = rng.uniform(0.25, 0.8)  # of the peak
        self.arithmetic, self.host = rng.uniform(0.2, 1.0, 2)
        self.network, self.pair, self.day = np.exp(
            rng.uniform(np.log((0.03, 0.01, 0.01)), np.log((0.12, 0.08, 0.05)))
        )
        self.sheet = {name: rng.normal(0, 0.2, 3) for name in (*MEASURED, NEW)}
        self.models = [self._model(n) for n in range(NETWORKS + 1)]
        self.odd = {each.key: rng.normal(0, self.network) for each in self.models}
        self._pairs = {
            (each.key, name): rng.normal(0, self.pair) for each in self.models for name in self.sheet
        }

    def _model(self, number: int) -> Model:
        flops = math.exp(self._rng.uniform(math.log(3e7), math.log(5e9)))
        parameters = int(flops ** self._rng.uniform(0.65, 0.75))
        return Model(f"network-{number}", flops, parameters, int(self._rng.integers(20, 300)))

    def seconds(self, model: Model, device: str) -> float:
        """The truth."""
        sheet, own = catalogue().find(device), self.sheet[device]
        tflops, memory = (
            sheet.arithmetic_tflops / priors.REFERENCE_TFLOPS, sheet.bandwidth_gbs / priors.REFERENCE_BANDWIDTH
        )  # fmt: skip
        faster = tflops**self.arithmetic * memory ** (1 - self.arithmetic)
        slower = self.host + (1 - self.host) / math.sqrt(tflops * memory)
        compute = 3 * (model.flops or 0.0) * BATCH / (self.used * priors.REFERENCE_TFLOPS * 1e12) / faster
        parts = slower * self.overhead, compute, slower * self.tensor * model.tensors
        alone = sum(part * math.exp(deviation) for part, deviation in zip(parts, own, strict=True))
        return float(alone * math.exp(self.odd[model.key] + self._pairs[model.key, device]))

    def profile(self, model: Model) -> Profile:
        """It was measured on another day."""
        times = {name: self.seconds(model, name) * self._rng.lognormal(0, self.day) for name in MEASURED}
        rows = [
            Row(name, batch_size=BATCH, step=LogMean.of(seconds, 0.05 * seconds, STEPS))
            for name, seconds in times.items()
        ]
        return Profile(model, tuple(rows))


def asked(seed: int) -> Iterator[tuple[str, float, float]]:
    """What was never measured; the error of its prediction, in logarithms, and the standard deviation told of it."""
    law = Law(seed)
    *known, new = law.models
    fitted = SpeedModel([law.profile(model) for model in known])
    questions = (new, MEASURED[seed % 2]), (known[0], NEW), (new, NEW), (known[0], MEASURED[seed % 2])
    for what, (model, device) in zip(WANTED, questions, strict=True):
        found = fitted.worker(model, device, 1, 0, BATCH)
        yield what, math.log(found.seconds / law.seconds(model, device)), found.sigma


def main() -> None:
    """Print the table."""
    inside, errors = Counter[str](), dict[str, list[tuple[float, float]]]()
    for seed in range(LAWS):
        for what, error, sigma in asked(seed):
            inside[what] += abs(error) <= priors.Z90 * sigma
            errors.setdefault(what, []).append((abs(error), sigma))
    table = Table(
        "never measured", "inside", "95 % interval", "MAPE", "width", "honest at", title=f"{LAWS:,} laws"
    )
    for what, found in errors.items():
        part, (error, sigma) = inside[what] / LAWS, np.array(found).T
        beside = 1.96 * math.sqrt(part * (1 - part) / LAWS)
        table.add_row(
            what,
            f"{part:.1%}",
            f"{part - beside:.1%} to {part + beside:.1%}",
            f"{np.mean(np.expm1(error)):.1%}",
            f"{math.expm1(-priors.Z90 * np.median(sigma)):+.0%} / {math.expm1(priors.Z90 * np.median(sigma)):+.0%}",
            f"{np.quantile(error / sigma, 0.9) / priors.Z90:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
