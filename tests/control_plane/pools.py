"""CapacityPools, and what the coordinator of a job in them reports."""

from __future__ import annotations

from dev.kube import Json
from shoal_trainer.contract import ModelReport, Phase, ShardReport, StatusReport, WorkerReport, WorkerState
from tests.unit.controllers.planning.world import speed

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


def report(uid: str, workers: int, left: float, seconds: float = 0.2) -> StatusReport:
    shard = ShardReport(index=0, epoch=0, boot=1, busy_seconds=1.0, updates=1000, bytes_received=10**9)
    return StatusReport(
        job_uid=uid,
        phase=Phase.TRAINING,
        step=1000,
        model=MODEL,
        speed=(speed(seconds, 1000, workers),),
        speed_epoch="one",
        shards=(shard,),
        samples_left=left,
        samples_per_second=workers * 128 / seconds,
        workers=tuple(
            WorkerReport(slot=slot, incarnation=0, state=WorkerState.ACTIVE, first_push_at=1.0)
            for slot in range(workers)
        ),
    )
