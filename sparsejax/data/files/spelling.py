"""Spells names: text stays as it is, whole numbers become decimal integers.

All readers use these rules, so that a name has one text, from whatever source it comes.
"""

from __future__ import annotations

import decimal
import numbers
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from sparsejax.data.files import arrow

# A decimal with up to this number of digits fits in int64.
_INT64_DIGITS = 18
# DuckDB's types of 128-bit integers in its lossless export to Arrow.
_HUGE = {"hugeint": True, "uhugeint": False}  # whether the type has a sign


def exact_bits(type_: pa.DataType) -> int:
    """The number n for which a float type holds every integer below 2^n exactly."""
    return np.finfo(type_.to_pandas_dtype()).nmant + 1


def problem_of_float(value: float, bits: int) -> str:
    """The error text for a float that cannot be a name."""
    return (
        f"holds {value!r}, which cannot be a name: names are text or integers, and floats "
        f"of this type must be integers below 2^{bits}; choose another column, or convert it"
    )


def is_text(type_: pa.DataType) -> bool:
    kinds = (pt.is_string, pt.is_large_string, pt.is_string_view)
    binary = (pt.is_binary, pt.is_large_binary, pt.is_binary_view)
    return any(kind(type_) for kind in (*kinds, *binary))


def is_number(type_: pa.DataType) -> bool:
    kinds = (pt.is_integer, pt.is_floating, pt.is_decimal, pt.is_null)
    return any(kind(type_) for kind in kinds)


def is_name(type_: pa.DataType) -> bool:
    """Whether a column of this type may hold names."""
    if isinstance(type_, pa.OpaqueType):
        return type_.type_name in _HUGE and _has_16_bytes(type_.storage_type)
    if isinstance(type_, pa.BaseExtensionType):
        return _has_16_bytes(type_.storage_type) or is_text(type_.storage_type)
    if pt.is_dictionary(type_):
        type_ = type_.value_type
    return is_text(type_) or _has_16_bytes(type_) or is_number(type_)


def _has_16_bytes(type_: pa.DataType) -> bool:
    return pt.is_fixed_size_binary(type_) and type_.byte_width == 16


def as_integers_or_text(names: pa.Array) -> tuple[pa.Array, np.ndarray, str]:
    """Converts names to integers or text; text may be dictionary-encoded.

    Whole floats become integers. Decimals have their digits, without zeros at the end of a
    fraction. 16 bytes become a UUID. The type of the result depends only on the type of
    `names`.

    Returns:
      `(names, wrong, problem)`. `wrong` is `[n]` bool: whether a name cannot be converted.
      `problem` is the error text for the first such name.
    """
    type_ = names.type
    right = np.zeros(len(names), bool)
    if isinstance(type_, pa.OpaqueType):
        return _huge(names.storage, _HUGE[type_.type_name]), right, ""
    if isinstance(type_, pa.BaseExtensionType):
        return as_integers_or_text(names.storage)
    if pt.is_dictionary(type_) and not is_text(type_.value_type):
        return as_integers_or_text(names.dictionary_decode())
    if _has_16_bytes(type_):
        return _distinct(names, lambda name: str(uuid.UUID(bytes=name))), right, ""
    if pt.is_decimal(type_):
        return _decimals(names), right, ""
    if not pt.is_floating(type_):
        return names, right, ""
    floats = names.to_numpy(zero_copy_only=False).astype(np.float64)
    bits = exact_bits(type_)
    wrong = (floats != np.floor(floats)) | (np.abs(floats) >= 2.0**bits)
    first = float(floats[np.argmax(wrong)]) if len(floats) else 0.0
    whole = np.where(wrong, 0, floats).astype(np.int64)
    return arrow.from_numbers(whole), wrong, problem_of_float(first, bits)


def are_missing(names: pa.Array) -> np.ndarray:
    """`[n]` bool: whether a name is empty, null or NaN."""
    if isinstance(names.type, pa.BaseExtensionType):
        names = names.storage
    missing = names.is_null(nan_is_null=pt.is_floating(names.type))
    missing = arrow.numbers(missing)
    if pt.is_dictionary(names.type):
        empty = are_missing(names.dictionary)
        if not empty.any():
            return missing
        return missing | empty[arrow.numbers(arrow.filled(names.indices, 0))]
    if not is_text(names.type):
        return missing
    lengths = pc.call_function("binary_length", [without_views(names)])
    return missing | (arrow.numbers(arrow.filled(lengths, 0)) == 0)


def without_views(names: pa.Array) -> pa.Array:
    """Converts views, which some functions of Arrow do not take, to large_binary."""
    if pt.is_dictionary(names.type):
        plain = without_views(names.dictionary)
        if plain is names.dictionary:
            return names
        return pa.DictionaryArray.from_arrays(names.indices, plain)
    is_view = pt.is_string_view(names.type) or pt.is_binary_view(names.type)
    return names.cast(pa.large_binary()) if is_view else names


def _decimals(names: pa.Array) -> pa.Array:
    if names.type.scale == 0:
        if names.type.precision <= _INT64_DIGITS:
            return names.cast(pa.int64())
        return names.cast(pa.large_string())
    return _distinct(names, digits_of)


def digits_of(number: decimal.Decimal) -> str:
    """The digits of a finite decimal, without zeros at the end of a fraction."""
    text = f"{number:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _huge(names: pa.Array, signed: bool) -> pa.Array:
    def digits(name: bytes) -> str:
        return str(int.from_bytes(name, "little", signed=signed))

    return _distinct(names, digits)


def _distinct(names: pa.Array, spell) -> pa.Array:
    """Converts names to text by `spell`, which is called once for each distinct name."""
    codes = names.dictionary_encode()
    texts = [spell(name) for name in codes.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(codes.indices, pa.array(texts, pa.string()))


def name_of(value: object) -> str | None:
    """Converts a value of Python or NumPy to a name; None if the value is missing.

    Raises:
      ValueError: the value cannot be a name; the message says why.
    """
    match value:
        case str():
            return str(value) or None
        case bytes():
            return value.decode() or None
        case uuid.UUID():
            return str(value)
        case bool() | np.bool_():
            pass
        case numbers.Integral():
            return str(int(value))
        case float() | np.floating():
            if np.isnan(value):
                return None
            bits = np.finfo(type(value)).nmant + 1
            if value != np.floor(value) or abs(value) >= 2.0**bits:
                raise ValueError(problem_of_float(float(value), bits))
            return str(int(value))
        case decimal.Decimal() if not value.is_infinite():
            return None if value.is_nan() else digits_of(value)
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return None
    raise ValueError(
        f"holds {value!r}, which cannot be a name: names are text or integers; convert it"
    )


# Functions that spell the names of a vocabulary.


def has_only_digits(vocabulary: pa.Array) -> bool:
    """Whether all names of a vocabulary are integers."""
    if not len(vocabulary):
        return False
    is_whole = pc.call_function(
        "match_substring_regex", [vocabulary], pc.MatchSubstringOptions(r"\A-?[0-9]+\z")
    )
    return not is_whole.false_count


def without_point_zero(texts: pa.Array) -> pa.Array:
    """Removes ".0" from integers that were written as floats, like `7.0`."""
    if not len(texts):
        return texts
    options = pc.ReplaceSubstringOptions(r"\A(-?[0-9]+)\.0\z", r"\1")
    return pc.call_function("replace_substring_regex", [texts], options)


# Functions that spell the categories of clicks.


def as_categories(texts: pa.Array) -> pa.Array:
    """Converts texts to the spelling of categories, which is one for all writers.

    Booleans become `true` and `false`, and whole numbers integers: pandas writes `True`, and
    `2.0` in a column with missing numbers. NaN is a missing value and becomes "".
    """
    # Arrow compiles a pattern at each call, which takes longer than a few texts.
    some = pc.MatchSubstringOptions("|".join(pattern for pattern, _ in _CATEGORIES))
    if not pc.call_function("match_substring_regex", [texts], some).true_count:
        return texts
    for pattern, text in _CATEGORIES:
        options = pc.ReplaceSubstringOptions(pattern, text)
        texts = pc.call_function("replace_substring_regex", [texts], options)
    return texts


_CATEGORIES = [
    (r"\A(nan|NaN)\z", ""),
    (r"\A(True|TRUE)\z", "true"),
    (r"\A(False|FALSE)\z", "false"),
    (r"\A(-?0\.0+|-0)\z", "0"),
    (r"\A(-?[1-9][0-9]*)\.0+\z", r"\1"),
]
