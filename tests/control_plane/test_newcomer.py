"""Mistakes of a first day, each with the earliest place that tells it and the words that say what to change.

The list is one of a newcomer who made them on a real cluster. `apply`, `patch` and `scale` are kubectl's; `check` is
`shoal-trainer check`, `submit` is `shoal submit`; `status` is a condition of the job, for what only the cluster knows,
and `end` is one after a pod of it has ended.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from click.testing import CliRunner

from dev.cluster import ControlPlane
from dev.kube import Kube
from shoal.cli import main
from shoal_trainer.contract import Outcome, StopAfter, TerminationMessage
from tests.control_plane.operators import Job, eventually, running_operator
from tests.doubles.fake_kubelet import FakeKubelet


class Mistake(NamedTuple):
    """`wrong`: fields of spec; words of the command; for `check`, what SCRIPT ends with and the options; for `end`, the
    pod, its exit code and its message."""

    name: str
    place: Literal["apply", "patch", "scale", "check", "submit", "status", "end"]
    wrong: Any
    words: str


def template(**container: Any) -> dict[str, Any]:
    """Workers of one container."""
    return {
        "replicas": 1,
        "template": {"spec": {"containers": [{"name": "worker", "image": "a", **container}]}},
    }


def until(**stop: Any) -> dict[str, Any]:
    return {"entrypoint": "digits:job", "stopAfter": stop}


BROKEN_IMAGE = "no/such:image"
PARSER = "RuntimeError: my parser met a broken record (raise50.py:10 in parse)"
MISTAKES = [
    Mistake("more replicas than the maximum", "apply", {"workers": {"replicas": 4, "maxReplicas": 2}},
            "replicas must not exceed maxReplicas: lower replicas or raise maxReplicas"),
    Mistake("fewer replicas than the minimum", "apply", {"workers": {"replicas": 1, "minReplicas": 2}},
            "raise replicas or lower minReplicas"),
    Mistake("unknown field", "apply", {"workers": {"replicas": 1, "replicass": 2}},
            'unknown field "spec.workers.replicass"'),
    Mistake("container that is not named worker", "apply", {"workers": template(name="main")},
            "one container must be named worker"),
    Mistake("metric of one's own without a mode", "apply", {"training": until(metric="dice", value=0.9)},
            "mode is required for this metric"),
    Mistake("accuracy above 1", "apply", {"training": until(metric="val_accuracy", value=1.5)},
            "spec.training.stopAfter.mode: Required value"),
    Mistake("accuracy above 1, in a command", "submit", ["--storage", "ephemeral", "--until", "val_accuracy=1.5"],
            "this metric is at most 1 and never rises to value: set a value below 1"),
    Mistake("quantity with a typing error", "apply", {"workers": template(resources={"limits": {"cpu": "100mm"}})},
            'containers[0].resources.limits.cpu: Invalid value: "100mm"'),
    Mistake("changed training", "patch", {"training": {"batchSize": 7}},
            "spec.training.batchSize: Invalid value: batchSize is immutable: delete the job first"),
    Mistake("changed storage", "patch", {"storage": {"ephemeral": None, "uri": "s3://other/runs"}},
            "immutable: delete the job first"),
    Mistake("changed number of servers", "patch", {"parameterServers": {"replicas": 2}},
            "set suspend to true first"),
    Mistake("scale beyond all bounds", "scale", "1001", "replicas"),
    Mistake("scale below 0", "scale", "-1", "must be"),
    Mistake("misspelt object", "check", ("case:jobb", "job = Training(model=build, data=DATA)", {}),
            "case has no 'jobb'. Did you mean 'job'?"),
    Mistake("misspelt module", "check", ("csae:job", "job = Training(model=build, data=DATA)", {}),
            "Did you mean 'case'?"),
    Mistake("error at import", "check", ("case:job", "raise RuntimeError('the licence server said no')", {}),
            "RuntimeError: the licence server said no ("),
    Mistake("misspelt metric", "check",
            ("case:job", "job = Training(model=build, data=DATA, validation=DATA)",
             {"stop_after": StopAfter(metric="val_acurracy", value=0.9)}),
            "Did you mean val_accuracy?"),
    Mistake("batch larger than the data", "check",
            ("case:job", "job = Training(model=build, data=DATA)", {"batch_size": 5000, "workers": 3}),
            "1 step in an epoch: few for 3 workers, since asynchronous training needs many small steps. Use a smaller"),
    Mistake("claim that is not there", "submit", ["--storage", "claim:nowhere"],
            "has no PersistentVolumeClaim 'nowhere': it has none. Create it"),
    Mistake("claim that is not there, by kubectl", "status", {"storage": {"volumeClaim": {"name": "nowhere"}}},
            "create this PersistentVolumeClaim"),
    Mistake("unknown field of a container", "status", {"workers": template(resourcez={})},
            'unknown field "spec.containers[0].resourcez"'),
    Mistake("image that does not exist", "status", {"workers": template(image=BROKEN_IMAGE)},
            "check the image in the job's template"),
    Mistake("no workers", "status", {"workers": {"replicas": 0}}, "no workers are wanted: raise workers.replicas"),
    # Its interpreter crashed while it ended, so the code is not the user's: it was replaced and met the record again.
    Mistake("error in the data", "end",
            ("worker-0-0", 139, TerminationMessage(outcome=Outcome.FAILED, reason="UserError", message=PARSER)),
            PARSER),
    Mistake("storage that goes with its pod", "end",
            ("ps-0-0", 0, TerminationMessage(outcome=Outcome.SUCCEEDED, model_uri="file:///m", model_digest="d")),
            "the model is gone with its pod (storage.ephemeral); set storage.volumeClaim or storage.uri to keep it"),
]  # fmt: skip


def of(*places: str) -> pytest.MarkDecorator:
    """The mistakes that are told at these places, as parameters."""
    return pytest.mark.parametrize(
        "mistake", [pytest.param(each, id=each.name) for each in MISTAKES if each.place in places]
    )


@of("apply", "patch", "scale", "submit")
async def test_the_command_says_what_to_change(
    mistake: Mistake, control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    job = Job(kube, namespace)

    def kubectl(*words: str, stdin: Any = None) -> str:
        done = subprocess.run(
            ["kubectl", "--namespace", namespace, *words], env=control_plane.env, capture_output=True, text=True,
            input=json.dumps(stdin), check=False,
        )  # fmt: skip
        assert done.returncode != 0, done.stdout
        return done.stderr

    if mistake.place == "apply":
        said = kubectl("apply", "--dry-run=server", "-f", "-", stdin=job.manifest(**mistake.wrong))
    elif mistake.place == "submit":
        (tmp_path / "case.py").write_text("job = None\n")
        words = ["submit", f"{tmp_path}/case.py:job", *mistake.wrong, "-n", namespace]
        words += ["--kubeconfig", str(control_plane.kubeconfig)]
        result = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert result.exit_code != 0
        said = result.output
    else:
        await job.apply()
        if mistake.place == "patch":
            patch = json.dumps({"spec": mistake.wrong})
            said = kubectl("patch", "etj", job.name, "--type=merge", "--patch", patch)
        else:
            said = kubectl("scale", "etj", job.name, f"--replicas={mistake.wrong}")
    assert mistake.words in said


SCRIPT = """
import keras, numpy as np
from shoal_trainer import Indexed, Training

DATA = Indexed.from_arrays(np.ones((1437, 4), "float32"), np.arange(1437) % 2)

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

"""


@of("check")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_check_says_what_to_change(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without XLA, which takes most of the time and has no part in these."""
    from shoal_trainer.worker.rehearsal import Rehearsal

    monkeypatch.setattr(Rehearsal, "_step_as_on_gpu", lambda *_: None)
    entrypoint, end, options = mistake.wrong
    (tmp_path / "case.py").write_text(SCRIPT + end)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "case", raising=False)
    settings = {"batch_size": 32, "stop_after": StopAfter(epochs=1)} | options
    rehearsal = Rehearsal(entrypoint, {}, folder=tmp_path, **settings)
    rehearsal.run()
    said = [words for each in rehearsal.findings for words in (each.message, *each.warnings)]
    assert any(mistake.words in words for words in said), said


async def told(job: Job) -> str:
    """The conditions as `kubectl describe` shows them."""
    conditions = (await job.status()).get("conditions", [])
    return "\n".join(f"{each['type']} {each['reason']}: {each['message']}" for each in conditions)


@pytest.fixture
async def nodes(fake_kubelet: FakeKubelet) -> FakeKubelet:
    await fake_kubelet.add_node("safe-1")
    await fake_kubelet.add_node("spot-1", spot=True)
    fake_kubelet.image_errors[BROKEN_IMAGE] = f'Back-off pulling image "{BROKEN_IMAGE}"'
    return fake_kubelet


async def test_the_status_says_what_to_change(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    """All at once, since none hinders another."""
    wrong = [each for each in MISTAKES if each.place == "status"]
    jobs = [Job(kube, namespace, f"job-{number}") for number in range(len(wrong))]

    async def missing() -> dict[str, str]:
        pairs = [(each, await told(job)) for each, job in zip(wrong, jobs, strict=True)]
        return {each.name: said for each, said in pairs if each.words not in said}

    async def all_told() -> bool:
        return not await missing()

    async with running_operator(control_plane.kubeconfig, namespace):
        for each, job in zip(wrong, jobs, strict=True):
            await job.apply(**each.wrong)
        try:
            await eventually(all_told)
        except AssertionError:
            raise AssertionError(await missing()) from None


@of("end")
async def test_the_end_says_what_to_change(
    mistake: Mistake, control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    pod, code, message = mistake.wrong
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply(workers={"replicas": 1})
        await job.runs(1)
        await nodes.terminate_pod(namespace, f"{job.name}-{pod}", exit_code=code, message=message.to_json())
        await job.reaches(phase=message.outcome.value)
        assert mistake.words in await told(job)
