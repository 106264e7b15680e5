"""A job whose nodes are taken while the page looks on, for the tests and the picture in the docs: virtual time."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob
from shoal.page import Page

START = datetime(2026, 11, 24, 9, 0, 0, tzinfo=UTC)
BEFORE, AFTER = "l4-spot-a 2, l4-spot-b 2, t4-spot 2", "l4-spot-a 1, l4-spot-b 3, t4-spot 2"
CHEAPEST = "the cheapest that keeps the deadline with 95%"
TAKEN = "l4-spot-a was interrupted three times in 20 minutes"
POOLS = ("l4-spot-a", "l4-spot-b", "t4-spot")


def stamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def pools() -> list[CapacityPool]:
    def pool(name: str, price: float, rate: float, kind: str = "Spot") -> CapacityPool:
        return CapacityPool.model_validate(
            {
                "kind": "CapacityPool", "metadata": {"name": name},
                "spec": {"accelerator": {"name": name[:2].upper()}, "capacityType": kind, "zone": "europe-west4-a",
                         "limits": {"nodes": 8}, "price": {"perHour": price}, "interruptionsPerHour": rate},
                "status": {"nodes": 4, "used": 3,
                           "recommended": {"nodes": 5, "reason": "two jobs wait for a node of this pool"}},
            }
        )  # fmt: skip

    return [pool("l4-spot-a", 0.28, 0.08), pool("l4-spot-b", 0.30, 0.05), pool("t4-spot", 0.14, 0.02),
            pool("l4-on-demand", 0.85, 0, "OnDemand")]  # fmt: skip


def job(name: str, status: dict[str, Any], namespace: str = "vision", **spec: Any) -> TrainingJob:
    return TrainingJob.model_validate(
        {
            "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}", "generation": 1,
                         "creationTimestamp": stamp(START)},
            "spec": {"storage": {"ephemeral": {}}, "training": {"entrypoint": "a:job", "stopAfter": {"epochs": 90}},
                     "workers": {"replicas": 6, "pools": list(POOLS)},
                     "elasticity": {"mode": "Auto", "objective": {"deadlineSeconds": 7200}}, **spec},
            "status": {"observedGeneration": 1, **status},
        }
    )  # fmt: skip


class Scene:
    """Forty minutes of a job with six workers; a slot loses its node now and then."""

    def __init__(self, others: int = 4) -> None:
        self.now = START
        self._random = random.Random(3)
        self._slots: dict[int, dict[str, Any]] = {}
        self._counts = dict.fromkeys(range(6), 0)
        self._lost = 0
        self._others = others
        self.page = Page(self.jobs, pools, wall=lambda: self.now, look_seconds=0.1)

    def jobs(self) -> list[TrainingJob]:
        minutes = (self.now - START).total_seconds() / 60
        ready = sum(slot["state"] == "Running" for slot in self._slots.values())
        resnet = job("resnet50-imagenet", {
            "phase": "Running" if ready else "Starting", "startTime": stamp(START),
            "workers": {"ready": ready, "desired": 6}, "restarts": {"disruptions": self._lost},
            "slots": [{"role": "ps", "index": 0, "node": "safe-1"}, *self._slots.values()],
            "training": {"phase": "Training", "step": int(minutes * 400), "epoch": int(minutes / 0.7),
                         "loss": f"{0.8 + 6 * math.exp(-minutes / 9):.4f}",
                         "samplesPerSecond": f"{ready * 710 + 40:.1f}",
                         "progressPercent": min(99, int(minutes * 1.6)), "remainingSeconds": int(6300 - minutes * 60),
                         "goodput": "0.998", "metrics": self.metrics(minutes)},
            "data": {"done": int(minutes * 30_000) % 1_281_167, "total": 1_281_167},
            "plan": {"summary": BEFORE if minutes < 20 else AFTER,
                     "pools": {"l4-spot-a": 2, "l4-spot-b": 2, "t4-spot": 2},
                     "reason": CHEAPEST if minutes < 20 else TAKEN},
            "prediction": {"relativeError": "0.07", "basis": "212 measurements of this model"},
            "cost": {"perHour": "1.44", "accumulated": f"{minutes / 60 * 1.44:.2f}",
                     "savedVersusOnDemand": f"{minutes / 60 * 3.6:.2f}"},
        })  # fmt: skip
        return [resnet, *(self._other(number) for number in range(self._others))]

    def metrics(self, minutes: float) -> dict[str, str]:
        """Means of the epoch so far, and from its end on those of the newest evaluation."""
        accuracy = 0.75 - 0.7 * math.exp(-minutes / 12)
        evaluated = 0.72 - 0.7 * math.exp(-(minutes // 5 * 5) / 12)
        return {"accuracy": f"{accuracy:.4g}"} | (
            {"val_accuracy": f"{evaluated:.4g}"} if minutes >= 5 else {}
        )

    def _other(self, number: int) -> TrainingJob:
        phase = ("Succeeded", "Failed", "Suspended", "Running")[number % 4]
        failed = [{"type": "Failed", "status": "True", "reason": "UserError", "lastTransitionTime": stamp(START),
                   "message": "digits has no 'jobb'. Did you mean 'job'?"}]  # fmt: skip
        complete = [{**failed[0], "type": "Complete", "message": "all epochs are complete"}]
        conditions = {"Failed": failed, "Succeeded": complete}.get(phase, [])
        reason = {"Failed": "UserError"}.get(phase, "")
        return job(
            f"digits-{number:03}",
            {"phase": phase, "conditions": conditions, "reason": reason},
            namespace="team",
        )

    def play(self, minutes: int = 40) -> None:
        """Let time pass, ten seconds at once."""
        for _ in range(minutes * 6):
            self.now += timedelta(seconds=10)
            for index in range(6):
                slot = self._slots.get(index)
                if slot is None or slot["state"] == "Ended":
                    self._slots[index] = self._fresh(index)
                elif slot["state"] == "Starting":
                    slot["state"] = "Running"
                elif slot["state"] == "Draining":
                    slot["state"] = "Ended"
                elif self._random.random() < 0.012 * (3 if slot["pool"] == "l4-spot-a" else 1):
                    slot |= {
                        "state": "Draining",
                        "cause": self._random.choice(["NodeShutdown", "NodeLost"]),
                        "endedAt": stamp(self.now),
                    }
                    self._lost += 1
            self.page.look()

    def _fresh(self, index: int) -> dict[str, Any]:
        incarnation, pool = self._counts[index], POOLS[index % 3]
        self._counts[index] += 1
        return {"index": index, "incarnation": incarnation, "state": "Starting", "pool": pool,
                "node": f"{pool}-{incarnation}{index}", "createdAt": stamp(self.now)}  # fmt: skip
