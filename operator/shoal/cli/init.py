"""`shoal init FILE.py`: a first manifest. The file is read, not run."""

from __future__ import annotations

import ast
from pathlib import Path

import click

from shoal.cli.documents import print_manifests
from shoal.errors import UsageError

HELP = """{file} has no shoal_trainer.Training. Add one, such as

    from shoal_trainer import Training

    def build():
        ...                      # what makes your model, up to model.compile(...)
        return model

    job = Training(model=build, data=(x, y))     # what fit() gets; callbacks=lambda: [...], validation=...

and take out {fit}. Then `shoal-trainer check {module}:job` says what is missing; docs/keras.md has the rest."""


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--storage", default="claim:runs", show_default=True, metavar="URI", help="As for `shoal submit`."
)
@click.option("--image", metavar="IMAGE", help="Of the workers.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(0, 1000), metavar="N")
@click.option("--name", metavar="NAME", help="Of the job. Default: the file's.")
def init(file: Path, storage: str, image: str | None, workers: int, name: str | None) -> None:
    """Print a first manifest for a Keras script: the job, its code, and a volume claim if it needs one."""
    from shoal.client.manifest import Submission, manifests

    entrypoint = f"{file}:{training_in(file)}"
    name = name or file.stem.replace("_", "-").lower()
    made = manifests(
        Submission(entrypoint=entrypoint, storage=storage, image=image, workers=workers, name=name, epochs=10)
    )
    volume = None
    if storage.startswith("claim:"):
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}}
        metadata = {"name": storage.removeprefix("claim:")}
        volume = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim}
    print_manifests(made.code, made.job, volume)


def training_in(file: Path) -> str:
    """The name of the Training in a file, or of the function that returns one.

    Raises:
        UsageError: there is none; the message says how to write one.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no Python: {error}") from error
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and _is_training(node.value)
            and isinstance(node.targets[0], ast.Name)
        ):
            return node.targets[0].id
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(each, ast.Return) and _is_training(each.value) for each in ast.walk(node)
        ):
            return node.name
    fits = [
        f"line {node.lineno}, which calls fit()"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fit"
    ]
    raise UsageError(HELP.format(file=file, module=file.stem, fit=" and ".join(fits) or "the call of fit()"))


def _is_training(node: ast.expr | None) -> bool:
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    ) == "Training"
