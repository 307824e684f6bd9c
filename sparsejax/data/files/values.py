"""Parses values and times: numbers written as text, and points in time of any type."""

from __future__ import annotations

import math
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from sparsejax.data.files import arrow
from sparsejax.data.files.names import to_arrow

# The numbers that Arrow's parser accepts. Python's float() accepts more, such as `1_000`.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_COMMA = r"[+-]?\d+,\d+"
_SLASHED = re.compile(r"^(\d{4})/(\d{2})/(\d{2})", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)


# The functions below use `call_function`: pyarrow.compute creates its functions at import, so
# type checkers do not know them.


def trim(texts: pa.Array) -> pa.Array:
    """The texts without white space at both ends."""
    return pc.call_function("utf8_trim_whitespace", [texts])


def lengths(texts: pa.Array) -> np.ndarray:
    """`[n]` number of bytes of each text."""
    return arrow.numbers(pc.call_function("binary_length", [texts]))


def parse_values(texts: pa.Array) -> np.ndarray | None:
    """Parses texts to `[n]` float64; None if one is not a number, or not finite as float32.

    `value_problem` describes the fault of a single value.
    """
    try:
        values = arrow.numbers(trim(texts).cast(pa.float64()))
    except pa.ArrowInvalid:
        return None
    with np.errstate(over="ignore"):
        return values if np.isfinite(values.astype(np.float32)).all() else None


def is_number(text: str) -> bool:
    """Whether the text is a finite number."""
    return _NUMBER.fullmatch(text) is not None


def value_problem(text: str) -> str | None:
    """The fault of one value as an error text, or None if the value is right."""
    stripped = text.strip()
    if _NOT_FINITE.fullmatch(stripped):
        return f"value {text!r} is not finite"
    if not _NUMBER.fullmatch(stripped):
        comma = ": a decimal has a point" if re.fullmatch(_COMMA, stripped) else ""
        return f"value {text!r} is not a number{comma}"
    with np.errstate(over="ignore"):
        if math.isinf(np.float32(float(stripped))):
            return f"value {text!r} is too large for float32"
    return None


# Arrow types of times in the order in which they are tried, each with the name of its kind.
_TIMES = [
    (pa.int64(), "number"),
    (pa.float64(), "number"),
    (pa.timestamp("us"), "date"),
    (pa.timestamp("us", "UTC"), "date with a time zone"),
    (pa.timestamp("ns"), "date"),
    (pa.timestamp("ns", "UTC"), "date with a time zone"),
]


def plain_text(column: pa.Array) -> pa.Array:
    """Converts a column to a type that all functions of Arrow take: text to large_string.

    Text that is not UTF-8 becomes large_binary. Dictionaries are decoded.
    """
    type_ = column.type
    if pt.is_dictionary(type_):
        return plain_text(column.dictionary).take(column.indices)
    kinds = (pt.is_string, pt.is_string_view, pt.is_binary, pt.is_large_binary)
    if any(is_kind(type_) for is_kind in (*kinds, pt.is_binary_view)):
        try:
            return column.cast(pa.large_string())
        except pa.ArrowInvalid:  # not UTF-8
            return column.cast(pa.large_binary())
    return column


def are_no_times(times: pa.Array) -> np.ndarray:
    """`[n]` bool: whether a time is missing: null, or text of white space only."""
    missing = times.is_null()
    if pt.is_large_string(times.type):
        lengths = pc.call_function("binary_length", [trim(times)])
        is_empty = arrow.numbers(arrow.filled(lengths, 0)) == 0
        return arrow.numbers(missing) | is_empty
    return arrow.numbers(missing)


def parse_times(times: pa.Array) -> tuple[np.ndarray, str] | None:
    """Parses times to `[n]` int64, float64 or datetime64[us], with the name of their kind.

    Integers and floats keep their type. Dates have an Arrow type of dates, or are text of ISO
    8601, perhaps with "/" between year, month and day. They are converted to UTC if they have
    a time zone.

    The result is None if times have several kinds, or if one is not a time, not finite or
    outside the range of the type.
    """
    times = plain_text(times)
    type_ = times.type
    if pt.is_integer(type_):
        wanted = _TIMES[:1]
    elif pt.is_decimal(type_) and type_.scale <= 0:
        wanted = _TIMES[:2]  # float64 does not hold nanoseconds
    elif pt.is_floating(type_) or pt.is_decimal(type_):
        wanted = _TIMES[1:2]
    elif pt.is_date(type_):
        wanted = _TIMES[2:3]
    elif pt.is_timestamp(type_):
        wanted = [_TIMES[3 if type_.tz else 2]]
    elif pt.is_large_string(type_):
        wanted, times = _TIMES, _with_dashes(trim(times))
    else:
        return None
    for to, kind in wanted:
        try:
            # Nanoseconds are rounded down to microseconds. This loss is no error.
            found = times.cast(
                to, safe=not (pt.is_timestamp(type_) and type_.unit == "ns")
            )
        except pa.ArrowInvalid:
            continue
        if pt.is_timestamp(to):
            unit = f"datetime64[{to.unit}]"
            dates = arrow.numbers(found.cast(pa.int64())).view(unit)
            if np.isnat(dates).any():
                return None
            return dates.astype("datetime64[us]"), kind
        numbers = arrow.numbers(found)
        return (numbers, kind) if np.isfinite(numbers).all() else None
    return None


def _with_dashes(texts: pa.Array) -> pa.Array:
    """Converts dates such as 2024/12/31, with the year first, to ISO 8601: 2024-12-31."""
    if not len(texts) or not _SLASHED.match(texts[0].as_py() or ""):
        return texts  # most columns are not in this format, which the first text shows
    how = pc.ReplaceSubstringOptions(_SLASHED.pattern, r"\1-\2-\3")
    return pc.call_function("replace_substring_regex", [texts], how)


def parse_formatted(times: pa.Array, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Parses times that are text in a format of `strptime`.

    Returns:
      `(times, is_time)`: `[n]` datetime64[us], and `[n]` bool: whether a text has the format.
    """
    options = pc.StrptimeOptions(format, "us", error_is_null=True)
    found = pc.call_function("strptime", [trim(plain_text(times))], options)
    is_time = found.is_valid().to_numpy(zero_copy_only=False)
    dates = found.fill_null(0).cast(pa.int64()).to_numpy().view("datetime64[us]")
    return dates, is_time


def mixed_times(timed: bool) -> str:
    """The error text for an event with a time after events without, or the reverse."""
    event, earlier = ("no time", "one") if timed else ("a time", "none")
    return (
        f"an event has {event} but earlier events have {earlier}; give all events a time "
        "or none, or leave times out: time=None"
    )


def time_problem(time: object, kind: str | None) -> str | None:
    """The error text for a time that is wrong, or not of the kind of earlier times; else None."""
    if isinstance(time, int) and not -(2**63) <= time < 2**63:
        return f"time {time} is too large: integers are below 2^63"
    if isinstance(time, str):  # an empty text is no name, so `as_names` is not used
        found = parse_times(to_arrow(np.array([time], np.dtypes.StringDType())))
    else:
        found = parse_times(pa.array([time]))
    if found is None:
        if isinstance(time, bytes):
            time = time.decode(errors="replace")
        return (
            f"time {str(time)!r} is neither a finite number nor a date of ISO 8601, like "
            "2024-12-31 or 2024-12-31T23:59:59Z"
        )
    if kind is not None and found[1] != kind:
        return f"time {str(time)!r} is a {found[1]}, but an earlier time is a {kind}"
    return None


def find_time_problem(times: pa.Array, kind: str | None) -> tuple[int, str]:
    """The position of the first wrong time and its error text, after `parse_times` gave None.

    `kind` is the kind of earlier times, or None.
    """
    outside = _outside_microseconds(times)
    if outside.any():
        at, unit = int(np.argmax(outside)), getattr(times.type, "unit", "ms")
        number = times[at].value
        return at, (
            f"time {number} {'days' if pt.is_date32(times.type) else unit} since 1970 does "
            "not fit in microseconds, which reach from the year -290307 to 294246"
        )
    for at, time in enumerate(times.to_pylist()):
        if problem := time_problem(time, kind):
            return at, problem
        if kind is None and (found := parse_times(pa.array([time]))):
            kind = found[1]
    return 0, "these times cannot be read together"


def _outside_microseconds(times: pa.Array) -> np.ndarray:
    """`[n]` bool: whether a date is outside the range of int64 microseconds since 1970."""
    type_ = times.type
    if not (pt.is_timestamp(type_) or pt.is_date(type_)):
        return np.zeros(len(times), bool)
    size = 86_400_000_000 if pt.is_date32(type_) else 1000
    if pt.is_timestamp(type_):
        size = {"s": 1_000_000, "ms": 1000}.get(type_.unit, 1)
    plain = pa.int32() if pt.is_date32(type_) else pa.int64()
    numbers = arrow.numbers(times.cast(plain).fill_null(0)).astype(np.int64)
    most = (2**63 - 1) // size
    return (numbers > most) | (numbers < -most)
