"""Reads folders of tables that `sok.dump` of SparseOperationKit wrote.

::

    NAME-key               an integer for each row
    NAME-weight            the vector of each row
    NAME-OPTIMIZER-SLOT    a state array of the optimizer, in the order of the keys
    meta_info              optional: types and sizes of all tables

NAME is the name of the variable, in which punctuation is replaced by "_". Each file begins with a
header of 296 bytes. Integers in headers and in `meta_info` are big-endian; integers after a header
are little-endian.
"""

from __future__ import annotations

import pathlib
import re
import string
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from sparsejax import row_files
from sparsejax.embeddings.dynamic import files
from sparsejax.embeddings.dynamic.files import STATE, Rows, checked, ranked
from sparsejax.optimizers.rules.base import Rule

# Header: name of the table, kind of the file, name of the slot, and number of the dtype.
_HEAD = struct.Struct(">256sI32sI")
_KEY, _WEIGHT, _STATE = range(3)
_DTYPES = tuple(map(np.dtype, ("<i4", "<i8", "<u4", "<u8", "<f2", "<f4", "<f8")))
_PLAIN = str.maketrans(string.punctuation, "_" * len(string.punctuation))


class _Slots(NamedTuple):
    """Names of an optimizer's state arrays in these files.

    Attributes:
      optimizers: names of the optimizer in file names.
      arrays: slot names, by the names of our arrays.
      counts: whether a step depends on the number of earlier steps.
    """

    optimizers: tuple[str, ...]
    arrays: dict[str, str]
    counts: bool = False


_ADAM = _Slots(("Adam",), {"mu": "m", "nu": "v"}, True)
_MOMENTUM = _Slots(("SGD",), {"trace": "momentum"})
_RULES = {
    "momentum": _MOMENTUM,
    "nesterov": _MOMENTUM,
    "adagrad": _Slots(("Adagrad",), {"sum_of_squares": "accumulator"}),
    "ftrl": _Slots(("Ftrl",), {"n": "accumulator", "z": "linear"}),
    "adadelta": _Slots(("Adadelta",), {"e_g": "accum_grad", "e_x": "accum_var"}),
    "adam": _ADAM,
    "adamw": _ADAM,
    "lazy_adam": _ADAM,
    # The class name contains "Adam", so `sok.dump` may use that name.
    "adamax": _ADAM._replace(optimizers=("Adamax", "Adam")),
}


def is_dump(path: pathlib.Path) -> bool:
    """Whether a path is a folder, or a folder followed by the name of a table in it."""
    return path.is_dir() or _file(path, "key").exists()


def read(
    path: pathlib.Path,
    table: str,
    like: Mapping[str, jax.ShapeDtypeStruct],
    rule: Rule | None,
    step: int,
) -> Rows:
    """The rows of a table; see `EmbeddingCollection.load_table`.

    Args:
      path: path of the folder, or of the folder followed by the table's name.
      table: name of our table, which is searched for in the folder.
      like: arrays of all rows by column.
      rule: rule of the optimizer, whose arrays are all in `like`; None without an optimizer.
      step: number of steps that the optimizer has done.

    Raises:
      OSError: a file is missing or cannot be read.
      ValueError: a file is damaged, or its rows do not match the table.
    """
    path = _found(path, table)
    at = _file(path, "key")
    keys = np.asarray(_numbers(at, path.name, _KEY, "", None))
    _check_meta(path, keys, like["row"].shape[1])
    ids, places = ranked(at, keys)
    paths, factor = {"row": _file(path, "weight")}, 1.0
    if rule is not None and (slots := _slots(path, rule, step)):
        paths |= {STATE + name: _file(path, slot) for name, slot in slots.items()}
        factor = _factor(path, rule)
    arrays = _columns(paths, path, len(keys), like)
    steps = step if len(arrays) > 1 else None

    def blocks() -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        for start in range(0, len(keys), files.BLOCK):
            some, columns = slice(start, start + files.BLOCK), {}
            for name, array in arrays.items():
                dtype = row_files.dtype_of(like[name])
                values = checked(paths[name], name, array[some].astype(dtype))
                scaled = name != "row" and factor != 1
                columns[name] = (values * factor).astype(dtype) if scaled else values
            if steps is not None and (last := like.get(STATE + "last_step")):
                shape = len(columns["row"]), *last.shape[1:]
                columns[STATE + "last_step"] = np.full(shape, steps, last.dtype)
            yield places[some], columns

    return Rows(ids, (*arrays,), steps, blocks)


def _columns(
    paths: Mapping[str, pathlib.Path],
    path: pathlib.Path,
    count: int,
    like: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, np.ndarray]:
    """Opens the arrays of some files, with a row for each key."""
    arrays = {}
    for name, each in paths.items():
        kind, slot = (_WEIGHT, "") if name == "row" else (_STATE, each.name)
        slot = slot.rpartition("-")[2]
        arrays[name] = _numbers(each, path.name, kind, slot, like[name])
        if len(arrays[name]) != count:
            raise ValueError(
                f"{each} has {len(arrays[name]):,} rows of {like[name].shape[1]:,} numbers, "
                f"but {_file(path, 'key')} has {count:,} keys: the table has another "
                "width, or a file is cut off"
            )
    return arrays


def _file(path: pathlib.Path, what: str) -> pathlib.Path:
    return path.with_name(f"{path.name}-{what}")


def _found(path: pathlib.Path, table: str) -> pathlib.Path:
    """Finds the folder that has the table's files, and the table's name in file names."""
    if not path.is_dir():
        return path
    name = table.translate(_PLAIN)
    for each in name, f"{name}_0":  # TensorFlow adds ":0" to names of variables
        if _file(path / each, "key").exists():
            return path / each
    tables = sorted(each.name.removesuffix("-key") for each in path.glob("*-key"))
    if not tables:
        raise ValueError(
            f"{path} is a folder without tables: expected files of sok.dump, such as "
            f"{name}-key, or give the path of a Parquet file"
        )
    raise ValueError(
        f"{path} has the tables {tables}, and none of the name {table!r}: give the path "
        f"{path / tables[0]}, or that of another one"
    )


def _dtype(path: pathlib.Path, table: str, kind: int, slot: str) -> np.dtype:
    """Checks the header of a file; returns the dtype of its content."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise ValueError(
            f"{path} is cut off: it has {len(head)} bytes, and a file of sok.dump begins "
            f"with {_HEAD.size}"
        )
    of_table, has_kind, has_slot, number = _HEAD.unpack(head)
    names = [each.decode(errors="replace").strip() for each in (of_table, has_slot)]
    if (
        (has_kind, names[1]) != (kind, slot)
        or number >= len(_DTYPES)
        or names[0].translate(_PLAIN) not in ("", table)
    ):
        raise ValueError(
            f"{path} is damaged, or no file of sok.dump: its head has the table "
            f"{names[0]!r}, the kind {has_kind}, the slot {names[1]!r} and the dtype "
            f"{number}; expected the kind {kind} and the slot {slot!r}"
        )
    return _DTYPES[number]


def _numbers(
    path: pathlib.Path,
    table: str,
    kind: int,
    slot: str,
    like: jax.ShapeDtypeStruct | None,
) -> np.ndarray:
    """Maps the numbers in a file into memory. Without `like`, the file has keys."""
    dtype = _dtype(path, table, kind, slot)
    if like is None:
        expected, fits, width = "integers", dtype.kind in "iu", ()
    else:
        expected, width = row_files.dtype_of(like), like.shape[1:]
        fits = dtype.kind == "f" and np.can_cast(dtype, expected)
    if not fits:
        raise ValueError(f"{path} has numbers of {dtype}, expected {expected}")
    size, row = path.stat().st_size - _HEAD.size, dtype.itemsize * int(np.prod(width))
    if size % row:
        raise ValueError(
            f"{path} is cut off, or its table has another width: {size:,} bytes behind "
            f"its head are not a number of rows of {row:,} bytes"
        )
    shape = size // row, *width
    if not size:  # NumPy cannot map an empty file
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", _HEAD.size, shape)


def _slots(path: pathlib.Path, rule: Rule, step: int) -> dict[str, str]:
    """The file name endings of state arrays, by the names of our arrays."""
    found = {
        each.name.removeprefix(f"{path.name}-")
        for each in path.parent.glob(f"{path.name}-*-*")
        if re.fullmatch(r"\w+-\w+", each.name.removeprefix(f"{path.name}-"))
    }
    if not found:
        return {}
    if slots := _RULES.get(rule.name):
        for optimizer in slots.optimizers:
            mine = {n: f"{optimizer}-{slot}" for n, slot in slots.arrays.items()}
            if {n for n in found if n.startswith(f"{optimizer}-")} != {*mine.values()}:
                continue
            if slots.counts and not step:
                raise ValueError(
                    f"{path.parent} does not say after how many steps the state of "
                    f"{path.name} is, and {rule.name} needs it: set optimizer.step[...] to "
                    "the steps that SparseOperationKit's optimizer has done, or load with "
                    "optimizer=None"
                )
            return mine
    raise ValueError(
        f"{path.parent} has the state {sorted(found)} of {path.name}, which is not that of "
        f"the rule {rule.name}: load it with optimizer=None"
    )


def _factor(path: pathlib.Path, rule: Rule) -> float:
    """Factor from the state in the files to our state.

    TensorFlow's momentum includes the learning rate, ours does not.
    """
    if rule.name not in ("momentum", "nesterov"):
        return 1.0
    rate = rule.learning_rate
    if callable(rate) or not rate:
        raise ValueError(
            f"{path.parent} has the momentum of {path.name}, which contains the learning "
            f"rate: {rule.name} needs a positive number as learning_rate, got {rate!r}; or "
            "load it with optimizer=None"
        )
    return -1 / rate


def _check_meta(path: pathlib.Path, keys: np.ndarray, width: int) -> None:
    """Raises ValueError if a `meta_info` exists and contradicts the table's files."""
    meta = path.with_name("meta_info")
    if not meta.exists():
        return
    content = meta.read_bytes()
    count = int.from_bytes(content[:4], "big")
    # Each table's record is followed by the name of its optimizer, 32 bytes.
    if len(content) != 4 + count * (3 * 4 + 8 + 256 + 32):
        raise ValueError(
            f"{meta} is damaged: {len(content):,} bytes do not have the data of "
            f"{count:,} tables"
        )
    layout = struct.Struct(f">{count}I{count}I{count}I{count}Q" + count * "256s")
    told = np.array(layout.unpack_from(content, 4), object).reshape(5, count)
    tables = {
        name.decode(errors="replace").strip().translate(_PLAIN): rest
        for name, *rest in told[::-1].T
    }
    given = tables.get(path.name)
    if given is None or given[:2] != [len(keys), width]:
        raise ValueError(
            f"{meta} is not of these files: of the table {path.name} it has "
            f"{'nothing' if given is None else f'{given[0]:,} rows x {given[1]:,}'}, but "
            f"its files have {len(keys):,} keys, and our table rows of {width:,} numbers"
        )
