"""Settings from environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.manifests.platforms import AUTOPILOT
from shoal.process.settings import Settings


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    key = tmp_path / "key"
    key.write_bytes(b" " * 31 + b"\n")
    return {"SHOAL_INSTALL_KEY_FILE": str(key), "SHOAL_IMAGE_PS": "ps:1", "SHOAL_IMAGE_WORKER": "worker:1"}


def test_defaults(environment: dict[str, str]) -> None:
    settings = Settings.from_environment(environment)
    assert settings.install_key.secret == b" " * 31 + b"\n"  # a random key may end with whitespace
    assert (settings.images.ps, settings.images.worker) == ("ps:1", "worker:1")
    assert (settings.namespace, settings.node_signals, settings.lease_name) == ("", True, "shoal")
    assert settings.pools
    assert (settings.metrics_port, settings.health_port, settings.log_level) == (8080, 8081, "INFO")
    assert settings.identity != Settings.from_environment(environment).identity
    assert "\\n" not in repr(settings)


def test_variables_of_the_chart(environment: dict[str, str]) -> None:
    environment |= {
        "SHOAL_NAMESPACE": "ml",
        "SHOAL_NODE_SIGNALS": "false",
        "SHOAL_POOLS": "false",
        "POD_NAME": "shoal-0",
        "POD_NAMESPACE": "shoal-system",
        "SHOAL_LEASE_NAME": "mine",
        "SHOAL_METRICS_PORT": "0",
        "SHOAL_LOG_LEVEL": "debug",
        "SHOAL_LOG_FORMAT": "json",
        "SHOAL_TELEMETRY_SECONDS": "2",
        "SHOAL_PLATFORM": "autopilot",
        "SHOAL_SPOT_LABELS": "node-lifecycle=spot",
        "SHOAL_SPOT_TAINTS": "reclaimable=",
        "SHOAL_NODE_SELECTOR": "kubernetes.io/arch=amd64,team=",
    }
    settings = Settings.from_environment(environment)
    assert (settings.namespace, settings.node_signals, settings.pools) == ("ml", False, False)
    assert (settings.identity, settings.lease_namespace, settings.lease_name) == (
        "shoal-0",
        "shoal-system",
        "mine",
    )
    assert (settings.metrics_port, settings.log_level, settings.telemetry_seconds) == (0, "DEBUG", 2)
    assert settings.log_format == "json"
    assert settings.platform is AUTOPILOT
    assert settings.own_spot.spot == {"node-lifecycle": ("spot",)}
    assert settings.own_spot.taints == {"reclaimable": ""}
    assert settings.images.node_selector == {"kubernetes.io/arch": "amd64", "team": ""}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SHOAL_IMAGE_PS", "", "SHOAL_IMAGE_PS is not set"),
        ("SHOAL_NODE_SELECTOR", "amd64", "SHOAL_NODE_SELECTOR: 'amd64' must be label=value"),
        ("SHOAL_SPOT_LABELS", "spot", "SHOAL_SPOT_LABELS: 'spot' must be label=value"),
        ("SHOAL_INSTALL_KEY_FILE", "", "SHOAL_INSTALL_KEY_FILE is not set"),
        ("SHOAL_INSTALL_KEY_FILE", "/dev/null", "it needs at least 32"),
        ("SHOAL_INSTALL_KEY_FILE", "/no/such", "cannot be read: No such file"),
        ("SHOAL_NODE_SIGNALS", "perhaps", "SHOAL_NODE_SIGNALS=perhaps must be true or false"),
        ("SHOAL_PLATFORM", "moon", "SHOAL_PLATFORM=moon must be auto or one of karpenter, gke"),
        ("SHOAL_METRICS_PORT", "-1", "SHOAL_METRICS_PORT=-1 must be a non-negative integer"),
        ("SHOAL_LOG_LEVEL", "loud", "SHOAL_LOG_LEVEL=loud must be debug, info"),
        ("SHOAL_LOG_FORMAT", "xml", "SHOAL_LOG_FORMAT=xml must be text or json"),
    ],
)
def test_invalid_variable_is_named(environment: dict[str, str], name: str, value: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Settings.from_environment({**environment, name: value})
