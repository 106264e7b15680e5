"""The trainer's limits hold for the largest job that the CRD takes."""

import resource
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from shoal_trainer.coordinator import http, report
from shoal_trainer.ps import server
from shoal_trainer.serve import OPEN_FILES, allow_open_files
from shoal_trainer.wire.messages import MAX_APPLIED

CRD = Path(__file__).parents[3] / "crds" / "shoal.dev_trainingjobs.yaml"
CONTROL_CONNECTIONS = 2
"""Of each worker: one that asks, one for its heartbeats."""
SPARE = 100
"""Uploads, the operator's status, other shards, connections whose other end died a moment ago."""


@pytest.fixture(scope="module")
def spec():
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]


@pytest.fixture(scope="module")
def workers(spec):
    """As many as there may be at once, with the usual surge."""
    of = spec["workers"]["properties"]
    most = of["replicas"]["maximum"]
    return int(most * (1 + Fraction(of["maxSurge"]["default"].removesuffix("%")) / 100))


def test_connection_limits_fit_the_largest_job(workers):
    assert workers >= 1000
    assert workers + SPARE <= server.MAX_CONNECTIONS
    assert CONTROL_CONNECTIONS * workers + SPARE <= http.MAX_CONNECTIONS
    assert server.MAX_CONNECTIONS + http.MAX_CONNECTIONS <= OPEN_FILES


def test_report_limits_fit_the_largest_job(spec, workers):
    assert spec["workers"]["properties"]["replicas"]["maximum"] <= report.MAX_WORKERS
    assert workers <= MAX_APPLIED


def test_open_file_limit_is_raised_up_to_the_hard_limit():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = before[1]
    most = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, most), hard))
        allow_open_files(4096)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        allow_open_files(2048)  # never fewer
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
