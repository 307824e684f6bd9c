"""A public name or signature that changes shows in the diff of `public_api.txt`."""

import difflib

import public_api


def test_public_names_and_signatures_are_those_of_the_snapshot():
    before = public_api.SNAPSHOT.read_text().splitlines()
    changes = list(difflib.unified_diff(before, public_api.lines(), n=0, lineterm=""))
    assert not changes, (
        "public names or signatures have changed; if that is meant, run "
        "`PYTHONPATH=. python tests/public_api.py`, and say it in CHANGELOG.md:\n"
        + "\n".join(changes[2:])
    )
