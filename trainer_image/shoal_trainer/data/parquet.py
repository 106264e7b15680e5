"""Reads Parquet files with Arrow, as dicts of arrays: TensorFlow has no reader for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shoal_trainer.errors import UserError


def record_batches(
    path: str, columns: list[str] | None
) -> tuple[Callable[[], Iterator[Any]], dict[str, Any]]:
    """A generator of record batches as dicts of arrays, and their tensor signature.

    Raises `UserError` for a column that cannot become a tensor, `ValueError` if the file is damaged or lacks a column.
    """
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
        if pa.types.is_nested(kind):  # else TensorFlow would read it as text
            raise UserError(
                f"The Parquet column {name} has type {schema.field(name).type}. Of nested types, only fixed-size lists "
                "of numbers can be read: write it as pyarrow.list_(type, size), or leave it out with columns=[…]."
            )
        if pa.types.is_dictionary(kind):  # a categorical of pandas
            kind = kind.value_type
        text = pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind)
        number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if not text and not number:
            raise UserError(
                f"The Parquet column {name} has type {schema.field(name).type}, which cannot become a tensor. Write it "
                "as numbers or text, or leave it out with columns=[…]."
            )
        dtype = tf.string if text else tf.dtypes.as_dtype(kind.to_pandas_dtype())
        signature[name] = tf.TensorSpec(shape, dtype)

    def groups() -> Iterator[dict[str, Any]]:
        with pq.ParquetFile(path) as file:
            for group in file.iter_batches(batch_size=1024, columns=names):
                yield {name: _column(name, group.column(name)) for name in names}

    return groups, signature


def _column(name: str, values: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    vectors = pa.types.is_fixed_size_list(values.type)
    flat = values.flatten() if vectors else values
    missing = values.null_count if vectors else 0  # `flatten` drops these rows
    if missing or (flat.null_count and not pa.types.is_floating(flat.type)):
        raise ValueError(
            f"column {name} has nulls, and only floating-point numbers may be null (they become NaN). Fill them in, or "
            "leave the column out with columns=[…]"
        )
    array = flat.to_numpy(zero_copy_only=False)
    return array.reshape(-1, values.type.list_size) if vectors else array
