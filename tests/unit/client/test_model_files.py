"""The model's files: from a store to a folder, and what is said where they cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.client.job import Job
from shoal.client.model_files import download
from shoal.errors import Unavailable, UsageError
from tests.unit.client.fake_api import FakeApi
from tests.unit.policy.build import job_manifest


def job_with(**spec: Any) -> Job:
    made = job_manifest()
    made["spec"] |= spec
    return Job.of(FakeApi(), made)


def test_the_files_of_a_model_arrive(tmp_path: Path) -> None:
    (tmp_path / "model" / "saved_model").mkdir(parents=True)
    (tmp_path / "model" / "saved_model" / "a.pb").write_text("weights")
    there = download(f"file://{tmp_path}/model", tmp_path / "here", job_with())
    assert (there / "saved_model" / "a.pb").read_text() == "weights"


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
        download("s3://b/model", tmp_path / "here", job_with())
    assert not (tmp_path / "here").exists()


def test_a_folder_without_files_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(Unavailable, match="there is no file"):
        download(f"file://{tmp_path}/empty", tmp_path / "here", job_with())
    assert not (tmp_path / "here").exists()


def test_the_pod_that_copies_may_pull_the_image(tmp_path: Path) -> None:
    """From a private registry, as the job's own pods."""
    containers = [{"name": "worker", "image": "registry.example.com/team/worker:1"}]
    template = {"spec": {"containers": containers, "imagePullSecrets": [{"name": "registry"}]}}
    job = job_with(storage={"volumeClaim": {"name": "runs"}}, workers={"replicas": 1, "template": template})
    with pytest.raises(UsageError) as told:
        download("file:///var/run/shoal/storage/team/digits/u/model", tmp_path, job)
    said = str(told.value)
    assert "--image=registry.example.com/team/worker:1" in said
    assert '"imagePullSecrets": [{"name": "registry"}]' in said
