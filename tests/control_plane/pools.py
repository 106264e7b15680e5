"""CapacityPools, and what the coordinator of a job in them reports."""

from __future__ import annotations

import math

from dev.kube import Json
from shoal_trainer.contract import (
    LogSums,
    ModelReport,
    Phase,
    ShardReport,
    SpeedSums,
    StatusReport,
    WorkerReport,
    WorkerState,
)

MODEL = ModelReport(fingerprint="cd" * 32, parameters=500_000, tensors=20, flops_per_sample=8e7)
POOLS = "/apis/shoal.dev/v1alpha1/capacitypools"
GPUS = {"nvidia.com/gpu": "8"}
"""A fake node of a `pool` has more than the pool says, so that workers of a node that is taken find room on others."""


def pool(name: str, namespace: str, price: float, spot: bool, nodes: int) -> Json:
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "CapacityPool",
        "metadata": {"name": f"{name}-{namespace}"},
        "spec": {
            "accelerator": {"name": "T4"},
            "capacityType": "Spot" if spot else "OnDemand",
            "nodeSelector": {"example.com/pool": f"{name}-{namespace}"},
            "limits": {"nodes": nodes},
            "price": {"perHour": price},
            "startupSeconds": 1,
        },
    }


def sums(seconds: float, count: int) -> LogSums:
    log = math.log(seconds)
    return LogSums(count=count, total=log * count, squares=log * log * count)


def report(uid: str, workers: int, left: float, seconds: float = 0.2) -> StatusReport:
    speed = SpeedSums(
        device="T4",
        devices=1,
        cores=4,
        batch_size=128,
        workers=workers,
        servers=1,
        compute=sums(seconds, 1000),
        pull=sums(0.01, 1000),
        push=sums(0.01, 1000),
    )
    shard = ShardReport(index=0, epoch=0, boot=1, busy_seconds=1.0, updates=1000, bytes_received=10**9)
    return StatusReport(
        job_uid=uid,
        phase=Phase.TRAINING,
        step=1000,
        model=MODEL,
        speed=(speed,),
        speed_epoch="one",
        shards=(shard,),
        samples_left=left,
        samples_per_second=workers * 128 / seconds,
        workers=tuple(
            WorkerReport(slot=slot, incarnation=0, state=WorkerState.ACTIVE, first_push_at=1.0)
            for slot in range(workers)
        ),
    )
