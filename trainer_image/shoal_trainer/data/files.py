"""Data in files (TFRecord, Parquet, CSV, anything a function can read): a lease is a file from an offset.

How many samples a file holds is not known before somebody has read it to its end, so a lease of a file has no stop
in the first epoch; the worker tells the length when it meets the end. Files in an object store are fetched through
fsspec into a local folder while the file before is being trained, because TensorFlow's own readers know no store.
"""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal_trainer.data.batch import Batch, batches
from shoal_trainer.data.indexed import require_dataset
from shoal_trainer.errors import Unreachable, UserError

if TYPE_CHECKING:
    import tensorflow as tf

READ_ERRORS = (OSError, ValueError)
NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
NODE = re.compile(r"^{{.*?}} (\w+Error: )?| \[Op:\w+\] name: $")
"""What TensorFlow puts around a message: where in its graph that was."""


@dataclass(frozen=True)
class Files:
    """The files that match `pattern` (`data/*.tfrecord`, `s3://bucket/train/*.parquet`; `**` for any depth).

    `fn(path)` gives the `tf.data.Dataset` of one local file: single samples, `(x, y)` or `(x, y, sample_weight)`, in
    the same order whenever it is called. Files are visited in another seeded order in every epoch; spread the samples
    over the files at random, and have several files for each worker.
    """

    pattern: str
    fn: Callable[[str], tf.data.Dataset]

    @staticmethod
    def tfrecord(pattern: str, parse: Callable[[Any], Any], *, compression: str = "") -> Files:
        """TFRecord files; `parse` maps one serialized example (a scalar string tensor) to a sample."""

        def read(path: str) -> tf.data.Dataset:
            import tensorflow as tf

            return tf.data.TFRecordDataset(path, compression_type=compression).map(
                parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
            )

        return Files(pattern, read)

    @staticmethod
    def parquet(
        pattern: str, parse: Callable[[dict[str, Any]], Any], *, columns: list[str] | None = None
    ) -> Files:
        """Parquet files; `parse` maps one row (column name -> scalar or vector tensor) to a sample.

        Columns are numbers, strings or fixed-size lists of numbers. A null among floating-point numbers is NaN;
        any other is refused.
        """

        def read(path: str) -> tf.data.Dataset:
            import tensorflow as tf

            groups, signature = _parquet_groups(path, columns)
            rows = tf.data.Dataset.from_generator(groups, output_signature=signature).unbatch()
            return rows.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

        return Files(pattern, read)

    @staticmethod
    def csv(pattern: str, parse: Callable[..., Any], defaults: list[Any], *, header: bool = True) -> Files:
        """CSV files; `parse(*columns)` maps one row (scalar tensors) to a sample.

        `defaults`: for each column its default value, or its type if it may not be empty (as `CsvDataset`).
        An empty file has no samples, though it lacks the `header`.
        """

        def read(path: str) -> tf.data.Dataset:
            import tensorflow as tf

            rows = tf.data.experimental.CsvDataset(
                path, defaults, header=header and Path(path).stat().st_size > 0
            )
            return rows.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

        return Files(pattern, read)

    def list(self) -> tuple[str, ...]:
        """The matching files, sorted, each with its protocol. Raises `UserError` where none matches."""
        import fsspec

        try:
            filesystem, path = fsspec.core.url_to_fs(self.pattern)
            names = sorted(filesystem.glob(path))
        except (ValueError, ImportError) as error:
            raise UserError(
                f"Files({self.pattern!r}): {error}. Use a path, file://, s3:// or gs://."
            ) from error
        except OSError as error:
            raise Unreachable(f"Files({self.pattern!r}): {error}") from error
        if not names:
            raise UserError(
                f"No file matches {self.pattern!r}. Give a pattern that the worker's pod can see."
            )
        return tuple(filesystem.unstrip_protocol(name) for name in names)

    def example(self, batch_size: int) -> Batch:
        """One batch, from the first file that has a sample, to build and trace a model with."""
        for name in self.list():
            batch = next(self.batches(name, 0, None, batch_size), None)
            if batch is not None:
                return batch
        raise UserError(f"Every file that matches {self.pattern!r} is empty.")

    def batches(self, name: str, start: int, stop: int | None, batch_size: int) -> Iterator[Batch]:
        """The samples [start, stop) of one file (`stop` None: to its end) as batches of `batch_size` rows.

        Raises `UserError` with the file's name where it cannot be read or there is no room for it here, `Unreachable`
        where the store does not answer, or not with the file.
        """
        with _local(name) as path:
            try:
                dataset = self.fn(path)
            except READ_ERRORS as error:
                raise UserError(
                    f"The data function cannot open {name}: {error}. Mend or remove the file."
                ) from error
            require_dataset(dataset, "Files(fn=…)")
            dataset = dataset.skip(start)
            if stop is not None:
                dataset = dataset.take(stop - start)
            rows = _guard(iter(dataset.batch(batch_size, num_parallel_calls=2).prefetch(2)), name)
            yield from batches(rows, batch_size, start, stop, f"The data function, called with {name},")


def _guard(rows: Iterator[Any], name: str) -> Iterator[Any]:
    """Name the file in what TensorFlow says about it."""
    import tensorflow as tf

    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except (tf.errors.OpError, *READ_ERRORS) as error:
            text = NODE.sub("", str(error).splitlines()[0])[:300]
            raise UserError(f"{name} cannot be read: {text}. Mend or remove the file.") from error
        yield row


def _local(name: str) -> _Local:
    return _Local(name)


class _Local:
    """A local path of a file for as long as the `with` lasts; a file of an object store is fetched and deleted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> str:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(self._name)
        if "file" in filesystem.protocol or filesystem.protocol == "file":
            if not Path(path).is_file():
                raise UserError(
                    f"{self._name} does not exist (any more). The training data must not change in a run."
                )
            return str(path)
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="shoal-data-")
        except OSError as error:
            raise self._no_room(filesystem, path, error) from error
        target = Path(self._folder.name) / Path(path).name
        try:
            filesystem.get_file(path, str(target))
        except FileNotFoundError as error:
            self._folder.cleanup()
            raise UserError(
                f"{self._name} does not exist (any more). The training data must not change in a run."
            ) from error
        except Exception as error:  # every object store has its own tree
            self._folder.cleanup()
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise self._no_room(filesystem, path, error) from error
            raise Unreachable(f"{self._name}: {error}") from error
        return str(target)

    def _no_room(self, filesystem: Any, path: str, error: OSError) -> UserError:
        try:
            size = f" ({filesystem.size(path) / 1e6:,.1f} MB)"
        except Exception:
            size = ""
        return UserError(
            f"{self._name}{size} does not fit on the worker's disk: {error}. Raise ephemeral-storage in the resources "
            "of container worker (spec.workers.template), or split the data into smaller files."
        )

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def _parquet_groups(
    path: str, columns: list[str] | None
) -> tuple[Callable[[], Iterator[Any]], dict[str, Any]]:
    """A generator of record batches as dicts of arrays, and their tensor signature."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tensorflow as tf

    try:
        schema = pq.read_schema(path)
    except pa.ArrowInvalid as error:
        raise ValueError(str(error).splitlines()[0]) from error
    names = columns or schema.names
    if missing := sorted(set(names) - set(schema.names)):
        raise ValueError(f"it has no column {', '.join(missing)} (it has {', '.join(schema.names)})")
    signature = {}
    for name in names:
        kind = schema.field(name).type
        shape: tuple[int | None, ...] = (None,)
        if pa.types.is_fixed_size_list(kind):
            shape, kind = (None, kind.list_size), kind.value_type
        text = pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind)
        dtype = tf.string if text else tf.dtypes.as_dtype(kind.to_pandas_dtype())
        signature[name] = tf.TensorSpec(shape, dtype)

    def groups() -> Iterator[dict[str, Any]]:
        with pq.ParquetFile(path) as file:
            for group in file.iter_batches(batch_size=1024, columns=names):
                yield {name: _column(name, group.column(name)) for name in names}

    return groups, signature


def _column(name: str, values: Any) -> Any:
    import pyarrow as pa

    vectors = pa.types.is_fixed_size_list(values.type)
    flat = values.flatten() if vectors else values
    missing = values.null_count if vectors else 0  # `flatten` leaves those rows out
    if missing or (flat.null_count and not pa.types.is_floating(flat.type)):
        raise ValueError(
            f"column {name} has nulls, and only floating-point numbers may be null (they become NaN): fill them in, "
            "or leave the column out with columns=[…]"
        )
    array = flat.to_numpy(zero_copy_only=False)
    return array.reshape(-1, values.type.list_size) if vectors else array
