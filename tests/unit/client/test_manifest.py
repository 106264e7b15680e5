"""What `submit` makes of its arguments, and what it says about wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.api.training_job import TrainingJob
from shoal.client.manifest import Submission, manifests
from shoal.errors import UsageError
from shoal_trainer.contract import BATCH_SIZE


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("digits.py", "my-job.py"):
        (tmp_path / name).write_text("job = 1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submission(**changes: Any) -> Submission:
    return Submission(**{"entrypoint": "digits.py:job", "storage": "s3://bucket/runs", **changes})


def test_code_in_a_file_travels_with_the_job(code: Path) -> None:
    made = manifests(submission(name="mine", workers=4))
    assert made.code is not None
    assert made.code["data"] == {"digits.py": "job = 1\n"}
    assert made.code["immutable"] is True
    assert made.job["spec"]["training"]["code"] == {"configMap": made.code["metadata"]["name"]}
    assert made.job["spec"]["training"]["entrypoint"] == "digits:job"
    assert made.job["spec"]["workers"] == {"replicas": 4}
    TrainingJob.model_validate(made.job)


@pytest.mark.parametrize("entrypoint", ["package.py:job", "package.py", "package/", "./package:job"])
def test_a_folder_is_no_entrypoint(code: Path, entrypoint: str) -> None:
    for name in ("package", "package.py"):
        (code / name).mkdir()
        (code / name / "train.py").write_text("job = 1\n")
    with pytest.raises(UsageError, match=r"package(.py)?/? is a folder: name a file in it, .*/train.py:job;"):
        manifests(submission(entrypoint=entrypoint))


def test_code_is_another_object_after_an_edit(code: Path) -> None:
    """`shoal init … | kubectl apply -f -` after an edit must not run what an earlier one has left."""
    first, again = (manifests(submission(name="mine")) for _ in range(2))
    (code / "digits.py").write_text("job = 2\n")
    edited = manifests(submission(name="mine"))
    names = [each.job["spec"]["training"]["code"]["configMap"] for each in (first, again, edited)]
    assert names[0] == names[1] != names[2]


def test_what_the_script_imports_from_beside_it_travels_too(code: Path) -> None:
    (code / "digits.py").write_text("import helpers\njob = 1\n")
    (code / "helpers.py").write_text("a = 1\n")
    (code / "other.py").write_text("")
    for files in ((), ("helpers.py",)):
        made = manifests(submission(files=files))
        assert made.code is not None
        assert made.code["data"].keys() == {"digits.py", "helpers.py"}
    (code / "helpers.py").write_text("a = \n")
    with pytest.raises(UsageError, match=r"helpers\.py, line 1: invalid syntax"):
        manifests(submission())


def test_batches_are_those_of_a_local_run(code: Path) -> None:
    assert manifests(submission()).job["spec"]["training"]["batchSize"] == BATCH_SIZE


def test_a_module_is_in_the_image() -> None:
    made = manifests(submission(entrypoint="pkg.digits:job", image="r.io/mine:1"))
    assert made.code is None
    [container] = made.job["spec"]["workers"]["template"]["spec"]["containers"]
    assert container == {"name": "worker", "image": "r.io/mine:1"}


def test_arguments_are_json(code: Path) -> None:
    args = {"rate": 1e-3, "layers": (64, 32), "name": "a", "augment": True}
    training = manifests(submission(args=args)).job["spec"]["training"]
    assert training["args"] == {"rate": 1e-3, "layers": [64, 32], "name": "a", "augment": True}


def test_all_that_a_local_run_has_can_be_said(code: Path) -> None:
    spec = manifests(
        submission(
            until=("my_metric", 0.1), mode="Min", initial_from="s3://b/team/old/uid", weights_only=True,
            snapshot_seconds=60, max_staleness=0, tls=True,
        )
    ).job["spec"]  # fmt: skip
    training = spec["training"]
    assert training["stopAfter"] == {"metric": "my_metric", "value": 0.1, "mode": "Min"}
    assert training["initialFrom"] == {"uri": "s3://b/team/old/uid", "weightsOnly": True}
    assert (training["staleness"], training["dataTls"]) == ({"max": 0}, True)
    assert spec["parameterServers"]["snapshot"] == {"everySeconds": 60}


def test_arguments_are_for_a_function(code: Path) -> None:
    """Known here, before a worker of the cluster finds out."""
    (code / "rated.py").write_text(
        "from shoal_trainer import Training\n\ndef make(rate=1):\n    return Training(model=rate)\n\njob = make()\n"
    )
    assert manifests(submission(entrypoint="rated.py:make", args={"rate": 2}))
    assert manifests(submission(entrypoint="rated.py:job"))
    with pytest.raises(UsageError, match=r"rated.py:job is a Training, which takes no arguments"):
        manifests(submission(entrypoint="rated.py:job", args={"rate": 2}))
    with pytest.raises(UsageError, match=r"rated.py:make takes no 'rat', but rate: did you mean rate\?"):
        manifests(submission(entrypoint="rated.py:make", args={"rat": 2}))


@pytest.mark.parametrize(
    "definition",
    ["def make(**options): ...", "@decorated\ndef make(): ...", "make = partial(build, 1)", "class make: ...",
     "if x:\n    def make(): ...\nelse:\n    def make(rat): ..."],
)  # fmt: skip
def test_what_may_take_an_argument_is_not_refused(code: Path, definition: str) -> None:
    (code / "rated.py").write_text(f"{definition}\n")
    assert manifests(submission(entrypoint="rated.py:make", args={"rat": 2}))


def test_names_are_new_each_time_and_short(code: Path) -> None:
    long = code / f"{'x_' * 40}.py"
    long.write_text("job = None\n")
    names = {manifests(submission(entrypoint=f"{long}:job")).name for _ in range(20)}
    assert len(names) == 20
    assert all(len(name) <= 40 for name in names)


@pytest.mark.parametrize(
    ("storage", "expected"),
    [
        ("s3://b/f", {"uri": "s3://b/f"}),
        ("claim:runs", {"volumeClaim": {"name": "runs"}}),
        ("ephemeral", {"ephemeral": {}}),
    ],
)
def test_storage(code: Path, storage: str, expected: dict[str, Any]) -> None:
    assert manifests(submission(storage=storage)).job["spec"]["storage"] == expected
    assert manifests(submission(storage=storage, run="nightly")).job["spec"]["storage"] == expected | {
        "run": "nightly"
    }


def test_a_deadline_lets_shoal_choose(code: Path) -> None:
    spec = manifests(submission(pools=["t4"], deadline_seconds=3600, max_cost="5", max_workers=8)).job["spec"]
    assert spec["elasticity"] == {"mode": "Auto", "objective": {"deadlineSeconds": 3600, "maxCost": 5}}
    assert spec["workers"]["pools"] == ["t4"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"entrypoint": "digits"}, "must be FILE.py, FILE.py:OBJECT or MODULE:OBJECT"),
        (
            {"entrypoint": "digits.ipynb"},
            "; `jupyter nbconvert --to script digits.ipynb` makes a file of a notebook",
        ),
        (
            {"entrypoint": "my-job.py"},
            "Python cannot import my-job.py by its name: rename it, for example to my_job.py",
        ),
        ({"entrypoint": "digits.py"}, "digits.py has no shoal_trainer.Training"),
        ({"entrypoint": "digits:job"}, "say which with image=… (--image), or give a file: digits.py:job"),
        ({"entrypoint": "digits:job()", "image": "w"}, "spec.training.entrypoint: must be module:object"),
        ({"entrypoint": "nothing.py:job"}, "cannot read nothing.py: No such file or directory"),
        ({"storage": "/data"}, "must be s3://"),
        ({"storage": ""}, "say where snapshots and the model go (storage=…, --storage): s3://"),
        ({"storage": "s4://bucket/runs"}, "must be s3://"),
        ({"storage": "claim:"}, "a PersistentVolumeClaim's name has only"),
        ({"storage": "claim:My_Runs"}, "a PersistentVolumeClaim's name has only"),
        ({"run": "../x"}, "spec.storage.run: must contain only a-z, 0-9 and '-'"),
        ({"initial_from": "runs"}, "spec.training.initialFrom.uri: must be s3://bucket/path"),
        ({"weights_only": True}, "needs initial_from"),
        ({"mode": "Min"}, "give both"),
        ({"name": "My_Job"}, "must begin with a letter and have only a-z"),
        ({"name": "j" * 41}, "at most 40 characters"),
        ({"args": {"rate": None}}, "the argument rate is None: Kubernetes drops null: leave it out"),
        ({"args": {"rate": {1, 2}}}, "rate is not JSON (Object of type set"),
        ({"args": {"rate": float("nan")}}, "rate is not JSON (Out of range float"),
        ({"deadline_seconds": 60, "pools": ["t4"]}, "how many at most (max_workers=…, --max-workers)"),
        ({"max_cost": "5", "max_workers": 3}, "from which pools"),
        ({"workers": -1}, "spec.workers.replicas: input should be greater than or equal to 0"),
        ({"batch_size": 0}, "spec.training.batchSize"),
    ],
)
def test_a_wrong_argument_says_what_to_change(code: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        manifests(submission(**changes))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "image",
    ["worker", "r.io:5000/team/worker:1.0", "r.io/team_a/worker@sha256:" + "0" * 64, "localhost/w:dev"],
)
def test_usual_images_are_taken(code: Path, image: str) -> None:
    spec = manifests(submission(image=image)).job["spec"]
    assert spec["workers"]["template"]["spec"]["containers"] == [{"name": "worker", "image": image}]


TEMPLATE = """
metadata: {labels: {team: vision}}
spec:
  serviceAccountName: trainer
  containers:
    - {name: worker, resources: {limits: {nvidia.com/gpu: 1}}, env: [{name: A, value: "1"}]}
    - {name: ps, envFrom: [{secretRef: {name: s3}}]}
    - {name: sidecar, image: r.io/sidecar:1}
"""
SIDECAR = {"name": "sidecar", "image": "r.io/sidecar:1"}


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("image", [None, "r.io/w:1"])
def test_a_template_is_of_the_pods_of_both_roles(tmp_path: Path, as_file: bool, image: str | None) -> None:
    (tmp_path / "pods.yaml").write_text(TEMPLATE)
    (tmp_path / "digits.py").write_text("job = 1\n")
    template = str(tmp_path / "pods.yaml") if as_file else yaml.safe_load(TEMPLATE)
    entrypoint = f"{tmp_path}/digits.py:job"
    wanted = Submission(entrypoint=entrypoint, storage="s3://b/runs", template=template, image=image)
    spec = manifests(wanted).job["spec"]
    servers, workers = spec["parameterServers"]["template"], spec["workers"]["template"]
    for each in (servers, workers):
        assert each["metadata"] == {"labels": {"team": "vision"}}
        assert each["spec"]["serviceAccountName"] == "trainer"
    assert servers["spec"]["containers"] == [
        {"name": "ps", "envFrom": [{"secretRef": {"name": "s3"}}]},
        SIDECAR,
    ]
    own = {
        "name": "worker",
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "env": [{"name": "A", "value": "1"}],
    }
    assert workers["spec"]["containers"] == [own | ({"image": image} if image else {}), SIDECAR]


def test_a_template_without_containers_leaves_them_to_shoal(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text("job = 1\n")
    wanted = Submission(
        entrypoint=f"{tmp_path}/digits.py:job", storage="s3://b/runs",
        template={"spec": {"serviceAccountName": "trainer"}},
    )  # fmt: skip
    spec = manifests(wanted).job["spec"]
    assert spec["workers"]["template"] == spec["parameterServers"]["template"]
    assert spec["workers"]["template"] == {"spec": {"serviceAccountName": "trainer"}}


def test_the_image_of_a_template_has_the_module(tmp_path: Path) -> None:
    del tmp_path
    template = {"spec": {"containers": [{"name": "worker", "image": "r.io/w:1"}]}}
    wanted = Submission(entrypoint="digits:job", storage="s3://b/runs", template=template)
    assert manifests(wanted).job["spec"]["training"]["entrypoint"] == "digits:job"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [b", "cannot read the template"),
        ("- 1", "a pod template is a map of metadata and spec"),
        ("serviceAccountName: trainer", "has serviceAccountName, .* put it under spec"),
        ("spec: {containers: worker}", "containers"),
        ("spec: {containers: [{image: a}]}", "containers"),
    ],
)
def test_a_template_that_is_none_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "pods.yaml").write_text(text)
    wanted = Submission(
        entrypoint="digits:job", storage="s3://b/runs", image="r.io/w:1", template=tmp_path / "pods.yaml"
    )
    with pytest.raises(UsageError, match=words):
        manifests(wanted)
    with pytest.raises(UsageError, match="cannot read the template"):
        manifests(Submission(entrypoint="digits:job", storage="s3://b/runs", template=tmp_path / "none"))
