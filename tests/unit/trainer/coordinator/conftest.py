"""Starts control servers and closes them after the test."""

import pytest

from tests.unit.trainer.coordinator.served import Served


@pytest.fixture
def start_server(tmp_path):
    servers = []

    def make(**options):
        servers.append(Served(tmp_path / f"secret{len(servers)}", **options))
        return servers[-1]

    yield make
    for served in servers:
        served.server.close()
