"""Converts messages of Python functions to the words of the command line."""

import dataclasses
import functools
import re

from sparsejax.options.option import Options, flags_of

# Arguments in messages, and the option whose flag replaces them, if it has another name.
_ELSEWHERE = {"exclude=None": "exclude_seen=False"}
# Words that look like arguments in messages, but name axes of the mesh.
_AXES = "data", "model"
# Advice in messages for Python, and its replacement for a shell.
_ADVICE = {
    "train model='dlrm'": "train --model dlrm",
    "say what the model gets: DenseColumn(missing=0.0)": (
        'say what the model gets: "missing": 0.0 of this column, in a file for --schema'
    ),
    (
        _SPLIT
        := "use split_at, or use read_sequences(...).split_last(...) and to_sparse() of "
        "its parts (on the command line: split --by time, or split --histories)"
    ): "use split --by time, or split --by last --histories, whose parts train takes, too",
}
# Replacement of the advice to split the data, if the error is about the held-out validation data.
_OF_VALIDATION = (
    "split DATA itself once more, split DATA --by time --fraction .9 --out DIR: train on "
    "DIR/train.parquet, and give --validation DIR/heldout.parquet"
)
# Pattern of names and paths in a message: they come from the user, and are not replaced.
_OF_THE_USER = r"""(?<!\w)'[^']*'|(?<!\w)"[^"]*"|[^\s'"]*/[^\s'"]*"""


def in_flags(text: str, command: type[Options] | None) -> str:
    """Replaces the Python arguments in a message by the flags of a command.

    For `export`, "batch_size=0 must be positive" is "--batch-size 0 must be positive".

    Args:
      text: message. It may contain arguments as `name=value`, `name=True` or `name=...`; or a name
          alone if it contains an underscore, as no other word does.
      command: command whose flags are used, or None.
    """
    if command is None:
        return text
    flags = _spelled(command)
    advices = dict(_ADVICE)
    if "validation" in flags:
        advices[_SPLIT] = _OF_VALIDATION
    for python, advice in advices.items():
        text = text.replace(python, advice)
    if not flags:
        return text
    arguments = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))

    def flag(match: re.Match[str]) -> str:
        argument, end = match["argument"], match["end"]
        if argument is None or (not end and argument.isalpha()):
            return match[0]
        return flags[argument] + " " * (end == "=")

    return re.sub(
        rf"{_OF_THE_USER}|(?<![\w.-])(?P<argument>{arguments})"
        r"(?P<end>=True\b|=\.\.\.|=(?=\S)|(?![\w=]|\.\w))",
        flag,
        text,
    )


@functools.cache
def _spelled(command: type[Options]) -> dict[str, str]:
    """A command's flags, by the name of the Python argument, or by "argument=value"."""
    found: dict[str, str] = {}
    for option in dataclasses.fields(command):
        for flag in flags_of(option):
            name = option.name
            if flag.is_switch and flag.gives is not True:
                name += f"={flag.gives!r}"
            found.setdefault(name, flag.spelled(option.name))
    found |= {n: found[o] for n, o in _ELSEWHERE.items() if o in found}
    return {name: flag for name, flag in found.items() if name not in _AXES}
