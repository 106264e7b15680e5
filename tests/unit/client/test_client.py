"""What `submit` leaves behind when a request fails, and which pools an accelerator stands for."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import shoal
from shoal.client import Client
from shoal.client.api import refusal
from shoal.errors import ClusterError, Forbidden, NotFound, Refused, Unavailable, UsageError
from tests.unit.client.fake_api import FakeApi, client_of

LOST = Unavailable("the API server does not answer: Read timed out.")
BOTH = ["ConfigMap/digits-code-0", "TrainingJob/digits"]


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def client(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    (tmp_path / "digits.py").write_text("job = 1\n")
    monkeypatch.chdir(tmp_path)
    salts = map(str, count())
    monkeypatch.setattr("shoal.client.manifest.secrets.token_hex", lambda _: next(salts))
    return client_of(api)


def test_a_notebook_has_it_from_shoal_and_the_operator_does_without() -> None:
    assert shoal.Client is Client
    with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
        _ = shoal.Cleint
    of_the_operator = "import sys, shoal.process.main; sys.exit('shoal.client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", of_the_operator], check=False).returncode == 0


def submit(client: Client) -> None:
    client.submit("digits.py:job", storage="ephemeral", name="digits")


def test_code_belongs_to_its_job_from_the_beginning(client: Client, api: FakeApi) -> None:
    submit(client)
    assert api.names() == BOTH
    code = api.objects["/api/v1/namespaces/team/configmaps/digits-code-0"]
    assert [each["uid"] for each in code["metadata"]["ownerReferences"]] == ["uid-digits"]


def test_a_name_is_free_as_soon_as_its_job_is_deleted(client: Client, api: FakeApi) -> None:
    """The garbage collector takes the old job's code a while later, and nobody that of a manifest from `init`."""
    submit(client)
    api.delete("/apis/shoal.dev/v1alpha1/namespaces/team/trainingjobs/digits")
    submit(client)
    first, second = (each for each in api.objects.values() if each["kind"] == "ConfigMap")
    assert first["data"] == second["data"]
    job = api.objects["/apis/shoal.dev/v1alpha1/namespaces/team/trainingjobs/digits"]
    assert job["spec"]["training"]["code"] == {"configMap": second["metadata"]["name"]}
    with pytest.raises(Refused, match='trainingjobs "digits" already exists: choose another name'):
        submit(client)


@pytest.mark.parametrize("plural", ["trainingjobs", "configmaps"])
def test_an_answer_that_is_lost_changes_nothing(client: Client, api: FakeApi, plural: str) -> None:
    api.fails["POST", plural], api.stored = LOST, True
    submit(client)
    assert api.names() == BOTH


@pytest.mark.parametrize("plural", ["trainingjobs", "configmaps"])
@pytest.mark.parametrize("error", [LOST, Refused("you may not create it"), KeyboardInterrupt()])
def test_a_failed_submission_leaves_nothing(
    client: Client, api: FakeApi, plural: str, error: ClusterError | KeyboardInterrupt
) -> None:
    api.fails["POST", plural] = error
    api.stored = isinstance(error, KeyboardInterrupt) and plural == "trainingjobs"
    with pytest.raises(type(error)):
        submit(client)
    assert api.names() == []


def test_code_that_is_refused_is_refused_before_there_is_a_job(
    client: Client, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By submit, which the operator would otherwise see create a job and delete it, and by its --dry-run."""
    api.fails["dry-run", "configmaps"] = Refused("exceeded quota: count/configmaps")
    monkeypatch.setattr(api, "delete", lambda path: pytest.fail(f"{path} was created"))
    with pytest.raises(Refused, match="exceeded quota"):
        submit(client)
    with pytest.raises(Refused, match="exceeded quota"):
        client.check(client.prepare("digits.py:job", storage="ephemeral", name="digits"))
    assert api.names() == []


def test_who_cannot_know_says_so(client: Client, api: FakeApi) -> None:
    api.fails |= {("POST", "trainingjobs"): LOST, ("GET", "digits"): LOST}
    api.stored = True
    with pytest.raises(Unavailable, match="Whether digits was created is not known"):
        submit(client)


def pool(name: str, accelerator: str, count: int) -> dict[str, Any]:
    spec = {"accelerator": {"name": accelerator, "count": count}, "limits": {"nodes": 4}}
    return {"kind": "CapacityPool", "metadata": {"name": name}, "spec": spec, "newer": 1}


@pytest.mark.parametrize(
    ("among", "expected"),
    [((), ["l4-1", "l4-8"]), (["l4-8"], ["l4-8"]), (["l4-8", "t4", "l4-1"], ["l4-8", "l4-1"])],
)
def test_an_accelerator_stands_for_the_pools_that_have_it(
    client: Client, api: FakeApi, among: list[str], expected: list[str]
) -> None:
    known(api, pool("l4-1", "L4", 1), pool("l4-8", "L4", 8), pool("t4", "T4", 1))
    assert pools_of(client, pools=among) == {"replicas": 1, "pools": expected}


def known(api: FakeApi, *pools: dict[str, Any]) -> None:
    for each in pools:
        api.objects[f"/apis/shoal.dev/v1alpha1/capacitypools/{each['metadata']['name']}"] = each


def pools_of(client: Client, **more: Any) -> dict[str, Any]:
    """What the workers of a job with this accelerator get, but for their image."""
    made = client.prepare(
        "digits.py:job", storage="ephemeral", accelerator="l4", image="r.io/worker-gpu:1", **more
    )
    workers: dict[str, Any] = made.job["spec"]["workers"]
    return {key: value for key, value in workers.items() if key != "template"}


def priced(name: str, price: str, kind: str, count: int = 1) -> dict[str, Any]:
    made = pool(name, "L4", count)
    made["spec"] |= {"capacityType": kind} | ({"price": {"perHour": price}} if price else {})
    return made


PRICED = (
    priced("a-on-demand", "0.70", "OnDemand"),
    priced("b-unpriced", "", "Spot"),
    priced("c-spot", "0.28", "Spot"),
    priced("d-spot-of-8", "1.60", "Spot", 8),
    priced("e-on-demand", "0.60", "OnDemand"),
)
SPOT = ["d-spot-of-8", "c-spot", "b-unpriced"]
ON_DEMAND = ["e-on-demand", "a-on-demand"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [*SPOT, *ON_DEMAND]),
        ({"capacity": "Any"}, [*SPOT, *ON_DEMAND]),
        ({"capacity": "Spot"}, SPOT),
        ({"capacity": "OnDemand"}, ON_DEMAND),
        ({"capacity": "Spot", "pools": ["a-on-demand", "c-spot", "d-spot-of-8"]}, ["c-spot", "d-spot-of-8"]),
    ],
)
def test_spot_comes_first_then_what_costs_less_and_capacity_chooses(
    client: Client, api: FakeApi, more: dict[str, Any], expected: list[str]
) -> None:
    """The pools of a job are in order of preference: the first is filled first. Prices are of one accelerator."""
    known(api, *PRICED)
    assert pools_of(client, **more) == {"replicas": 1, "pools": expected}


def test_an_accelerator_that_only_other_nodes_have_is_told(client: Client, api: FakeApi) -> None:
    known(api, PRICED[0])
    with pytest.raises(
        UsageError, match="no CapacityPool of Spot nodes has the accelerator l4: there is none"
    ):
        pools_of(client, capacity="Spot")


def test_pools_say_themselves_what_their_nodes_are(client: Client) -> None:
    with pytest.raises(UsageError, match=r"leave out capacity=… \(--capacity\)"):
        client.prepare("digits.py:job", storage="ephemeral", pools=["a"], capacity="Spot")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epoch": 3}, "epoch: there is no such argument: check its spelling"),
        ({"workers": 2.5}, "workers: input should be a valid integer"),
        ({"workers": "many"}, "workers: input should be a valid integer"),
        ({"pools": "spot"}, "pools: 'str' instances are not allowed"),
        ({"files": "helpers.py"}, "files: 'str' instances are not allowed"),
        ({"until": "val_accuracy=0.9"}, "until: input should be a valid tuple"),
        ({"until": ("val_accuracy", "most")}, "until.1: input should be a valid number"),
        ({"template": 3}, "template"),
        ({"mode": "up"}, "mode: input should be 'Min' or 'Max', not 'up'"),
    ],
)
def test_an_argument_of_another_type_is_named(client: Client, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        client.submit("digits.py:job", storage="ephemeral", **changes)
    assert str(refused.value).startswith(f"submit(): {words}")


def test_numbers_may_be_written_as_people_do(client: Client) -> None:
    more: dict[str, Any] = {"workers": "4", "max_workers": 8, "max_cost": 4.5, "pools": ["t4"]}
    spec = client.prepare("digits.py:job", storage="ephemeral", **more).job["spec"]
    assert spec["workers"]["replicas"] == 4
    assert spec["elasticity"]["objective"] == {"maxCost": 4.5}


def test_a_pool_that_is_not_there_is_named_before_anything_is_created(client: Client, api: FakeApi) -> None:
    api.objects["/apis/shoal.dev/v1alpha1/capacitypools/t4"] = pool("t4", "T4", 1)
    with pytest.raises(UsageError, match="no CapacityPool nosuch: there are t4"):
        client.submit("digits.py:job", storage="ephemeral", pools=["t4", "nosuch"])
    assert api.names() == ["CapacityPool/t4"]
    client.submit("digits.py:job", storage="ephemeral", name="digits", pools=["t4"], image="r.io/w:1")
    assert "TrainingJob/digits" in api.names()


def test_who_may_not_read_pools_is_not_asked_for_them(client: Client, api: FakeApi) -> None:
    api.fails["GET", "capacitypools"] = Forbidden("you may not list capacitypools")
    client.submit("digits.py:job", storage="ephemeral", name="digits", pools=["nosuch"])
    assert "TrainingJob/digits" in api.names()


def test_a_namespace_that_is_not_there_is_not_one_without_jobs(client: Client, api: FakeApi) -> None:
    assert client.list() == []
    api.fails["GET", "team"] = NotFound('namespaces "team" not found')
    for ask in (client.list, client.names, lambda: client.job("digits")):
        with pytest.raises(NotFound, match='namespaces "team" not found'):
            ask()
    api.fails["GET", "team"] = Forbidden("you may not read namespaces")
    assert client.list() == []


def test_a_job_that_is_there_is_checked_as_a_new_one(client: Client, api: FakeApi) -> None:
    submit(client)
    client.check(client.prepare("digits.py:job", storage="ephemeral", name="digits"))
    assert api.names() == BOTH
    api.fails["dry-run", "trainingjobs"] = Refused("mode is required for this metric")
    with pytest.raises(Refused, match="mode is required"):
        client.check(client.prepare("digits.py:job", storage="ephemeral"))


def test_no_such_job(client: Client) -> None:
    submit(client)
    with pytest.raises(NotFound, match="no job 'digit': the namespace team has digits"):
        client.job("digit")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            'capacitypools.shoal.dev is forbidden: "a" cannot list … at the cluster scope',
            "shoal-capacitypools-view",
        ),
        (
            'trainingjobs.shoal.dev is forbidden: "a" cannot list … at the cluster scope',
            "one namespace with -n",
        ),
        (
            'trainingjobs.shoal.dev is forbidden: "a" cannot list … in the namespace "b"',
            "role edit includes its jobs",
        ),
    ],
)
def test_a_right_that_is_missing_is_said_with_what_has_it(words: str, advice: str) -> None:
    assert advice in str(refusal(403, json.dumps({"message": words}).encode(), "/apis/…"))


def test_an_empty_name_is_no_job(client: Client) -> None:
    with pytest.raises(UsageError, match="the job's name is empty"):
        client.job("")


@pytest.mark.parametrize("heard", [True, False])
def test_a_job_that_is_left_without_its_code_is_named(tmp_path: Path, heard: bool) -> None:
    """Its pods would wait for the code for ever, and their nodes be paid."""
    (tmp_path / "a.py").write_text(
        "from shoal_trainer import Training\njob = Training(model=None, data=None)\n"
    )
    api = FakeApi()
    api.fails["POST", "configmaps"] = Unavailable("the API server answered 429: too many requests.")
    if not heard:
        api.delete = Mock(side_effect=Unavailable("the API server answered 429"))  # type: ignore[method-assign]
    with pytest.raises(Unavailable) as found:
        client_of(api).submit(f"{tmp_path}/a.py:job", storage="ephemeral", name="digits")
    assert ("shoal delete digits" in str(found.value)) == any(
        "trainingjobs/digits" in each for each in api.objects
    )
    assert ("shoal delete digits -n team" in str(found.value)) == (not heard)


@pytest.mark.parametrize("again", [Unavailable("nobody answers"), KeyboardInterrupt()])
def test_an_interrupted_submit_stays_one_and_names_the_job_that_is_left(
    tmp_path: Path, again: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.py").write_text(
        "from shoal_trainer import Training\njob = Training(model=None, data=None)\n"
    )
    api = FakeApi()
    api.fails["POST", "configmaps"] = KeyboardInterrupt()
    api.delete = Mock(side_effect=again)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        client_of(api).submit(f"{tmp_path}/a.py:job", storage="ephemeral", name="digits")
    assert "shoal delete digits -n team" in caplog.text


def test_a_job_that_somebody_else_made_meanwhile_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "from shoal_trainer import Training\njob = Training(model=None, data=None)\n"
    )
    api, create = FakeApi(), FakeApi.create

    def replaced(path: str, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        if path.endswith("configmaps") and not dry_run:
            [at] = [each for each in api.objects if each.endswith("trainingjobs/digits")]
            was = api.objects[at]
            api.objects[at] = {**was, "metadata": {**was["metadata"], "uid": "another"}}
        return create(api, path, body, dry_run=dry_run)

    api.create = replaced  # type: ignore[method-assign]
    api.fails["POST", "configmaps"] = Unavailable("nobody answers")
    with pytest.raises(Unavailable) as found:
        client_of(api).submit(f"{tmp_path}/a.py:job", storage="ephemeral", name="digits")
    assert api.names() == ["TrainingJob/digits"]
    assert "shoal delete" not in str(found.value), "it is not this user's"


def test_who_may_read_only_some_jobs_is_told_that_one_is_not_there() -> None:
    api = FakeApi()
    api.fails["GET", "trainingjobs"] = Forbidden("trainingjobs is forbidden: cannot list")
    with pytest.raises(NotFound, match="no job 'digits'"):
        client_of(api).job("digits")
