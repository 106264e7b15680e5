"""A parameter server survives errors of other processes."""

import pytest

from shoal_trainer.contract import JobIdentity, Role, RuntimeConfig, Shard, StopAfter
from shoal_trainer.security import create_secret_dir
from shoal_trainer.serve import ParameterServer


@pytest.fixture
def server(tmp_path):
    """PS `index` of two, not started."""
    create_secret_dir(tmp_path / "secret")

    def make(index):
        return ParameterServer(
            RuntimeConfig(
                job=JobIdentity(namespace="n", name="j", uid="u"),
                role=Role.PS,
                index=index,
                incarnation=0,
                parameter_servers=(Shard(host="127.0.0.1"),) * 2,
                entrypoint="a:b",
                batch_size=2,
                stop_after=StopAfter(epochs=1),
                storage_uri=(tmp_path / "storage").as_uri(),
                secret_dir=str(tmp_path / "secret"),
            )
        )

    return make


def test_unexpected_error_in_the_final_snapshot_is_logged(server, monkeypatch, caplog):
    started = server(0)
    monkeypatch.setattr(started.service.snapshotter, "take", lambda: 1 / 0)
    started._final_snapshot()
    assert "cannot take a final snapshot" in caplog.text
