"""Fixtures: a storage in a folder or on an S3 server, and the snapshots in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.moto_server import threaded_moto_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import ThreadedMotoServer

from shoal_trainer.snapshot.storage import LocalStorage, RemoteStorage, Storage, open_storage
from shoal_trainer.snapshot.store import SnapshotStore


class OneAtATime(DomainDispatcherApplication):
    """As S3 has it: of two that write an object if there is none, one is refused. Moto looks first, and writes then."""

    conditional = threading.Lock()

    def __call__(self, environ: Any, start_response: Any) -> Any:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return super().__call__(environ, start_response)
        with self.conditional:
            return super().__call__(environ, start_response)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The endpoint of an S3 server on loopback."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threaded_moto_server, "DomainDispatcherApplication", OneAtATime)
        server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["file", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "file":
        return open_storage(tmp_path.as_uri(), "ns/job/uid")
    options = {"endpoint_url": request.getfixturevalue("s3"), "key": "k", "secret": "s"}
    bucket = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    storage = RemoteStorage(f"s3://{bucket}/ns/job/uid", **options)
    storage._fs.mkdir(bucket)
    return storage


@pytest.fixture
def local(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(LocalStorage(tmp_path))
