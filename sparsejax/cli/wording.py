"""Messages of Python functions, in the words of the command line."""

import re

from sparsejax.cli.flags import Command, flags_of

# Arguments whose names in Python are not those of their flags.
_ELSEWHERE = {"epochs": "num_epochs", "no_value": "indicator=True"}
_ELSEWHERE |= {"keep_seen": "exclude=None", "no_time": "time=None"}
_ELSEWHERE |= {"test": "heldout", "train": "inputs", "skip_bad_lines": "skip_bad=True"}
# Advice of messages in Python, and the same in a shell.
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
# The same where a part of the data is held out for validation, which may be a split's part.
_OF_VALIDATION = (
    "split DATA itself once more, split DATA --by time --fraction .9 --out DIR: train on "
    "DIR/train.parquet, and give --validation DIR/heldout.parquet"
)
# Names and paths in a message are the user's, whatever words they contain.
_OF_THE_USER = r"""(?<!\w)'[^']*'|(?<!\w)"[^"]*"|[^\s'"]*/[^\s'"]*"""


def in_flags(text: str, command: Command | None) -> str:
    """A message in which Python's arguments are the flags of a command.

    For `export`, "batch_size=0 must be positive" is "--batch-size 0 must be positive".

    Args:
      text: may hold arguments as `name=value`, `name=True`, `name=...`, or by name alone
        where the name has an underscore, which no other word has.
      command: whose flags they are, if there is one.
    """
    known = {}
    if command is not None:
        advices = dict(_ADVICE)
        if hasattr(command, "validation"):
            advices[_SPLIT] = _OF_VALIDATION
        for python, advice in advices.items():
            text = text.replace(python, advice)
        files = {n: n.upper() for n in ("train", "test") if hasattr(command, n)}
        known = files | flags_of(type(command))
    flags = known | {_ELSEWHERE[n]: known[n] for n in known.keys() & _ELSEWHERE.keys()}
    arguments = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))
    if not flags:
        return text

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
