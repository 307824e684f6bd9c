"""The command line of a verb: flags made from its options, for tyro."""

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
    """Parses an integer, or several integers separated by commas.

    Raises:
      ValueError: the text is something else.
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"is a whole number, or several with commas, such as 5,10; got {text!r}"
        ) from None
    return found if len(found) > 1 else found[0]


def names_of(text: str) -> list[str]:
    """Reads the names in a file, one per line; or splits names at commas.

    Raises:
      ValueError: the text looks like a file name, but the file does not exist.
    """
    from sparsejax.data.files.opening import lines_of

    if os.path.isfile(text):
        return lines_of(text)
    # Unknown names are ignored later, so a mistyped file name must be an error here.
    if re.search(r"\.(txt|csv|tsv|list)$", text):
        raise ValueError(f"{text}: there is no such file")
    return text.split(",")


def values_of(text: str) -> dict[str, str]:
    """Parses texts by name, such as `hour=9,device=phone`.

    Raises:
      ValueError: a text has no name, or a name is repeated.
    """
    parts = [part.partition("=") for part in text.split(",")]
    found = {name: value for name, sign, value in parts if name and sign}
    if len(found) < len(parts):
        raise ValueError(f"is one value by column, such as day=1,hour=9; got {text!r}")
    return found


def weights_of(text: str) -> dict[str, float] | str:
    """Parses numbers by name, such as `view=.1,purchase=1`; returns a text without "=" unchanged.

    Raises:
      ValueError: a value is not a number or has no name, or a name is repeated.
    """
    if "=" not in text:
        return text
    try:
        return {name: float(number) for name, number in values_of(text).items()}
    except ValueError:
        raise ValueError(
            f"is a column, or one number by kind, such as purchase=1,view=.1; got {text!r}"
        ) from None


# Functions that parse a flag's value, by the name in `Flag.read`.
_READERS = {
    "names": names_of,
    "numbers": numbers_of,
    "weights": weights_of,
    "values": values_of,
}


@functools.cache
def parser_of(command: type[Options]) -> type:
    """A dataclass for tyro, with a field for each flag of a command.

    Options under a heading are in a nested dataclass.
    """
    groups = {"": []}
    for option, flag in all_flags(command):
        of = _stated_in(command, option)
        field = _field(command, option, flag)
        groups.setdefault(vars(of).get("heading", ""), []).append((field, of))
    own = list(inspect.get_annotations(command))
    fields = [field for field, _ in groups.pop("")]
    # Positional arguments are in the order in which the command's class declares them.
    fields.sort(key=lambda field: own.index(field[0]) if field[0] in own else len(own))
    for heading, members in groups.items():
        of = members[0][1]
        inner = _dataclass(of, [field for field, _ in members])
        hint = Annotated[inner, arg(help=_summary(of))]
        fields.append((heading, hint, dataclasses.field(default_factory=inner)))
    return _dataclass(command, fields)


def name_of(command: type[Options]) -> type:
    """A placeholder for `parser_of`, for commands that the command line does not name."""
    return _dataclass(command, [])


def all_flags(command: type[Options]) -> Iterator[tuple[dataclasses.Field[Any], Flag]]:
    """Iterates over the options of a command with their flags."""
    for option in dataclasses.fields(command):
        for flag in flags_of(option):
            yield option, flag


def flag_names(command: type[Options]) -> dict[str, str]:
    """The flag of each option that is not positional.

    >>> flag_names(Export)
    {'k': '--k', 'batch_size': '--batch-size'}
    """
    found: dict[str, str] = {}
    for option, flag in all_flags(command):
        if not flag.positional:
            found.setdefault(option.name, flag.spelled(option.name))
    return found


def given(command: type[Options], argv: Sequence[str]) -> frozenset[str]:
    """The names of the options whose flags occur in a command line.

    >>> sorted(given(Export, ["run", "out", "--k", "10"]))
    ['k']
    """
    words, flags = _flags_among(argv), [*all_flags(command)]
    # `--no-value` is a flag of its own, and not the negation of `--value`.
    own = {flag.spelled(option.name) for option, flag in flags}
    return frozenset(
        option.name
        for option, flag in flags
        if (word := flag.spelled(option.name)) in words
        or word.replace("--", "--no-", 1) in words - own
    )


def _flags_among(argv: Sequence[str]) -> set[str]:
    """The words of a command line, without values after "=", and with "-" in place of "_"."""
    return {word.partition("=")[0].replace("_", "-") for word in argv}


def check_lists(command: type[Options], argv: Sequence[str]) -> None:
    """Raises ValueError if the flag of a list is given twice, as only the last one would count.

    >>> check_lists(Train, ["data", "--dense", "age", "--dense", "price", "--fused"])
    Traceback (most recent call last):
    ...
    ValueError: --dense is given twice: write --dense age price
    """
    parts: list[list[str]] = [[""]]  # a flag, followed by its words
    for word in argv:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            parts.append([flag.replace("_", "-"), *([value] if value else [])])
        else:
            parts[-1].append(word)
    for option, flag in all_flags(command):
        word = flag.spelled(option.name)
        type_ = _type(command, option, flag)
        kinds = (type_, *typing.get_args(type_))  # for a list or None
        is_list = any(tuple in (kind, typing.get_origin(kind)) for kind in kinds)
        found = [part[1:] for part in parts if part[0] == word]
        if is_list and not flag.repeated and len(found) > 1:
            words = " ".join(word for part in found for word in part)
            raise ValueError(f"{word} is given twice: write {word} {words}")


def command_of[C: Options](command: type[C], parsed: Any, argv: Sequence[str]) -> C:
    """Makes the options of a command from its parsed command line.

    Args:
      command: the class of the options.
      parsed: instance of `parser_of(command)`.
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
    """The command-line words for some options, without those that have their default values."""
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
    """The name of the attribute for a flag in the dataclass that tyro fills."""
    return option.name + "_" * flags_of(option).index(flag)


def _field(
    command: type[Options], option: dataclasses.Field[Any], flag: Flag
) -> tuple[str, Any, Any]:
    """The dataclass field of a flag, as `make_dataclass` accepts it."""
    # The texts of options name Python arguments, but the help must name flags.
    text = flag.text or in_flags(texts_of(command)[option.name], command)
    type_ = _type(command, option, flag)
    settings: list[Any] = []
    # If a flag has its own type, the option's default may have another type.
    keeps = flag.type is None or flag.repeated
    default = option.default if keeps else None
    is_needed = option.default is dataclasses.MISSING
    is_list = flag.positional and "tuple" in str(option.type)
    hint = None  # shows the default itself
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
    """The text that stands for a flag's value in help; None if tyro can derive it."""
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
    """The class that defines an option: the command's class or a base class."""
    return [
        c
        for c in command.__mro__
        if getattr(c, "__dataclass_fields__", {}).get(option.name) is option
    ][-1]


def _summary(cls: type) -> str:
    """The first line of a class's docstring."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _dataclass(cls: type, fields: Sequence[tuple[str, Any, Any]]) -> type:
    """A dataclass with the name of `cls`, and its docstring without the attributes."""
    text = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")[0].strip()
    return dataclasses.make_dataclass(
        cls.__name__,
        fields,
        frozen=True,
        kw_only=True,
        namespace={"__doc__": text, "__module__": cls.__module__},
    )
