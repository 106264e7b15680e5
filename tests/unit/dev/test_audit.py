"""Reading the audit log, and the demo's figures from it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dev.audit import AuditTail, Write, creates, writes
from dev.demo.faults import Fault
from dev.demo.figures import replacements
from dev.errors import DevError

START = datetime(2026, 1, 1, tzinfo=UTC)


def event(seconds: float, verb: str, resource: str, name: str, **more: Any) -> dict[str, Any]:
    instant = (START + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
    reference = {"resource": resource, "namespace": "default", "name": name, **more.pop("reference", {})}
    return {
        "verb": verb,
        "user": {"username": "user"},
        "objectRef": reference,
        "responseStatus": {"code": more.pop("code", 201)},
        "requestReceivedTimestamp": instant,
        "stageTimestamp": instant,
    }


def test_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    assert list(writes(log)) == []
    whole = json.dumps(event(1.25, "create", "pods", "a"))
    log.write_text(whole + "\n" + whole[:40])
    assert [(w.name, w.received - START) for w in writes(log)] == [("a", timedelta(seconds=1.25))]


def test_rotated_log_is_refused(tmp_path: Path) -> None:
    """Whoever judges by it would judge nothing, and find nothing wrong."""
    log = tmp_path / "audit.log"
    lines = [json.dumps(event(1, "create", "pods", name)) + "\n" for name in ("a", "b")]
    log.write_text("".join(lines))
    tail, later = AuditTail(log), AuditTail.from_now(log)
    assert [each.name for each in tail.read()] == ["a", "b"]
    assert later.read() == []
    log.write_text(lines[0])
    with pytest.raises(DevError, match="was rotated"):
        tail.read()


def test_creates_returns_accepted_creations_of_resource_only(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    events = [
        event(1, "create", "pods", "a"),
        event(2, "create", "pods", "refused", code=403),
        event(3, "create", "pods", "a", reference={"subresource": "binding"}),
        event(4, "patch", "pods", "a"),
    ]
    log.write_text("".join(json.dumps(e) + "\n" for e in events))
    assert [w.name for w in creates(log, "pods")] == ["a"]
    assert creates(log, "pods", namespace="other") == []
    assert [w.name for w in writes(log, namespace="default")] == ["a", "refused", "a", "a"]
    assert list(writes(log, namespace="refused")) == []


def test_reaction_time_counts_from_first_signal_to_cluster() -> None:
    log = [
        Write.parse(e)
        for e in (
            event(9.9, "patch", "nodes", "spot-1", reference={"subresource": "status"}, code=200),
            event(10.2, "patch", "nodes", "spot-1", reference={"subresource": "status"}, code=200),
            event(10.3, "create", "pods", "digits-worker-0-1"),
            event(10.4, "create", "pods", "digits-worker-0-1", reference={"subresource": "binding"}),
            event(5.0, "create", "pods", "digits-worker-1-1"),  # at a notice that was withdrawn
            event(37.5, "create", "pods", "digits-worker-1-2"),
            event(38.0, "create", "pods", "digits-worker-10-1"),
        )
    ]
    faults = [
        Fault("node reclaimed with notice", "spot-1", START + timedelta(seconds=10), ((0, 0),)),
        Fault("parameter server killed", "digits-ps-0-0", START + timedelta(seconds=20)),
        Fault("node lost without notice", "spot-2", START + timedelta(seconds=30), ((1, 0), (2, 0))),
    ]
    found = replacements(faults, log, "digits")
    assert [(r.place, round(r.seconds, 3)) for r in found] == [((0, 1), 0.1), ((1, 2), 7.5)]


def test_pod_whose_creator_hung_up_counts_if_it_lived() -> None:
    """An operator on the node that goes may end before it has the answer: the log has 504 in either case."""
    log = [
        Write.parse(e)
        for e in (
            event(10.1, "create", "pods", "digits-worker-0-1", code=504),
            event(10.2, "create", "pods", "digits-worker-1-1", code=504),
            event(10.3, "create", "pods", "digits-worker-1-1", reference={"subresource": "binding"}),
            event(10.4, "create", "pods", "digits-worker-1-2"),
            event(10.5, "create", "pods", "digits-worker-0-2"),
        )
    ]
    fault = Fault("node lost without notice", "spot-1", START + timedelta(seconds=10), ((0, 0), (1, 0)))
    found = replacements([fault], log, "digits")
    assert [(r.place, round(r.seconds, 3)) for r in found] == [((0, 2), 0.5), ((1, 1), 0.2)]
