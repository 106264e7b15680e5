"""The guides for clouds, which nobody has run: their blocks run in order with the programs played, and what these were
given is compared with AWS's own description of its APIs and with Google's and eksctl's references."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import botocore.validate
import pytest
import yaml
from botocore import xform_name
from botocore.utils import ContainerMetadataFetcher
from google.auth.compute_engine._metadata import _GCE_DEFAULT_MDS_IP

from dev.images import GPU, IMAGES
from shoal.api.training_job import TrainingJob
from tests.unit.docs.pages import blocks, code, read

PLAYED = ("aws", "docker", "eksctl", "gcloud", "helm", "kubectl", "make", "shoal")
STUB = r"""#!/bin/bash
line=$(printf '%s\x1f' "${0##*/}" "$@")
printf '%s\n' "$line" >>"$CALLS"  # at once: two of a pipe write beside each other
if [ -p /dev/stdin ]; then cat >/dev/null; fi
echo PREEMPTIBLE_NVIDIA_L4_GPUS
"""
EVERYWHERE = {"--query", "--output", "--region", "--cli-input-json"}
OF_THE_COMMAND_LINE = {
    ("s3", "mb"): set[str](), ("s3", "rb"): {"--force"}, ("ecr", "get-login-password"): set[str]()
}  # fmt: skip
"""What `aws` has and the API has not."""
REFERENCE = {
    ("gcloud", "artifacts", "repositories", "create"): {"--repository-format", "--location"},
    ("gcloud", "artifacts", "repositories", "delete"): {"--location"},
    ("gcloud", "auth", "configure-docker"): set(),
    ("gcloud", "auth", "login"): set(),
    ("gcloud", "billing", "projects", "link"): {"--billing-account"},
    ("gcloud", "components", "install"): set(),
    ("gcloud", "compute", "instances", "simulate-maintenance-event"): {"--zone"},
    ("gcloud", "compute", "regions", "describe"): {"--format"},
    ("gcloud", "config", "set"): set(),
    ("gcloud", "container", "clusters", "create"): {
        "--zone", "--num-nodes", "--machine-type", "--workload-pool"
    },
    ("gcloud", "container", "clusters", "create-auto"): {"--region"},
    ("gcloud", "container", "clusters", "delete"): {"--zone", "--region"},
    ("gcloud", "container", "clusters", "get-credentials"): {"--zone", "--region"},
    ("gcloud", "container", "node-pools", "create"): {
        "--cluster", "--zone", "--spot", "--machine-type", "--accelerator", "--enable-autoscaling", "--num-nodes",
        "--min-nodes", "--max-nodes",
    },
    ("gcloud", "projects", "create"): set(),
    ("gcloud", "projects", "delete"): set(),
    ("gcloud", "projects", "describe"): {"--format"},
    ("gcloud", "services", "enable"): set(),
    ("gcloud", "storage", "buckets", "add-iam-policy-binding"): {"--role", "--member"},
    ("gcloud", "storage", "buckets", "create"): {
        "--location", "--uniform-bucket-level-access", "--soft-delete-duration"
    },
    ("gcloud", "storage", "rm"): {"--recursive"},
    ("eksctl", "create", "cluster"): set(),
    ("eksctl", "delete", "cluster"): {"--name", "--region"},
}  # fmt: skip
"""What Google's and eksctl's references have, of what the pages use."""


class Run:
    """A page that was run: what its programs were given, and the folder with the files that it wrote."""

    def __init__(self, folder: Path, *pages: str) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name in PLAYED:
            (folder / "bin" / name).write_text(STUB)
            (folder / "bin" / name).chmod(0o755)
        env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "CALLS": str(folder / "calls")}
        text = "\n".join(block for page in pages for block in blocks(page, "sh"))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=env, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = (folder / "calls").read_text(encoding="utf-8").splitlines()
        self.calls = [line.split("\x1f")[:-1] for line in lines]

    def of(self, *words: str) -> Iterator[list[str]]:
        """What follows these words, of each call that begins with them."""
        for call in self.calls:
            if tuple(call[: len(words)]) == words:
                yield call[len(words) :]

    def names(self, *words: str, option: str = "") -> set[str]:
        """The value of an option, or the first word, of each call that begins with these words."""
        return {rest[rest.index(option) + 1] if option else rest[0] for rest in self.of(*words)}


@pytest.fixture(scope="module")
def eks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Karpenter's page begins with the names that the other one has set."""
    first = blocks("docs/eks.md", "sh")[0]
    assert "export AWS_REGION" in first
    return Run(tmp_path_factory.mktemp("eks"), "docs/eks.md", "docs/karpenter.md")


@pytest.fixture(scope="module")
def gke(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("gke"), "docs/gke.md")


def test_commands_of_aws_and_their_options_exist(eks: Run) -> None:
    session = botocore.session.get_session()
    for service, name, *rest in eks.of("aws"):
        options = {word for word in rest if word.startswith("--")}
        if (service, name) in OF_THE_COMMAND_LINE:
            assert options <= OF_THE_COMMAND_LINE[service, name], name
            continue
        model = session.get_service_model({"s3api": "s3"}.get(service, service))
        [operation] = [each for each in model.operation_names if xform_name(each, "-") == name]
        shape = model.operation_model(operation).input_shape
        known = {f"--{xform_name(each, '-')}" for each in (shape.members if shape else ())}
        assert options <= known | EVERYWHERE, name
        if "--cli-input-json" in options:
            given = json.loads(file_of(eks, rest[rest.index("--cli-input-json") + 1]))
            given["clientToken"] = "made"
            assert not botocore.validate.ParamValidator().validate(given, shape).has_errors()
        else:
            needed = {f"--{xform_name(each, '-')}" for each in (shape.required_members if shape else ())}
            assert needed - {"--client-token"} <= options, name  # the command line makes one


def file_of(run: Run, word: str) -> str:
    return (run.folder / word.removeprefix("file://")).read_text(encoding="utf-8")


def test_policies_are_policies(eks: Run) -> None:
    files = eks.names("aws", "iam", "create-role", option="--assume-role-policy-document")
    rights = eks.names("aws", "iam", "put-role-policy", option="--policy-document")
    for word in files | rights:
        policy = json.loads(file_of(eks, word))
        assert policy.keys() == {"Version", "Statement"}
        assert policy["Version"] == "2012-10-17"
        for each in policy["Statement"]:
            assert each.keys() == {"Effect", "Action", "Principal" if word in files else "Resource"}


def test_what_a_killed_server_has_uploaded_of_a_file_is_deleted(eks: Run) -> None:
    """Nobody sees these parts, and they are paid for."""
    [call] = eks.of("aws", "s3api", "put-bucket-lifecycle-configuration")
    given = dict(zip(call[::2], call[1::2], strict=True))
    assert {given["--bucket"]} == {url.removeprefix("s3://") for url in eks.names("aws", "s3", "mb")}
    rules = json.loads(given["--lifecycle-configuration"])
    shape = (
        botocore.session.get_session()
        .get_service_model("s3")
        .operation_model("PutBucketLifecycleConfiguration")
    )
    asked = {"Bucket": given["--bucket"], "LifecycleConfiguration": rules}
    assert not botocore.validate.ParamValidator().validate(asked, shape.input_shape).has_errors()
    [rule] = rules["Rules"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert (rule["Status"], rule["Filter"]) == ("Enabled", {"Prefix": ""}), "of the whole bucket"


def test_the_bucket_of_google_keeps_no_snapshot_that_was_removed(gke: Run) -> None:
    assert gke.names("gcloud", "storage", "buckets", "create", option="--soft-delete-duration") == {"0"}


@pytest.mark.parametrize("cloud", ["eks", "gke"])
def test_other_commands_are_those_of_the_references(cloud: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(cloud)
    found = [call for call in run.calls if call[0] in {"gcloud", "eksctl"}]
    assert found
    for call in found:
        known = [words for words in REFERENCE if tuple(call[: len(words)]) == words]
        assert known, call
        options = {word for word in call if word.startswith("--")}
        assert options <= REFERENCE[max(known, key=len)], call


def test_what_is_made_on_aws_is_deleted(eks: Run) -> None:
    made = {
        "role": (eks.names("aws", "iam", "create-role", option="--role-name"),
                 eks.names("aws", "iam", "delete-role", option="--role-name")),
        "policy": (eks.names("aws", "iam", "put-role-policy", option="--policy-name"),
                   eks.names("aws", "iam", "delete-role-policy", option="--policy-name")),
        "repository": (eks.names("aws", "ecr", "create-repository", option="--repository-name"),
                       eks.names("aws", "ecr", "delete-repository", option="--repository-name")),
        "bucket": (eks.names("aws", "s3", "mb"), eks.names("aws", "s3", "rb", "--force")),
    }  # fmt: skip
    assert {name: pair for name, pair in made.items() if not pair[0] or pair[0] != pair[1]} == {}
    assert list(eks.of("aws", "fis", "delete-experiment-template"))
    clusters = {yaml.safe_load(file_of(eks, "cluster.yaml"))["metadata"]["name"]}
    assert clusters == eks.names("eksctl", "delete", "cluster", option="--name")


def test_what_is_made_on_google_is_deleted(gke: Run) -> None:
    for made, deleted in (
        (("container", "clusters", "create"), ("container", "clusters", "delete")),
        (("artifacts", "repositories", "create"), ("artifacts", "repositories", "delete")),
        (("storage", "buckets", "create"), ("storage", "rm", "--recursive")),
        (("projects", "create"), ("projects", "delete")),
    ):
        assert gke.names("gcloud", *made) == gke.names("gcloud", *deleted)


KARPENTERS_PODS = 2
"""Of its chart, each on a node of its own that is not Karpenter's (aws/karpenter-provider-aws, charts/karpenter)."""
PLUGINS_NODES = {"nvidia.com/gpu.present": "true"}
"""Where the chart of NVIDIA's device plugin places it, beside nodes that its feature discovery labels, which is off."""


def test_each_pod_of_karpenter_has_a_node() -> None:
    [cluster] = [each for each in blocks("docs/karpenter.md", "sh") if "managedNodeGroups" in each]
    [nodes] = re.findall(r"desiredCapacity: (\d+)", cluster)
    assert int(nodes) == KARPENTERS_PODS


def merged(base: Any, change: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return base | {key: merged(base.get(key), value) for key, value in change.items()}


@pytest.mark.parametrize(("page", "number"), [("docs/gke.md", 2), ("docs/eks.md", 1)])
def test_changes_of_a_job_are_of_this_api_and_use_the_gpus_that_are_paid(page: str, number: int) -> None:
    job = next(yaml.safe_load_all(read("examples/s3/job.yaml")))
    changes = [yaml.safe_load(block) for block in blocks(page, "yaml")]
    assert len(changes) == number
    for change in changes:
        TrainingJob.model_validate(merged(job, change))
    assert changes[0]["spec"]["workers"]["template"]["spec"]["containers"][0]["resources"] == {
        "limits": {"nvidia.com/gpu": 1}
    }


@pytest.mark.parametrize(
    ("page", "addresses"),
    [
        ("docs/eks.md", ContainerMetadataFetcher._ALLOWED_HOSTS),
        ("docs/gke.md", [_GCE_DEFAULT_MDS_IP, "169.254.169.252"]),
    ],
)
def test_a_guide_lets_pods_whose_egress_is_held_to_what_gives_them_credentials(
    page: str, addresses: list[str]
) -> None:
    """Else snapshots fail when the token ends that a server had before."""
    rules = [yaml.safe_load(each) for each in code(read(page)) if each.startswith("{to: ")]
    assert rules
    for rule in rules:
        assert rule["ports"][0].keys() == {"port"}
        assert rule["to"][0]["ipBlock"]["cidr"].removesuffix("/32") in addresses


def test_each_image_has_a_repository_on_aws(eks: Run) -> None:
    made = eks.names("aws", "ecr", "create-repository", option="--repository-name")
    assert made == {f"team/shoal-{name}" for name in (*IMAGES, GPU.name)}


def test_a_pool_of_karpenter_has_its_class() -> None:
    [text] = blocks("docs/karpenter.md", "yaml")
    made, pool = yaml.safe_load_all(text)
    assert pool["spec"]["template"]["metadata"]["labels"] == PLUGINS_NODES
    reference = pool["spec"]["template"]["spec"]["nodeClassRef"]
    assert reference == {
        "group": made["apiVersion"].partition("/")[0], "kind": made["kind"], "name": made["metadata"]["name"]
    }  # fmt: skip
