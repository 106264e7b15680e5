"""`shoal submit`: what its options mean."""

from __future__ import annotations

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.cli import submit
from shoal.client.manifest import Submission, manifests
from shoal.errors import UsageError
from shoal_trainer import cli as trainer

TYPED = st.from_regex(
    r'[-+]?[0-9_.eE]{1,8}|"[^"]{0,5}\\?"?|true|null|NaN|-?Infinity|[\[{].{0,5}', fullmatch=True
)


def in_the_cluster(text: str) -> object:
    try:
        args = submit.arguments({"args": (text,)})["args"]
    except UsageError:
        return "refused"
    wanted = Submission(entrypoint="digits:job", storage="ephemeral", image="r.io/w:1", args=args)
    return manifests(wanted).job["spec"]["training"]["args"]


def on_the_laptop(text: str) -> object:
    try:
        return trainer.arguments((text,))
    except click.BadParameter:
        return "refused"


@given(name=st.just("x") | st.text(max_size=5), value=TYPED | st.text(max_size=20))
@example("version", "1.10")
@example("day", "2024_01")
@example("run", "007")
@example("tag", "1e5")
@example("x", "infinity")
@example("x", '"a\\"b"')
@example("x", str(1 << 63))
@example("x", "[1e999]")
@example("x", "[" * 5_000)
def test_an_argument_means_the_same_on_a_laptop_and_in_a_cluster(name: str, value: str) -> None:
    text = f"{name}={value}"
    assert in_the_cluster(text) == on_the_laptop(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("n=5", 5), ('n="5"', "5"), ("rate=0.1", 0.1), ("on=true", True),
        ("layers=[64, 32]", [64, 32]), ('options={"a": [0.5, "b"]}', {"a": [0.5, "b"]}),
    ],
)  # fmt: skip
def test_json_is_read(text: str, value: object) -> None:
    [found] = trainer.arguments((text,)).values()
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("version=1.10", "1.10"), ("run=007", "007"), ("rate=1e-3", "1e-3"), ("x=1.0", "1.0"), ("x=", ""),
        ("a=b=c", "b=c"), (f"n={1 << 63}", str(1 << 63)), ("x=NaN", "NaN"), ("x=[1, Infinity]", "[1, Infinity]"),
        ("layers=[64, 32", "[64, 32"), ("pattern=[a-z]+", "[a-z]+"),
    ],
)  # fmt: skip
def test_what_is_typed_is_kept(text: str, kept: str) -> None:
    """What is not JSON; and numbers that JSON would change, which arrive as floats unless text is wanted."""
    assert list(trainer.arguments((text,)).values()) == [kept]


@pytest.mark.parametrize("text", ["width", "=3", "none=null"])
def test_other_arguments_are_refused(text: str) -> None:
    assert in_the_cluster(text) == on_the_laptop(text) == "refused"
