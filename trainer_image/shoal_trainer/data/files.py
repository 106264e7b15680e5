"""Data in files (TFRecord, Parquet, CSV, anything a function can read): a lease is a file from an offset.

The number of samples in a file is unknown until a worker has read it to its end, so in the first epoch a lease of a
file has no stop, and the worker reports the length. A file of an object store is downloaded before it is read; the
worker's feed downloads it while it reads the previous file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from shoal_trainer.data.batch import Batch, batches
from shoal_trainer.data.downloads import Download, is_remote, matching
from shoal_trainer.data.indexed import batched, block_of, check_shuffle, require_dataset, require_end
from shoal_trainer.data.lengths import Lengths, checked, varying_by
from shoal_trainer.data.parquet import record_batches
from shoal_trainer.data.read_errors import is_network_outage, is_outage, summary
from shoal_trainer.data.rows import rebatched
from shoal_trainer.data.shuffle import Blocks, shuffled
from shoal_trainer.data.source import Extent, Part, Source
from shoal_trainer.data.user_code import located, where
from shoal_trainer.errors import TrainerError, Unreachable, UserError

if TYPE_CHECKING:
    import tensorflow as tf

READ_ERRORS = (OSError, ValueError)
HEAD = 16 << 20
"""Bytes of a file of an object store that are tried for the first batch."""
COMPRESSIONS = ("", "GZIP", "ZLIB")
"""Of TFRecord files."""
WRONG_COMPRESSION = re.compile(r"corrupted record at 0 |incorrect header check")
"""How TensorFlow says that the first bytes of a file are not those of its compression."""


class Options(TypedDict, total=False):
    """Options of `Files` that its constructors pass on."""

    shuffle: int | None
    lengths: Sequence[int]
    seed: int | None


@dataclass(frozen=True)
class Files(Source):
    """Data in files, read by a function of the path of one file.

    Shoal batches, prefetches and shuffles: it visits the files in a different seeded order in each epoch, and shuffles
    `shuffle` neighbouring samples of a file. Distribute the samples over the files at random, and provide several files
    per worker.

    Args:
        pattern: The files, as a glob pattern: `data/*.tfrecord`, `s3://bucket/train/*.parquet`; `**` matches any
            depth.
        fn: A function `fn(path)` that returns the `tf.data.Dataset` of one local file: single (unbatched) samples,
            always in the same order. A sample is `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`, where `x` and `y`
            are dense tensors or nested structures of them. Files of an object store are downloaded before `fn` is
            called.
        shuffle: How many samples are read and shuffled together; 0 keeps their order within a file. Default: as many as
            fit in 64 MB, at most 1024.
        lengths: As in `Indexed`.
        seed: The seed of the order. Default: that of `Training`.

    Raises:
        UserError: An option has the wrong value.
    """

    pattern: str
    fn: Callable[[str], tf.data.Dataset]
    _: dataclasses.KW_ONLY
    shuffle: int | None = None
    lengths: Sequence[int] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        check_shuffle(self.shuffle, "Files")
        object.__setattr__(self, "lengths", checked(self.lengths, "Files"))

    @staticmethod
    def tfrecord(
        pattern: str, parse: Callable[[Any], Any], *, compression: str = "", **options: Unpack[Options]
    ) -> Files:
        """TFRecord files.

        Args:
            pattern: As in `Files`.
            parse: A function that maps one serialized example (a scalar string tensor) to a sample. It runs in
                `tf.data.Dataset.map`.
            compression: `""` (default: none), `"GZIP"` or `"ZLIB"`.
            **options: `shuffle`, `lengths` and `seed` of `Files`.

        Returns:
            The `Files`. Raises `UserError` for another compression, which TensorFlow would read as none.
        """
        if compression not in COMPRESSIONS:
            names = ", ".join(f'"{name}"' for name in COMPRESSIONS)
            raise UserError(f"Files.tfrecord(compression={compression!r}) must be one of {names}.")

        def read(path: str) -> tf.data.Dataset:
            import tensorflow as tf

            return _parsed(tf.data.TFRecordDataset(path, compression_type=compression), parse)

        return _Records(pattern, read, **options)

    @staticmethod
    def parquet(
        pattern: str,
        parse: Callable[[dict[str, Any]], Any],
        *,
        columns: list[str] | None = None,
        **options: Unpack[Options],
    ) -> Files:
        """Parquet files.

        Columns contain numbers, booleans, strings or fixed-size lists of numbers. A null in a floating-point column
        becomes NaN; a null in any other column is a `UserError` when the file is read.

        Args:
            pattern: As in `Files`.
            parse: A function that maps one row (a dict of column name to scalar or vector tensor) to a sample. It
                runs in `tf.data.Dataset.map`.
            columns: The columns to read. Default: all.
            **options: `shuffle`, `lengths` and `seed` of `Files`.

        Returns:
            The `Files`.
        """

        def read(path: str) -> tf.data.Dataset:
            import tensorflow as tf

            groups, signature = record_batches(path, columns)
            rows = tf.data.Dataset.from_generator(groups, output_signature=signature).unbatch()
            return _parsed(rows, parse)

        return Files(pattern, read, **options)

    @staticmethod
    def csv(
        pattern: str,
        parse: Callable[..., Any],
        defaults: list[Any],
        *,
        header: bool = True,
        **options: Unpack[Options],
    ) -> Files:
        """CSV files.

        Args:
            pattern: As in `Files`.
            parse: A function `parse(*columns)` that maps one row (a scalar tensor per column) to a sample. It runs
                in `tf.data.Dataset.map`.
            defaults: The default value of each column, or its dtype if the column must not be empty, as in
                `tf.data.experimental.CsvDataset`.
            header: Whether the first line of each file is a header. A file of 0 bytes has no samples in either case.
            **options: `shuffle`, `lengths` and `seed` of `Files`.

        Returns:
            The `Files`.
        """

        def read(path: str) -> tf.data.Dataset:
            import tensorflow as tf

            rows = tf.data.experimental.CsvDataset(
                path, defaults, header=header and Path(path).stat().st_size > 0
            )
            return _parsed(rows, parse)

        return _Records(pattern, read, **options)

    def list(self) -> tuple[str, ...]:
        """The matching files, sorted, each with its protocol. Raises `UserError` where none matches.

        They are looked for once: they must not change during a run.
        """
        return self._names

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        return matching(self.pattern)

    def describe(self) -> Extent:
        """The matching files, and what their order depends on. Raises `UserError` if there is none."""
        options = f"shuffle={self.shuffle}, lengths={list(self.lengths)}"
        return Extent(None, self.list(), f"Files({options})", self.seed)

    def example(self, batch_size: int) -> Batch:
        """Read one batch from the first file that has a sample."""
        for part in self.describe().parts():
            batch = self._first(part, batch_size)
            if batch is not None:
                return batch
        raise UserError(f"Every file that matches {self.pattern!r} is empty.")

    def _first(self, part: Part, batch_size: int) -> Batch | None:
        """The first batch of a part; None if it has no sample."""
        return next(self.read(part, batch_size), None)

    def read(self, part: Part, batch_size: int, download: Download | None = None) -> Iterator[Batch]:
        """Read a part of one file; see `Source.read`. Errors name the file."""
        if part.file is None:
            raise UserError(
                "The coordinator leases ranges, but the training data of this worker are files. Run the same code on "
                "every worker."
            )
        name, start, stop = part.file, part.start, part.stop
        with download or Download(name) as path:
            try:
                dataset = self.fn(path)
            except TrainerError:
                raise
            except Exception as error:
                if is_outage(error, path):
                    raise Unreachable(f"{name}: {summary(error)}") from error
                what = summary(error) + located(error) if isinstance(error, READ_ERRORS) else where(error)
                raise UserError(
                    f"The data function cannot open {name}: {what}. Fix the function, or fix or remove the file."
                ) from error
            require_dataset(dataset, "Files(fn=…)")
            require_end(dataset, "Files(fn=…)")
            rows = self._rows(dataset, part, batch_size, path)
            yield from batches(rows, batch_size, start, stop, f"The data function, called with {name},")

    def placed(self, seed: int, worker: tuple[int, ...] = (0, 0)) -> Files:  # noqa: ARG002
        """These data in the order of `seed`, unless they have a seed of their own."""
        return dataclasses.replace(self, seed=seed) if self.seed is None else self

    def _rows(self, dataset: Any, part: Part, batch_size: int, path: str) -> Iterator[Any]:
        """The rows of a part, in elements of at most `batch_size`."""
        name, start, stop, epoch = part.file or "", part.start, part.stop, part.epoch
        spec = dataset.element_spec
        lengths = Lengths(tuple(self.lengths), varying_by(spec)) if self.lengths else None

        def read(low: int, high: int | None) -> Iterator[Any]:
            rest = dataset.skip(low)
            if high is not None:
                rest = rest.take(high - low)
            return _guard(iter(batched(rest, batch_size, lengths)), name, path)

        block = block_of(spec, self.lengths) if self.shuffle is None else self.shuffle
        if epoch is None or block <= 1:
            rows = read(start, stop)
        else:
            blocks = Blocks(block, (self.seed or 0, epoch, zlib.crc32(name.encode())))
            group = lengths.group if lengths else None
            rows = rebatched(shuffled(read, start, stop, blocks, f"{name}", group=group), batch_size)
        return rows if lengths is None else lengths.cut(rows)


class _Records(Files):
    """Files of which each beginning has whole samples, but for the last one."""

    def _first(self, part: Part, batch_size: int) -> Batch | None:
        """See `Files`. Of a file of an object store, its beginning is enough if it has as many samples as a batch."""
        assert part.file is not None
        if is_remote(part.file):
            with contextlib.suppress(
                UserError, Unreachable
            ):  # where the beginning ends; else the whole file says it
                batch = next(self.read(part, batch_size, Download(part.file, HEAD)), None)
                if batch is not None and batch.samples == batch_size:
                    return batch
        return super()._first(part, batch_size)


def _parsed(rows: Any, parse: Callable[..., Any]) -> tf.data.Dataset:
    """Map `parse` over the rows. It is traced here, so its errors do not blame a file."""
    import tensorflow as tf

    try:
        return rows.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    except (TrainerError, OSError):  # a file that `parse` opens may be unreachable
        raise
    except Exception as error:
        if is_network_outage(error):
            raise
        raise UserError(
            f"The parse function failed: {where(error)}. Fix the function; the file is not the cause."
        ) from error


def _guard(rows: Iterator[Any], name: str, path: str) -> Iterator[Any]:
    """Name the file in errors, and distinguish outages from damaged files. `path`: the local copy."""
    import tensorflow as tf

    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except (tf.errors.OpError, *READ_ERRORS) as error:
            if is_outage(error, path):
                raise Unreachable(f"{name}: {summary(error)}") from error
            hint = " Check the compression of Files.tfrecord." if WRONG_COMPRESSION.search(str(error)) else ""
            raise UserError(
                f"{name} cannot be read: {summary(error)}{located(error)}. Fix the file, or the function that reads it."
                f"{hint}"
            ) from error
        yield row
