"""Every form of training data has the same interface: `Source`."""

import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Files, Indexed, UserError
from shoal_trainer.data.source import Extent, Part


@pytest.fixture(params=["arrays", "indexed", "files"])
def source(request, tmp_path):
    if request.param == "files":
        for name, numbers in {"a.txt": range(7), "b.txt": range(7, 10)}.items():
            (tmp_path / name).write_text("".join(f"{n}\n" for n in numbers))
        return Files(
            f"{tmp_path}/*.txt", lambda path: tf.data.TextLineDataset(path).map(tf.strings.to_number)
        )
    if request.param == "indexed":
        return Indexed(10, lambda start, stop: tf.data.Dataset.range(start, stop).map(lambda n: n))
    return Indexed.from_arrays(np.arange(10))


def test_parts_of_extent_cover_all_samples(source):
    rows = [
        int(row)
        for part in source.describe().parts()
        for batch in source.read(part, 4)
        for row in np.asarray(batch.x)[: batch.samples]
    ]
    assert sorted(rows) == list(range(10))


def test_read_of_part_in_wrong_form_is_user_error(source):
    is_files = source.describe().size is None
    part = Part(0, 4) if is_files else Part(0, None, file="a.txt")
    with pytest.raises(UserError, match="Run the same code on every worker"):
        list(source.read(part, 4))


def test_extent_of_files_has_no_size(tmp_path):
    (tmp_path / "a.txt").write_text("1\n")
    files = Files(f"{tmp_path}/*", tf.data.TextLineDataset, shuffle=5).describe()
    assert files == Extent(None, (f"file://{tmp_path}/a.txt",), "Files(shuffle=5, lengths=[])")
    arrays = Indexed.from_arrays(np.arange(3), seed=7).describe()
    assert (arrays.size, arrays.files, arrays.seed) == (3, (), 7)
