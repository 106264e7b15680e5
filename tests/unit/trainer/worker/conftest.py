"""Starts parameter servers and closes them after the test."""

import pytest

from tests.unit.trainer.worker.fakes import Servers


@pytest.fixture
def start_servers(tmp_path):
    started = []

    def make(coordinator, **options):
        servers = Servers(tmp_path / f"secret{len(started)}", coordinator, **options)
        started.append(servers)
        return servers

    yield make
    for servers in started:
        servers.close()
