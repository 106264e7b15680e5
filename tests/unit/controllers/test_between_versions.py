"""What the operator has written into a cluster, and compares with what it makes now, of one manifest.

Of another version, these values would be a change that nobody made: pods that wait are made anew and lose their place
in a queue, a job is queued again or refused, and what was measured of a model is forgotten. Where they have to change,
the version that changes them accepts the old ones, too, and this test says both.
"""

from __future__ import annotations

import pytest

from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node
from shoal.api.labels import PLACEMENT, TEMPLATE, Place
from shoal.api.training_job import TrainingJob
from shoal.controllers.speedprofile.identity import profile_name
from shoal.controllers.trainingjob.credentials import InstallKey, job_credentials
from shoal.manifests.names import place_labels, workload_name
from shoal.manifests.placement import Where, default_where, placement_labels
from shoal.manifests.platforms import GENERIC
from shoal.sizing.speed.measurements import Kind

CONTAINERS = [
    {"name": "worker", "image": "me/é:1", "resources": {"limits": {"cpu": "4", "nvidia.com/gpu": 1}}}
]
JOB = TrainingJob.model_validate(
    {
        "metadata": {"name": "digits", "namespace": "team", "uid": "00000000-1111-2222-3333-444444444444"},
        "spec": {
            "storage": {"uri": "s3://bucket/runs"},
            "runPolicy": {"schedulingPolicy": {"queue": "gpus"}},
            "training": {
                "entrypoint": "digits:job",
                "args": {"augment": True, "layers": [64, 32], "name": "é", "rate": 0.1},
                "stopAfter": {"epochs": 3},
            },
            "parameterServers": {"replicas": 2},
            "workers": {
                "replicas": 2,
                "template": {"spec": {"containers": CONTAINERS, "priorityClassName": "low"}},
            },
        },
    }
)
POOL = CapacityPool.model_validate(
    {
        "metadata": {"name": "spot-t4", "uid": "p"},
        "spec": {
            "accelerator": {"name": "T4", "count": 2},
            "capacityType": "Spot",
            "zone": "europe-west4-a",
            "nodeSelector": {"cloud.google.com/gke-nodepool": "t4"},
            "tolerations": [{"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"}],
            "limits": {"nodes": 4},
            "price": {"perHour": "0.2"},
        },
    }
)
WORKER, SERVER = Place("worker", 0, 1), Place("ps", 0, 0)


@pytest.mark.parametrize(("place", "template"), [(WORKER, "52f46fc2d167"), (SERVER, "44136fa355b3")])
def test_label_of_a_template(place: Place, template: str) -> None:
    assert place_labels(JOB, place)[TEMPLATE] == template


@pytest.mark.parametrize(
    ("where", "placement"),
    [
        (default_where(JOB, WORKER), "9cdf25585e38"),
        (default_where(JOB, SERVER), "a0fbf89f0533"),
        (Where("Spot", POOL, zone="Same", excluded=("node",)), "ce2bb6f1a654"),
    ],
    ids=["worker", "server", "pool"],
)
def test_label_of_a_placement(where: Where, placement: str) -> None:
    assert placement_labels(JOB, where, GENERIC)[PLACEMENT] == placement


def test_what_a_status_remembers() -> None:
    node = {"metadata": {"name": "n", "uid": "uid-1"}, "status": {"nodeInfo": {"bootID": "boot-1"}}}
    assert JOB.spec.training.args_digest == "f838cbee1876"
    assert Node.model_validate(node).machine == "4a49ab6f54"


def test_names_of_what_the_operator_makes() -> None:
    assert workload_name(JOB) == "digits-00000000-b8a172a5"
    assert profile_name("F" * 64) == "model-ffffffffffffffff"
    other = Kind("F" * 64, 3.9e9, "bfloat16+float32")
    assert profile_name("F" * 64, other) == "model-ffffffffffffffff-1e7ee627"


def test_key_of_a_job_whose_pods_run() -> None:
    key = job_credentials(InstallKey(bytes(32)), JOB.metadata.uid).key
    assert key.hex()[:16] == "9ffcf29ed968aa5d"
