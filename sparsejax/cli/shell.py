"""The command line of a verb: flags that are made of its options, for tyro."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import sys
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from sparsejax.cli.wording import in_flags
from sparsejax.options.option import Flag, Options, choices_of, flags_of, texts_of


def numbers_of(text: str) -> int | tuple[int, ...]:
    """The whole number, or the numbers with commas between.

    Raises:
      ValueError: it is something else.
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"is a whole number, or several with commas, such as 5,10; got {text!r}"
        ) from None
    return found if len(found) > 1 else found[0]


def names_of(text: str) -> list[str]:
    """The names in a file, one a line; or names with commas between.

    Raises:
      ValueError: it looks like a file, and there is none.
    """
    from sparsejax.data.files.opening import lines_of

    if os.path.isfile(text):
        return lines_of(text)
    # A name that is no item has no effect, so a mistyped file must not be taken for one.
    if re.search(r"\.(txt|csv|tsv|list)$", text):
        raise ValueError(f"{text}: there is no such file")
    return text.split(",")


def values_of(text: str) -> dict[str, str]:
    """Texts by name, `hour=9,device=phone`.

    Raises:
      ValueError: one has no name, or a name comes twice.
    """
    parts = [part.partition("=") for part in text.split(",")]
    found = {name: value for name, sign, value in parts if name and sign}
    if len(found) < len(parts):
        raise ValueError(f"is one value by column, such as day=1,hour=9; got {text!r}")
    return found


def weights_of(text: str) -> dict[str, float] | str:
    """Numbers by name, `view=.1,purchase=1`; or the text, if it has no such sign.

    Raises:
      ValueError: one is no number or has no name, or a name comes twice.
    """
    if "=" not in text:
        return text
    try:
        return {name: float(number) for name, number in values_of(text).items()}
    except ValueError:
        raise ValueError(
            f"is a column, or one number by kind, such as purchase=1,view=.1; got {text!r}"
        ) from None


# Readers of values that are lists, by `Flag.read`.
_READERS = {
    "names": names_of,
    "numbers": numbers_of,
    "weights": weights_of,
    "values": values_of,
}


@functools.cache
def parser_of(command: type[Options]) -> type:
    """A dataclass for tyro, with a field for each flag of a command.

    Options that stand under a heading are in a dataclass of their own inside.
    """
    groups = {"": []}
    for option, flag in all_flags(command):
        of = _stated_in(command, option)
        field = _field(command, option, flag)
        groups.setdefault(vars(of).get("heading", ""), []).append((field, of))
    own = list(inspect.get_annotations(command))
    fields = [field for field, _ in groups.pop("")]
    # Positional arguments are in the order in which the command itself has them.
    fields.sort(key=lambda field: own.index(field[0]) if field[0] in own else len(own))
    for heading, members in groups.items():
        of = members[0][1]
        inner = _dataclass(of, [field for field, _ in members])
        hint = Annotated[inner, arg(help=_summary(of))]
        fields.append((heading, hint, dataclasses.field(default_factory=inner)))
    return _dataclass(command, fields)


def name_of(command: type[Options]) -> type:
    """A dataclass in place of `parser_of`, for a command that is not the one that is named."""
    return _dataclass(command, [])


def all_flags(command: type[Options]) -> Iterator[tuple[dataclasses.Field[Any], Flag]]:
    """The flags of a command, each with its option."""
    for option in dataclasses.fields(command):
        for flag in flags_of(option):
            yield option, flag


def flag_names(command: type[Options]) -> dict[str, str]:
    """The flag of each option that has one with a dash.

    >>> flag_names(Export)
    {'k': '--k', 'batch_size': '--batch-size'}
    """
    found: dict[str, str] = {}
    for option, flag in all_flags(command):
        if not flag.positional:
            found.setdefault(option.name, flag.spelled(option.name))
    return found


def given(command: type[Options], argv: Sequence[str]) -> frozenset[str]:
    """The options of a command whose flags are among the words of a command line.

    >>> sorted(given(Export, ["run", "out", "--k", "10"]))
    ['k']
    """
    words, flags = _flags_among(argv), [*all_flags(command)]
    # --no-value is a flag of its own, and says nothing of --value.
    own = {flag.spelled(option.name) for option, flag in flags}
    return frozenset(
        option.name
        for option, flag in flags
        if (word := flag.spelled(option.name)) in words
        or word.replace("--", "--no-", 1) in words - own
    )


def _flags_among(argv: Sequence[str]) -> set[str]:
    """The words of a command line without their values, with dashes in place of underscores."""
    return {word.partition("=")[0].replace("_", "-") for word in argv}


def check_lists(command: type[Options], argv: Sequence[str]) -> None:
    """Raises ValueError where the flag of a list is given twice: the last one alone would count.

    >>> check_lists(Train, ["data", "--dense", "age", "--dense", "price", "--fused"])
    Traceback (most recent call last):
    ...
    ValueError: --dense is given twice: write --dense age price
    """
    parts: list[list[str]] = [[""]]  # a flag, and the words after it
    for word in argv:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            parts.append([flag.replace("_", "-"), *([value] if value else [])])
        else:
            parts[-1].append(word)
    for option, flag in all_flags(command):
        word = flag.spelled(option.name)
        type_ = _type(command, option, flag)
        kinds = (type_, *typing.get_args(type_))  # of a list or None
        is_list = any(tuple in (kind, typing.get_origin(kind)) for kind in kinds)
        found = [part[1:] for part in parts if part[0] == word]
        if is_list and not flag.repeated and len(found) > 1:
            words = " ".join(word for part in found for word in part)
            raise ValueError(f"{word} is given twice: write {word} {words}")


def command_of[C: Options](command: type[C], parsed: Any, argv: Sequence[str]) -> C:
    """The options that a command line has.

    Args:
      command: the class of the options.
      parsed: an object of `parser_of(command)`.
      argv: words of the command line, which show which options were given.

    Raises:
      ValueError: a value cannot be read, or two flags contradict each other.
    """
    values = {}
    for name, value in vars(parsed).items():
        values |= vars(value) if dataclasses.is_dataclass(value) else {name: value}
    names = set(given(command, argv))
    words = _flags_among(argv)
    found = {}
    for option in dataclasses.fields(command):
        flags = flags_of(option)
        spelled = [flag.spelled(option.name) for flag in flags]
        if len(words.intersection(spelled)) > 1:
            raise ValueError(f"give {' or '.join(spelled)}, not both")
        for flag in flags:
            value = values[_attribute(option, flag)]
            if flag.is_switch and value:
                found[option.name] = flag.gives
            elif flag.positional and value != option.default:
                names.add(option.name)
            if not flag.is_switch and (
                option.name in names or option.default is dataclasses.MISSING
            ):
                try:
                    value = _READERS[flag.read](value) if flag.read else value
                except ValueError as error:
                    raise ValueError(f"{spelled[0]} {error}") from None
                found.setdefault(option.name, value)
    return command(**found).noting(given=names)


def words_of(command: Options, names: Collection[str]) -> list[str]:
    """The words of a command line that state some options, unless they have their defaults."""
    words: list[str] = []
    for option, flag in all_flags(type(command)):
        value, word = getattr(command, option.name), flag.spelled(option.name)
        if option.name not in names or value == option.default:
            continue
        if flag.is_switch:
            words += [word] * (value == flag.gives)
        elif value is not None:
            if isinstance(value, Mapping):
                value = ",".join(f"{name}={number}" for name, number in value.items())
            parts = value if isinstance(value, tuple) else (value,)
            words += [word, *map(str, parts)]
    return words


def _attribute(option: dataclasses.Field[Any], flag: Flag) -> str:
    """The name of a flag's value in what tyro makes."""
    return option.name + "_" * flags_of(option).index(flag)


def _field(
    command: type[Options], option: dataclasses.Field[Any], flag: Flag
) -> tuple[str, Any, Any]:
    """The field of a flag, as `make_dataclass` takes it."""
    # The texts of options speak of arguments; of the others the texts speak of flags.
    text = flag.text or in_flags(texts_of(command)[option.name], command)
    type_ = _type(command, option, flag)
    settings: list[Any] = []
    # A default of Python need not have the type of the flag's value.
    keeps = flag.type is None or flag.repeated
    default = option.default if keeps else None
    is_needed = option.default is dataclasses.MISSING
    is_list = flag.positional and "tuple" in str(option.type)
    hint = None  # the default itself
    if flag.default:
        hint = f"(default: {flag.default})"
    elif flag.is_switch or is_list or (default in (None, ()) and not is_needed):
        hint = ""
    if flag.is_switch:
        settings.append(FlagCreatePairsOff)
    if flag.positional:
        type_ = Positional[type_]
    if flag.repeated:
        type_ = UseAppendAction[type_]
    settings.append(
        arg(
            name=None if flag.positional else flag.spelled(option.name)[2:],
            metavar=flag.value or _metavar(flag, str(option.type)),
            help=text,
            help_behavior_hint=hint,
        )
    )
    hinted = Annotated[(type_, *settings)]
    name = _attribute(option, flag)
    if is_needed:
        return name, hinted, dataclasses.field()
    default = False if flag.is_switch else default
    return name, hinted, dataclasses.field(default=default)


def _metavar(flag: Flag, type_: str) -> str | None:
    """The text for a flag's value, without None; None if tyro finds it."""
    if (choices := choices_of(type_)) and not flag.is_switch:
        return f"{{{','.join(choices)}}}"
    return {"int | None": "INT", "float | None": "FLOAT"}.get(type_)


def _type(command: type[Options], option: dataclasses.Field[Any], flag: Flag) -> Any:
    """The type of a flag's value."""
    if flag.is_switch:
        return bool
    if flag.type is not None:
        return flag.type
    if not isinstance(option.type, str):
        return option.type
    of = _stated_in(command, option)
    return eval(str(option.type), vars(sys.modules[of.__module__]))


def _stated_in(command: type[Options], option: dataclasses.Field[Any]) -> type[Options]:
    """The class that states an option, which may be above the command."""
    return [
        c
        for c in command.__mro__
        if getattr(c, "__dataclass_fields__", {}).get(option.name) is option
    ][-1]


def _summary(cls: type) -> str:
    """The first sentence of a docstring."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _dataclass(cls: type, fields: Sequence[tuple[str, Any, Any]]) -> type:
    """A dataclass of the same name, with the docstring up to the attributes."""
    text = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")[0].strip()
    return dataclasses.make_dataclass(
        cls.__name__,
        fields,
        frozen=True,
        kw_only=True,
        namespace={"__doc__": text, "__module__": cls.__module__},
    )
