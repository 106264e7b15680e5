"""The name of a module of the trainer says which one it is, in a log, a page or a traceback."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TRAINER = Path(__file__).parents[3] / "trainer_image" / "shoal_trainer"


def test_no_two_modules_have_one_name() -> None:
    names = Counter(path.stem for path in TRAINER.rglob("*.py") if path.stem != "__init__")
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []
