"""Starts control servers and closes them after the test."""

import pytest

from tests.unit.trainer.coordinator.served import Served


@pytest.fixture
def start_server(tmp_path):
    made = []

    def make(**options):
        made.append(Served(tmp_path / f"secret{len(made)}", **options))
        return made[-1]

    yield make
    for served in made:
        served.server.close()
