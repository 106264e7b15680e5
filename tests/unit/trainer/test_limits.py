"""The trainer's limits suffice for the largest job that the CRD allows."""

import resource
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from shoal_trainer.contract import MAX_SHARDS, MAX_WORKERS
from shoal_trainer.coordinator import http
from shoal_trainer.ps import server
from shoal_trainer.serve import OPEN_FILES, allow_open_files
from shoal_trainer.wire.messages import MAX_APPLIED

CRD = Path(__file__).parents[3] / "crds" / "shoal.dev_trainingjobs.yaml"
CONTROL_CONNECTIONS = 2
"""Per worker: one for requests, one for heartbeats."""
SPARE = 100
"""Uploads, the operator's status requests, other shards, and half-open connections."""


@pytest.fixture(scope="module")
def spec():
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]


@pytest.fixture(scope="module")
def workers(spec):
    """The largest number of workers at once, with the default surge."""
    fields = spec["workers"]["properties"]
    replicas = fields["replicas"]["maximum"]
    return int(replicas * (1 + Fraction(fields["maxSurge"]["default"].removesuffix("%")) / 100))


def test_connection_limits_fit_the_largest_job(workers):
    assert workers >= 1000
    assert workers + SPARE <= server.MAX_CONNECTIONS
    assert CONTROL_CONNECTIONS * workers + SPARE <= http.MAX_CONNECTIONS
    assert server.MAX_CONNECTIONS + http.MAX_CONNECTIONS <= OPEN_FILES


def test_report_limits_fit_the_largest_job(spec, workers):
    assert spec["workers"]["properties"]["replicas"]["maximum"] <= MAX_WORKERS
    assert spec["parameterServers"]["properties"]["replicas"]["maximum"] <= MAX_SHARDS
    assert workers <= MAX_APPLIED


def test_open_file_limit_is_raised_up_to_the_hard_limit():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = before[1]
    limit = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limit), hard))
        allow_open_files(4096)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, hard)
        allow_open_files(2048)  # never lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
