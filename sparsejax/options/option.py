"""Options of a verb as a dataclass, from which its Python arguments and its flags are made.

Each field is an option. Its name is the name of the Python argument, its entry in the docstring is
its text for both, and `option` states its other facts. Only light packages are imported here, so
that `sparsejax --help` answers at once.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import operator
import re
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Concatenate, Literal, NamedTuple, Self

# The names of the kinds of models.
KindName = Literal["items", "histories", "clicks"]
RANKING: tuple[KindName, ...] = ("items", "histories")
_NOTHING: Any = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """The form of an option on the command line.

    Attributes:
      name: name of the flag without dashes; by default the name of the option.
      value: text for the value of the flag in help; by default made from the type.
      default: text for the default in help; by default the default value, unless it is None.
      type: type of the value of the flag, if it differs from that of the option.
      read: format of the value of the flag: "numbers" are integers separated by commas; "names"
          are words separated by commas, or a file with a name on each line; "weights" are numbers
          by name, `NAME=NUMBER` separated by commas, or a single name; "values" are texts by name.
      positional: whether it is a positional argument.
      repeated: whether the flag may be given several times.
      gives: value of the option if the flag, which then takes no value, is given.
      text: help text in place of the text of the option.
    """

    name: str = ""
    value: str = ""
    default: str = ""
    type: Any = None
    read: Literal["", "names", "numbers", "weights", "values"] = ""
    positional: bool = False
    repeated: bool = False
    gives: Any = _NOTHING
    text: str = ""

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.gives is not _NOTHING

    def spelled(self, option: str) -> str:
        """The flag as a user types it, given the name of the option."""
        if self.positional:
            return re.sub(r"\W", "", self.value or option.upper())
        return f"--{self.name or option.replace('_', '-')}"


class _Stated(NamedTuple):
    """Facts about an option that `option` states, besides its name, type and default."""

    flags: tuple[Flag, ...] = (Flag(),)
    kinds: Collection[KindName] = ()
    least: float | None = None
    above: float | None = None
    below: float | None = None

    @classmethod
    def about(cls, field: dataclasses.Field[Any]) -> _Stated:
        """The facts that `option` stated about a dataclass field."""
        return field.metadata.get("stated", cls())

    def check_bounds(self, value: Any, name: Callable[[], str]) -> None:
        """Raises an error if a number is out of bounds. The value may be a sequence of numbers."""
        if not self.bounds():
            return
        value = value.tolist() if hasattr(value, "tolist") else value
        several = isinstance(value, Sequence) and not isinstance(value, str)
        for each in value if several else (value,):
            if each is None:
                continue
            is_whole = isinstance(self.least, int)
            if not hasattr(each, "__index__" if is_whole else "__float__"):
                what = "a whole number" if is_whole else "a number"
                raise TypeError(f"{name()} must be {what}, got {each!r}")
            for is_good, bound, text in self.bounds():
                if not is_good(each, bound):
                    raise ValueError(f"{name()} must be {text}, got {each}")

    def bounds(self) -> list[tuple[Callable[[Any, Any], bool], float, str]]:
        """For each bound: a comparison, the number to compare with, and both as text."""
        compared = (
            (operator.ge, self.least, "at least"),
            (operator.gt, self.above, "above"),
            (operator.lt, self.below, "below"),
        )
        return [
            (is_good, bound, f"{how} {bound:,.10g}")
            for is_good, bound, how in compared
            if bound is not None
        ]


def option(
    default: Any = dataclasses.MISSING,
    *flags: Flag | str,
    kinds: Collection[KindName] = (),
    shell: bool = True,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of `Options`.

    Args:
      default: default value; without one the option is required.
      flags: flags of the option, if not a single one made from its name and type; a string is the
          text for the default in help.
      kinds: kinds of models that use the option; () stands for all kinds.
      shell: whether the command line has the option.
      least: smallest allowed value. An int also requires integers.
      above: number that the value must exceed.
      below: number that the value must be less than.
    """
    named = (Flag(default=f) if isinstance(f, str) else f for f in flags or ("",))
    own = tuple(named) if shell else ()
    stated = _Stated(own, kinds, least, above, below)
    return dataclasses.field(default=default, metadata={"stated": stated})


def flags_of(field: dataclasses.Field[Any]) -> tuple[Flag, ...]:
    """The flags of an option."""
    return _Stated.about(field).flags


def bounds_of(field: dataclasses.Field[Any]) -> str:
    """The bounds of an option, as text."""
    return ", ".join(text for _, _, text in _Stated.about(field).bounds())


def kinds_of(field: dataclasses.Field[Any]) -> Collection[KindName]:
    """The kinds of models that use an option; () stands for all."""
    return _Stated.about(field).kinds


# Flags that many options share.
SWITCH = Flag(gives=True)
FILE, FOLDER, COLUMN = Flag(value="FILE"), Flag(value="DIR"), Flag(value="COLUMN")
# Flag for a file, where Python also accepts data in memory.
ANY_FILE = Flag(type=str | None, value="FILE")

# Without `eq=False` and `repr=False`, each dataclass would compile methods to compare, hash and
# print: a quarter of the command line's import time. `Options` defines them once for all.
_dataclass = functools.partial(dataclasses.dataclass, frozen=True, eq=False, repr=False)


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False)
@_dataclass(kw_only=True)
class Options:
    """The options of a call of a verb. Each subclass is a frozen dataclass.

    Options are keyword-only, unless the subclass is made with `kw_only=False`.

    Attributes:
      heading: heading of the options in the help of a command, if they form a group.
      only_with: for each option that depends on others, the names of these options: it has no
          effect unless one of them has a value other than its default. Base classes may add
          entries.
    """

    heading: ClassVar[str] = ""
    only_with: ClassVar[Mapping[str, Collection[str]]] = {}

    def __init_subclass__(cls, *, kw_only: bool = True) -> None:
        _dataclass(cls, kw_only=kw_only)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            spelled = functools.partial(self.spelled, name)
            _Stated.about(field).check_bounds(value, spelled)
            known = choices_of(str(field.type)) if isinstance(value, str) else ()
            if known and value not in known:
                none = [] if field.default is not None else ["None"]
                choices = " or ".join([*(f'"{each}"' for each in known), *none])
                raise ValueError(f"{spelled()} is {choices}, got {value!r}")

    def __eq__(self, other: object) -> bool:
        values = self.values_of(type(self))
        return type(other) is type(self) and values == other.values_of(type(self))

    def __repr__(self) -> str:
        values = self.values_of(type(self)).items()
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in values)})"

    @property
    def given(self) -> frozenset[str]:
        """The names of options that were given explicitly, even if their value is the default."""
        return vars(self).get("_given", frozenset())

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """The names of all options of this class."""
        return frozenset(field.name for field in dataclasses.fields(cls))

    def values_of(self, of: type[Options]) -> dict[str, Any]:
        """The values of those options that the base class `of` defines."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(of)}

    def say(self, text: str) -> None:
        """Reports a line of text to the caller, for instance what was read and what was chosen."""
        if (told := vars(self).get("_told")) is not None:
            told(text)

    def noting(
        self,
        *,
        given: Collection[str] | None = None,
        told: Callable[[str], None] | None = None,
    ) -> Self:
        """A copy that records the names of the given options, and the function that `say`
        calls.
        """
        given = self.given if given is None else given
        return self._noted(dataclasses.replace(self), given, told)

    def replaced(self, **changes: Any) -> Self:
        """A copy with some options changed. The changed options do not count as given."""
        return self._noted(dataclasses.replace(self, **changes), self.given)

    def as_type[T: Options](self, type_: type[T], **more: Any) -> T:
        """Converts the shared options to the options of another verb.

        Args:
          type_: class of the options of the other verb.
          more: further options of the other verb.
        """
        shared = self.shared_with(type_)
        new = type_(**{**shared, **more})
        return self._noted(new, (self.given & shared.keys()) | more.keys())

    def shared_with(self, type_: type[Options]) -> dict[str, Any]:
        """The values of the options that another verb also has."""
        shared = self.option_names() & type_.option_names()
        return {name: getattr(self, name) for name in shared}

    def _noted[T: Options](
        self, new: T, given: Collection[str], told: Callable[[str], None] | None = None
    ) -> T:
        """Records in `new` which options were given, and returns it.

        Its `say` calls the function `told`, by default that of these options.
        """
        object.__setattr__(new, "_given", frozenset(given))
        object.__setattr__(new, "_told", told or vars(self).get("_told"))
        return new

    def useful(self, kind: str, of: type[Options]) -> dict[str, Any]:
        """The options defined by a class that apply to a kind of model, as keyword arguments."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(of)
            if kind in (kinds_of(field) or (kind,))
        }

    @classmethod
    def spelled(cls, name: str) -> str:
        """The option as a user writes it in Python."""
        return name

    def check_kind(self, kind: str) -> None:
        """Raises ValueError if a given option does not apply to the kind of the model.

        Args:
          kind: name of the kind of the model.
        """
        for field in dataclasses.fields(self):
            kinds = kinds_of(field)
            if kinds and kind not in kinds and field.name in self.given:
                name = self.spelled(field.name)
                raise ValueError(
                    f"{name} is of no use for a model of {kind}: leave it out"
                )
        self.check_effect()

    def check_effect(self) -> None:
        """Raises ValueError if an option was given without another option that it depends on."""
        needed: dict[str, Collection[str]] = {}
        for cls in reversed(type(self).__mro__):
            needed |= vars(cls).get("only_with", {})
        for name, others in needed.items():
            if name in self.given and not any(map(self._is_changed, others)):
                wanted = " or ".join(map(self.spelled, others))
                raise ValueError(
                    f"{self.spelled(name)} needs {wanted}, without which it has no effect"
                )

    def _is_changed(self, name: str) -> bool:
        """Whether an option has another value than its default."""
        (field,) = (f for f in dataclasses.fields(self) if f.name == name)
        value, default = getattr(self, name), field.default
        return type(value) is not type(default) or value != default


@functools.cache
def choices_of(type_: str) -> tuple[str, ...]:
    """The strings that an option accepts, if its type is a Literal."""
    found = re.fullmatch(r"Literal\[([^]]+)\](?: \| None)?", type_)
    return () if found is None else ast.literal_eval(f"({found[1]},)")


@functools.cache
def texts_of(options: type[Options]) -> Mapping[str, str]:
    """The text of each option, from the docstrings of its class and the base classes."""
    found: dict[str, str] = {}
    for cls in reversed(options.__mro__):
        _, _, entries = inspect.cleandoc(vars(cls).get("__doc__") or "").partition(
            "\nAttributes:\n"
        )
        for entry in re.split(r"\n(?=\S)", textwrap.dedent(entries)):
            name, _, text = entry.partition(":")
            if text:
                found[name.strip()] = " ".join(text.split())
    return found


def takes[**P, S, R](
    options: Callable[P, Any],
) -> Callable[[Callable[[S, Any], R]], Callable[Concatenate[S, P], R]]:
    """A decorator for a method with one argument, an options object built from the call's
    arguments.

    The method gets the signature of the options, and their texts in its docstring.

    Args:
      options: the class of the options.
    """
    return lambda method: _called(method, options, 1)


def verb[**P, R](
    options: Callable[P, Any],
) -> Callable[[Callable[[Any], R]], Callable[P, R]]:
    """A decorator for a function with one argument, otherwise like `takes`.

    Args:
      options: the class of the options.
    """
    return lambda function: _called(function, options, 0)


def _called(function: Callable[..., Any], options: Any, own: int) -> Any:
    """Wraps a function: all arguments after the first `own` ones are converted to options."""
    asked = _asking(options, function.__name__)

    @functools.wraps(function)
    def verb(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:own], asked(args[own:], kwargs))

    parameters = inspect.signature(function).parameters.values()
    return _described(verb, options, *[*parameters][:own])


def _asking(
    options: Callable[..., Any], name: str
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Makes a function that converts the arguments of a call to options."""
    signature = inspect.signature(options)

    def asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}(): {error}") from None
        # An argument None counts as given only if the option's default is not None.
        given = {
            name
            for name, value in bound.items()
            if value is not None or signature.parameters[name].default is not None
        }
        return options(**bound).noting(given=given)

    return asked


def _described[F: Callable[..., Any]](
    verb: F, options: Any, *own: inspect.Parameter
) -> F:
    """Gives a function the signature of its options, and adds their texts to its docstring."""
    signature = inspect.signature(options)
    parameters = [*own, *signature.parameters.values()]
    verb.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters,
        return_annotation=inspect.signature(verb).return_annotation,
    )
    verb.__doc__ = _documented(verb.__doc__ or "", texts_of(options), signature)
    return verb


def _documented(
    text: str, texts: Mapping[str, str], signature: inspect.Signature
) -> str:
    """A docstring to which an entry for each argument is added, before "Returns" and "Raises"."""
    entries = [
        textwrap.fill(
            f"{name}: {texts[name]}",
            92,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        for name in signature.parameters
    ]
    before, *after = re.split(
        r"\n(?=(?:Returns|Raises):\n)", inspect.cleandoc(text), maxsplit=1
    )
    parts = [before.rstrip(), "", "Args:", *entries]
    return "\n".join([*parts, *(f"\n{rest}" for rest in after)])
