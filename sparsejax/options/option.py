"""Options of a verb as a dataclass, from which its arguments and its flags are made.

A field is an option. Its name is the argument's name in Python, the entry of the docstring is
its text in both, and `option` states what else there is to say. Only light packages are imported
here, so that `sparsejax --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Concatenate, Literal, Self

# The kinds of models, and those among them that rank items.
KindName = Literal["items", "histories", "clicks"]
RANKING: tuple[KindName, ...] = ("items", "histories")
_NOTHING: Any = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """The form of an option on the command line.

    Attributes:
      name: the flag's name without dashes; by default that of the option.
      value: how help shows the flag's value.
      default: how help shows the default; "" shows none, and None the default itself.
      type: the type of the flag's value, if it is not that of the option.
      read: the form of the flag's value: "numbers" are whole numbers with commas between;
        "names" likewise, or a file with one a line.
      positional: whether it is an argument without a flag.
      repeated: whether it may be given several times.
      gives: the option's value if the flag is given, which then has no value of its own.
      text: help in place of the option's text.
    """

    name: str = ""
    value: str = ""
    default: str | None = None
    type: Any = None
    read: Literal["", "names", "numbers"] = ""
    positional: bool = False
    repeated: bool = False
    gives: Any = _NOTHING
    text: str = ""

    @property
    def is_switch(self) -> bool:
        """Whether the flag has no value."""
        return self.gives is not _NOTHING

    def spelled(self, option: str) -> str:
        """The flag as a user writes it, for an option of this name."""
        if self.positional:
            return re.sub(r"\W", "", self.value or option.upper())
        return f"--{self.name or option.replace('_', '-')}"


def option(
    default: Any = dataclasses.MISSING,
    *flags: Flag,
    kinds: Collection[KindName] = (),
    shell: bool = True,
) -> Any:
    """A field of `Options`.

    Args:
      default: its default; without one it is required.
      flags: its flags, if one by its name and type does not do.
      kinds: the kinds of models that have a use for it; all of them by default.
      shell: whether the command line has it.
    """
    metadata = {"flags": flags or (Flag(),), "kinds": kinds}
    if not shell:
        metadata["flags"] = ()
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(field: dataclasses.Field[Any]) -> tuple[Flag, ...]:
    """The flags of an option."""
    return field.metadata.get("flags", (Flag(),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A call of a verb, with all of its options.

    Attributes:
      heading: Where the options stand together in the help of a command, if they do.
    """

    heading: ClassVar[str] = ""

    @property
    def given(self) -> frozenset[str]:
        """The options that were given, also those that have their default."""
        return vars(self).get("_given", frozenset())

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """The names of all options."""
        return frozenset(field.name for field in dataclasses.fields(cls))

    def values_of(self, of: type[Options]) -> dict[str, Any]:
        """The values of the options that a class above this one states."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(of)}

    def say(self, text: str) -> None:
        """Tells who asks, for instance what was read and what was chosen."""
        if (told := vars(self).get("_told")) is not None:
            told(text)

    def noting(
        self,
        *,
        given: Collection[str] | None = None,
        told: Callable[[str], None] | None = None,
    ) -> Self:
        """The options, with the names of those that were given, and with who is told."""
        given = self.given if given is None else given
        return self._noted(dataclasses.replace(self), given, told)

    def replaced(self, **changes: Any) -> Self:
        """The options with some that are others. They do not count as given."""
        return self._noted(dataclasses.replace(self, **changes), self.given)

    def as_type[T: Options](self, type_: type[T], **more: Any) -> T:
        """The options of a verb with which it shares some.

        Args:
          type_: the options of that verb.
          more: options that it has beside.
        """
        shared = (self.option_names() & type_.option_names()) - more.keys()
        new = type_(**{name: getattr(self, name) for name in shared}, **more)
        return self._noted(new, (self.given & shared) | more.keys())

    def _noted[T: Options](
        self,
        new: T,
        given: Collection[str],
        told: Callable[[str], None] | None = None,
    ) -> T:
        """Notes on new options which were given. `say` reaches the listener of these options."""
        object.__setattr__(new, "_given", frozenset(given))
        object.__setattr__(new, "_told", told or vars(self).get("_told"))
        return new

    def useful(self, kind: str, of: type[Options]) -> dict[str, Any]:
        """The options of a class that a kind of models has a use for, as arguments."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(of)
            if kind in (field.metadata.get("kinds") or (kind,))
        }

    @classmethod
    def spelled(cls, name: str) -> str:
        """The option of this name as a user writes it: in Python, as it is called."""
        return name

    def check_kind(self, kind: str) -> None:
        """Raises ValueError if an option was given that a kind of models has no use for."""
        for field in dataclasses.fields(self):
            kinds = field.metadata.get("kinds")
            if kinds and kind not in kinds and field.name in self.given:
                raise ValueError(
                    f"{self.spelled(field.name)} is of no use for a model of {kind}: leave it out"
                )


@functools.cache
def texts_of(options: type[Options]) -> Mapping[str, str]:
    """The text of each option, from the docstrings of its class and of those above."""
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
    """A decorator of a method of one argument, which is made of those of a call.

    The method then has the signature of the options, and their texts in its docstring.

    Args:
      options: the class of the options.
    """
    assert isinstance(options, type)
    assert issubclass(options, Options)
    signature = inspect.signature(options)

    def decorate(method: Callable[[S, Any], R]) -> Callable[Concatenate[S, P], R]:
        own = next(iter(inspect.signature(method).parameters.values()))

        @functools.wraps(method)
        def verb(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{method.__name__}(): {error}") from None
            # None in place of a default of None is no argument.
            given = {
                name
                for name, value in bound.items()
                if value is not None or signature.parameters[name].default is not None
            }
            return method(self, options(**bound).noting(given=given))

        parameters = [own, *signature.parameters.values()]
        verb.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        verb.__doc__ = _documented(method.__doc__ or "", texts_of(options), signature)
        return verb

    return decorate


def _documented(
    text: str, texts: Mapping[str, str], signature: inspect.Signature
) -> str:
    """A docstring with an entry for each argument, in front of the errors."""
    entries = [
        textwrap.fill(
            f"{name}: {texts[name]}", 92, initial_indent="  ", subsequent_indent="    "
        )
        for name in signature.parameters
    ]
    before, errors, after = inspect.cleandoc(text).partition("\nRaises:\n")
    return before.rstrip() + "\n\nArgs:\n" + "\n".join(entries) + f"\n{errors}{after}"
