"""The model's files: from a store to a folder, and what is said where they cannot be had."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shoal.api.labels import JOB
from shoal.client.claim import manifest, reading
from shoal.client.job import Job
from shoal.client.model_files import copy, download
from shoal.errors import ClusterError, Forbidden, NotFound, Unavailable, UsageError
from shoal_trainer.contract import Outcome, TerminationMessage
from shoal_trainer.coordinator.artefacts import Artefacts
from shoal_trainer.snapshot.storage import open_storage
from tests.unit.client.fake_api import FakeApi
from tests.unit.policy.build import job_manifest


def job_with(**spec: Any) -> Job:
    made = job_manifest()
    made["spec"] |= spec
    return Job.of(FakeApi(), made)


def in_a_folder(folder: Path, **files: bytes) -> Job:
    """A job that exported these files there, with `.` for `__`."""
    job, artefacts = job_manifest(), Artefacts(open_storage(folder.as_uri(), writer="ps-0"), "u")
    for name, content in files.items():
        artefacts.receive((1, 1), "export", name.replace("__", "/"), iter([content]))
    ended = artefacts.publish_model((1, 1), TerminationMessage(outcome=Outcome.SUCCEEDED))
    job["status"] = {"output": {"uri": ended.model_uri, "digest": ended.model_digest}}
    return Job.of(FakeApi(), job)


def uri_of(job: Job) -> str:
    assert job.seen.status.output is not None
    return job.seen.status.output.uri


def arrived(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("folder", ["runs", "my runs", "50%20"])
def test_what_the_manifest_names_arrives(tmp_path: Path, folder: str) -> None:
    """Not what an earlier export left there, and what a killed server did."""
    there = tmp_path / folder
    (there / "model").mkdir(parents=True)
    (there / "model" / "model.weights.h5").write_bytes(b"of a worker that was lost")
    (there / "model" / ".model.keras.ps-0-aaaaaaaa.bbbbbbbb.part").write_bytes(b"of a killed server")
    job = in_a_folder(there, saved_model__apb=b"graph", model=b"weights")
    here = download(uri_of(job), tmp_path / "here", job, FakeApi())
    assert {name: content for name, content in arrived(here).items() if name != "manifest.json"} == {
        "saved_model/apb": b"graph",
        "model": b"weights",
    }
    assert (here / "manifest.json").read_bytes() == (there / "model" / "manifest.json").read_bytes()


def cut(there: Path) -> None:
    (there / "model").write_bytes(b"weig")


def lost(there: Path) -> None:
    (there / "model").unlink()


def torn(there: Path) -> None:
    (there / "manifest.json").write_bytes(b'{"files": [')


def of_another(there: Path) -> None:
    (there / "manifest.json").write_bytes(b'{"files": [], "outcome": {"modelDigest": "e"}}')


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "^model did not arrive as the job exported it"),
        (lost, "cannot read file://.*/model/model: FileNotFoundError"),
        (torn, "manifest.json is not of a model"),
        (of_another, "is of another model than this job's"),
    ],
)
def test_what_is_not_what_the_job_exported_does_not_arrive(
    tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    job = in_a_folder(tmp_path / "runs", model=b"weights")
    spoil(tmp_path / "runs" / "model")
    with pytest.raises(Unavailable, match=words):
        download(uri_of(job), tmp_path / "here", job, FakeApi())
    assert not (tmp_path / "here").exists() or arrived(tmp_path / "here") == {}


def test_a_full_disk_here_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path: Path, mode: str = "r", *args: object) -> io.BytesIO:
        if mode == "rb":
            raise FileNotFoundError
        assert (path.name, mode) == ("model", "wb")
        return Full()

    job = in_a_folder(tmp_path / "runs", model=b"weights")
    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(UsageError, match=f"^cannot write {tmp_path}/here/model: No space left on device$"):
        download(uri_of(job), tmp_path / "here", job, FakeApi())


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            PermissionError("AccessDenied"),
            Unavailable,
            "cannot read s3://b/model: PermissionError: AccessDenied",
        ),
        (ImportError("Install s3fs"), UsageError, r"Install s3fs.*pip install '.\[s3\]' in a checkout"),
    ],
)
def test_what_cannot_be_read_leaves_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], words: str
) -> None:
    def away(*_: object) -> None:
        raise error

    monkeypatch.setattr("fsspec.core.url_to_fs", away)
    with pytest.raises(kind, match=words):
        download("s3://b/model", tmp_path / "here", job_with(), FakeApi())
    assert not (tmp_path / "here").exists()


def test_a_folder_without_files_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(Unavailable, match=r"manifest\.json: FileNotFoundError"):
        download(f"file://{tmp_path}/empty", tmp_path / "here", job_with(), FakeApi())
    assert not (tmp_path / "here").exists()


PATH = "/var/run/shoal/storage/team/digits/u/model"
URI = f"file://{PATH}"
FOLDER = "/claim/team/digits/u/model"


def in_a_claim(**files: bytes) -> tuple[FakeApi, Job]:
    """A job whose model has these files, with `.` for `__`."""
    api, made = FakeApi(), job_manifest()
    listed = [
        {"name": name.replace("__", "/"), "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]
    made["spec"]["storage"] = {"volumeClaim": {"name": "runs"}}
    servers = {
        "containers": [{"name": "ps", "image": "r.io/ps:1"}],
        "imagePullSecrets": [{"name": "registry"}],
    }
    made["spec"]["parameterServers"] = {"template": {"spec": servers}}
    made["status"] = {"output": {"uri": URI, "digest": "d"}}
    api.files = {f"{FOLDER}/{each['name']}": files[each["name"].replace("/", "__")] for each in listed}
    api.files[f"{FOLDER}/manifest.json"] = json.dumps(
        {"files": listed, "outcome": {"modelDigest": "d"}}
    ).encode()
    return api, Job.of(api, made)


def test_a_model_in_a_claim_arrives_through_a_pod_that_is_deleted(tmp_path: Path) -> None:
    """It runs as the job's parameter servers do: from a private registry, too."""
    api, job = in_a_claim(model=b"weights", saved_model__variables=b"of it")
    api.phases = ["Pending", "Pending"]
    pods: list[dict[str, Any]] = []
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        pods.extend(each for each in api.objects.values() if each["kind"] == "Pod")

    with reading(PATH, job, api, sleep=sleep) as read:
        copy(read, URI, tmp_path / "here", "d")
    assert (tmp_path / "here" / "model").read_bytes() == b"weights"
    assert (tmp_path / "here" / "saved_model" / "variables").read_bytes() == b"of it"
    assert api.names() == []
    assert waits == [0.25, 0.5]
    spec = pods[0]["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["containers"][0]["image"] == "r.io/ps:1"
    assert spec["containers"][0]["volumeMounts"] == [
        {"name": "claim", "mountPath": "/claim", "readOnly": True}
    ]
    assert JOB not in pods[0]["metadata"].get("labels", {}), "the operator would take it for a pod of the job"


POOL = "/apis/shoal.dev/v1alpha1/capacitypools/servers"


def on_a_pool(api: FakeApi) -> Job:
    """A job whose parameter servers ran on the nodes of a CapacityPool, from images of one architecture."""
    made = job_manifest()
    mine: dict[str, Any] = {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "securityContext": {"fsGroup": 1000},
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
        },
    }
    made["spec"]["parameterServers"] = {"pools": ["other", "servers"], "template": {"spec": mine}}
    images = {
        "ps": "r.io/ps:1",
        "worker": "r.io/w:1",
        "nodeSelector": {"kubernetes.io/arch": "amd64", "disk": "any"},
    }
    slots = [{"index": 0, "pool": "workers"}, {"role": "ps", "index": 0, "state": "Ended", "pool": "servers"}]
    made["status"] = {"images": images, "slots": slots}
    api.objects[POOL] = {
        "kind": "CapacityPool",
        "metadata": {"name": "servers"},
        "spec": {
            "limits": {"nodes": 4},
            "nodeSelector": {"pool": "servers"},
            "tolerations": [{"key": "servers", "operator": "Exists", "effect": "NoSchedule"}],
        },
    }
    return Job.of(api, made)


def test_the_pod_may_run_where_the_servers_did() -> None:
    """Their nodes may be the only ones that have the volume, and of the architecture of their image."""
    api = FakeApi()
    spec = manifest(on_a_pool(api), "runs", api)["spec"]
    assert spec["containers"][0]["image"] == "r.io/ps:1"
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64", "pool": "servers", "disk": "ssd"}
    assert [each["key"] for each in spec["tolerations"]] == ["servers", "team"]
    assert "nodeAffinity" in spec["affinity"]
    said = spec["securityContext"]
    assert (said["fsGroup"], said["runAsNonRoot"]) == (1000, True), (
        "as their template says, over what Shoal does"
    )


@pytest.mark.parametrize("error", [Forbidden("you may not get capacitypools"), NotFound("not found")])
def test_a_pool_that_cannot_be_read_does_not_keep_the_model(error: ClusterError) -> None:
    api = FakeApi()
    api.fails["GET", "servers"] = error
    spec = manifest(on_a_pool(api), "runs", api)["spec"]
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64", "disk": "ssd"}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda api: api.phases.extend(["Pending"] * 100),
            "does not run after 18. s: 0/1 nodes are available",
        ),
        (lambda api: api.phases.append("Failed"), "does not run after 0 s"),
        (
            lambda api: api.files.update({f"{FOLDER}/model": b"broken"}),
            "did not arrive as the job exported it",
        ),
        (lambda api: api.files.pop(f"{FOLDER}/manifest.json"), "failed"),
        (
            lambda api: api.files.update(
                {f"{FOLDER}/manifest.json": b'{"files": [], "outcome": {"modelDigest": "e"}}'}
            ),
            "is of another model than this job's",
        ),
        (
            lambda api: api.files.update(
                {
                    f"{FOLDER}/manifest.json": b'{"files": [{"name": "../../x", "sha256": "0"}], "outcome": '
                    b'{"modelDigest": "d"}}'
                }
            ),
            "lies outside of it",
        ),
    ],
)
def test_whatever_happens_the_pod_is_deleted(
    tmp_path: Path, spoil: Callable[[FakeApi], object], words: str
) -> None:
    api, job = in_a_claim(model=b"weights")
    spoil(api)
    with (
        pytest.raises(Unavailable, match=words),
        reading(PATH, job, api, sleep=lambda _: None) as read,
    ):
        copy(read, URI, tmp_path / "here", "d")
    assert api.names() == []
    assert not (tmp_path / "here" / "model").exists()


def test_a_model_on_a_volume_that_the_template_mounts_is_not_lost(tmp_path: Path) -> None:
    job = job_with(storage={"uri": "file:///mnt/nfs/runs"})
    with pytest.raises(UsageError, match="lies in /mnt/nfs/runs/team/digits/u/model, on a volume") as told:
        download("file:///mnt/nfs/runs/team/digits/u/model", tmp_path / "here", job, FakeApi())
    assert "ephemeral" not in str(told.value)


def test_a_model_that_went_with_its_pod_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="storage: ephemeral"):
        download(URI, tmp_path / "here", job_with(storage={"ephemeral": {}}), FakeApi())


@pytest.mark.parametrize(
    "error", [Unavailable("nobody answers"), NotFound('pods "x" not found'), Forbidden("cannot delete")]
)
def test_a_model_that_has_arrived_is_there_although_its_pod_stays(
    tmp_path: Path, error: ClusterError, caplog: pytest.LogCaptureFixture
) -> None:
    api, job = in_a_claim(model=b"weights")
    api.delete = Mock(side_effect=error)  # type: ignore[method-assign]
    assert (download(URI, tmp_path / "here", job, api) / "model").read_bytes() == b"weights"
    assert ("stays for at most an hour" in caplog.text) == (not isinstance(error, NotFound))


def test_a_copy_that_broke_is_told_where_its_pod_is_gone(tmp_path: Path) -> None:
    api, job = in_a_claim(model=b"weights")
    api.delete = Mock(side_effect=NotFound('pods "x" not found'))  # type: ignore[method-assign]
    api.run = Mock(side_effect=Unavailable("the connection to the pod x broke"))  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="broke"):
        download(URI, tmp_path / "here", job, api)


def exported(model: bytes, *more: str) -> dict[str, bytes]:
    """The files of a model, by name, with their manifest."""
    files = {"model.keras": model, "weights/0": b"of " + model} | dict.fromkeys(more, b"more of " + model)
    listed = [{"name": name, "sha256": hashlib.sha256(each).hexdigest()} for name, each in files.items()]
    return files | {"manifest.json": json.dumps({"outcome": {"modelDigest": "d"}, "files": listed}).encode()}


@pytest.mark.parametrize("breaks", ["model.keras", "weights/0"])
def test_a_model_that_does_not_arrive_leaves_the_one_that_is_there(tmp_path: Path, breaks: str) -> None:
    """No mixture of both, either, which nothing would tell; then the new one replaces it, and nothing else."""
    old, new = exported(b"yesterday's"), exported(b"today's")

    def read(name: str) -> Iterator[bytes]:
        yield new[name][:2]
        if name == breaks:
            raise Unavailable("the connection to the pod broke")
        yield new[name][2:]

    (tmp_path / "notes").write_bytes(b"mine")
    copy(lambda name: [old[name]], "s3://b/m", tmp_path, "d")
    with pytest.raises(Unavailable, match="broke"):
        copy(read, "s3://b/m", tmp_path, "d")
    assert arrived(tmp_path) == old | {"notes": b"mine"}
    copy(lambda name: [new[name]], "s3://b/m", tmp_path, "d")
    assert arrived(tmp_path) == new | {"notes": b"mine"}
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        {*new, "notes", "weights"} - {"weights/0"}
    )


def test_what_only_the_earlier_model_had_goes_with_it(tmp_path: Path) -> None:
    """Keras could not export the new one: a server went on with the old saved_model beside it."""
    saved = "saved_model/saved_model.pb", "saved_model/variables/0"
    old, new = exported(b"yesterday's", *saved, "assets/mine"), exported(b"today's", "assets")
    copy(lambda name: [old[name]], "s3://b/m", tmp_path, "d")
    (tmp_path / "notes").write_bytes(b"mine")
    copy(lambda name: [new[name]], "s3://b/m", tmp_path, "d")
    assert arrived(tmp_path) == new | {"notes": b"mine"}
    assert not (tmp_path / "saved_model").exists()


@pytest.mark.parametrize("ends_at", [0, 1, 2])
def test_an_earlier_manifest_never_stands_beside_files_of_a_newer_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_at: int
) -> None:
    """Whoever reads it would take the mixture for the old model."""
    old, new, renamed = exported(b"yesterday's"), exported(b"today's"), list[Path]()
    copy(lambda name: [old[name]], "s3://b/m", tmp_path, "d")
    real = Path.replace

    def replace(path: Path, here: Path) -> Path:
        if len(renamed) == ends_at:
            raise KeyboardInterrupt
        renamed.append(here)
        return real(path, here)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        copy(lambda name: [new[name]], "s3://b/m", tmp_path, "d")
    assert not (tmp_path / "manifest.json").exists()
    monkeypatch.undo()
    copy(lambda name: [new[name]], "s3://b/m", tmp_path, "d")
    assert arrived(tmp_path) == new


def test_a_folder_of_the_model_may_lie_on_another_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, real = exported(b"new"), Path.replace

    def replace(path: Path, here: Path) -> Path:
        if here.parent.name == "weights":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return real(path, here)

    monkeypatch.setattr(Path, "replace", replace)
    copy(lambda name: [new[name]], "s3://b/m", tmp_path, "d")
    assert arrived(tmp_path) == new


def test_what_a_killed_download_left_goes_with_the_next_one(tmp_path: Path) -> None:
    """Each left a hidden folder of its own, until the volume was full."""

    def killed(name: str) -> Iterator[bytes]:
        if name == "manifest.json":
            yield exported(b"new")[name]
        else:
            left.append({str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*")})
            raise Unavailable("the connection to the pod broke")

    left: list[set[str]] = []
    for of_the_killed in (None, b"half of a model"):
        if of_the_killed:
            (tmp_path / ".shoal-model" / "weights").mkdir(parents=True)
            (tmp_path / ".shoal-model" / "weights" / "0").write_bytes(of_the_killed)
        with pytest.raises(Unavailable, match="broke"):
            copy(killed, "s3://b/m", tmp_path, "d")
    assert left == [{".shoal-model", ".shoal-model/model.keras"}] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", [b"", 4095 * b"\0", b'{"run":"u","files":[{"na'])
def test_a_manifest_that_a_loss_of_power_broke_is_replaced(tmp_path: Path, broken: bytes) -> None:
    new = exported(b"new")
    (tmp_path / "manifest.json").write_bytes(broken)
    copy(lambda name: [new[name]], "s3://b/m", tmp_path, "d")
    assert arrived(tmp_path) == new


@pytest.mark.parametrize("theirs", ['{"name": "a web page"}', '{"outcome": {}}', "[]", "// with remarks\n{}"])
def test_a_manifest_of_something_else_is_not_replaced(tmp_path: Path, theirs: str) -> None:
    """A common name: a web page's project has one."""
    (tmp_path / "manifest.json").write_text(theirs)
    with pytest.raises(UsageError, match=r"manifest.json is not of a model: choose another folder"):
        copy(lambda name: [exported(b"new")[name]], "s3://b/m", tmp_path, "d")
    assert arrived(tmp_path) == {"manifest.json": theirs.encode()}
