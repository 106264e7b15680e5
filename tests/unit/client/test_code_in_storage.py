"""Code that is larger than a ConfigMap: into the bucket by `submit`, to the workers by parameter server 0."""

from __future__ import annotations

import contextlib
import secrets
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from shoal.client import store
from shoal.client.code import MAX_BYTES
from shoal.client.manifest import Manifests, Submission, manifests
from shoal.errors import Unavailable, UsageError
from shoal_trainer.contract import JobIdentity, Role, RuntimeConfig, Shard
from shoal_trainer.coordinator.code_server import opened
from shoal_trainer.coordinator.http import ControlServer
from shoal_trainer.errors import ProtocolError, UserError
from shoal_trainer.security import Credentials, create_secret_dir
from shoal_trainer.worker.code_client import fetch
from tests.unit.client.fake_api import FakeApi, client_of

CODE = "job = 1\n" + "\n".join(f"x = '{secrets.token_hex(1 << 15)}'" for _ in range(MAX_BYTES >> 14))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().makedirs("runs", exist_ok=True)
    yield "s3://runs/all"
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifests:
    (tmp_path / "digits.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return manifests(Submission(entrypoint="digits.py:job", storage="s3://runs/all", name="digits"))


@contextlib.contextmanager
def served(folder: Path, storage: str, digest: str) -> Iterator[RuntimeConfig]:
    """The configuration of a worker, whose coordinator serves."""
    credentials = create_secret_dir(folder)
    config = RuntimeConfig(
        job=JobIdentity(namespace="team", name="digits", uid="u"), role=Role.WORKER, index=0, incarnation=0,
        parameter_servers=(), entrypoint="digits:job", storage_uri=storage, secret_dir=str(folder), code_digest=digest,
    )  # fmt: skip
    code = partial(opened, config) if digest else None
    server = ControlServer(credentials, {}, host="127.0.0.1", code=code)
    server.start()
    try:
        yield config.model_copy(
            update={"parameter_servers": (Shard(host="127.0.0.1", control_port=server.port),)}
        )
    finally:
        server.close()


def test_from_submit_to_a_worker(bucket: str, made: Manifests, tmp_path: Path) -> None:
    api = FakeApi()
    client_of(api).create(made)
    assert api.names() == ["TrainingJob/digits"]
    assert made.code is None
    digest = made.job["spec"]["training"]["code"]["digest"]
    with served(tmp_path / "secret", bucket, digest) as config:
        path = fetch(config, Credentials.load(config.secret_dir), tmp_path)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("digits.py").decode() == CODE
    store.put(bucket, "team", made.archive or b"")  # another job with this code


def test_code_that_is_gone_or_changed_is_an_error_of_the_user(bucket: str, tmp_path: Path) -> None:
    digest = secrets.token_hex(32)
    with served(tmp_path, bucket, digest) as config:
        credentials = Credentials.load(config.secret_dir)
        with pytest.raises(UserError, match=rf"team/code-{digest}.zip, is not in its storage s3://runs/all"):
            fetch(config, credentials, tmp_path)
        s3fs.S3FileSystem().pipe_file(f"runs/all/team/code-{digest}.zip", b"other")
        with pytest.raises(UserError, match="it was changed"):
            fetch(config, credentials, tmp_path)
    with (
        served(tmp_path / "none", bucket, "") as config,
        pytest.raises(ProtocolError, match="unknown path '/v1/code'"),
    ):
        fetch(config, Credentials.load(config.secret_dir), tmp_path)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("storage", "words"),
    [("ephemeral", "storage that is ephemeral"), ("claim:runs", "a volume"), ("file:///mnt", "a volume")],
)
def test_storage_that_cannot_be_reached_from_here(made: Manifests, storage: str, words: str) -> None:
    with pytest.raises(
        UsageError, match=rf"more than the 900 KiB of a ConfigMap travel .*{words}.*Take a bucket"
    ):
        manifests(Submission(entrypoint="digits.py:job", storage=storage))


def test_a_store_that_refuses_leaves_nothing(bucket: str, made: Manifests) -> None:
    made.job["spec"]["storage"]["uri"] = "s3://no-such-bucket/all"
    api = FakeApi()
    with pytest.raises(Unavailable, match="cannot write the code to s3://no-such-bucket/all/team/code-"):
        client_of(api).create(made)
    assert api.names() == []
