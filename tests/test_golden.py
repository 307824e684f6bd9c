"""Files of release 0.1.0 are read as it read them, and its trainings continue.

`golden/make.py` describes the files.
"""

import json
import pathlib

import numpy as np
import pytest
from golden import make

GOLDEN = pathlib.Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
# XLA compiles for the processor at hand, and tests without most optimizations: bits are equal
# only on one machine. Printed losses have five digits.
CLOSE, ROUNDED = 2e-4, 2e-2


def check(found, expected, *, within=CLOSE, where="it"):
    """All that is expected is found. There may be more: what later releases added."""
    if isinstance(expected, dict):
        expected = dict(expected)
        if "ids" in expected and "scores" in expected:
            check_lists(found, expected, within, where)
            del expected["ids"], expected["scores"]
        assert expected.keys() <= found.keys(), where
        for key, value in expected.items():
            check(found[key], value, within=within, where=f"{where}.{key}")
    elif isinstance(expected, float):
        np.testing.assert_allclose(found, expected, within, within, err_msg=where)
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            check(one, other, within=within, where=f"{where}[{i}]")
    else:
        assert found == expected, where


def check_lists(found, expected, within, where):
    """The same items; neighbours in a list may change places if they score the same."""
    check(found["scores"], expected["scores"], within=within, where=f"{where}.scores")
    ids, others = np.array(found["ids"]), np.array(expected["ids"])
    scores = np.array(expected["scores"])
    gaps = -np.diff(scores, axis=1, append=-np.inf) > 2 * within * (1 + abs(scores))
    before = np.concatenate([np.full_like(gaps[:, :1], True), gaps[:, :-1]], axis=1)
    is_clear = gaps & before
    is_clear[:, -1] = False  # the next one is not known
    assert is_clear.any(), where
    np.testing.assert_array_equal(ids[is_clear], others[is_clear], err_msg=where)


def as_json(value):
    return json.loads(json.dumps(value))


def tolerance(name):
    return ROUNDED if name in ("run_bfloat16", "fit_wide_deep") else CLOSE


@pytest.fixture
def folder(tmp_path):
    """A folder with links to the files."""
    for path in GOLDEN.iterdir():
        if path.suffix in (".parquet", ".json"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def test_files_hold_what_they_held():
    found = as_json(make.read_files(GOLDEN))
    check(found, {name: EXPECTED[name] for name in found})


def test_configurations_are_written_as_they_were():
    for name in make.CONFIGS:
        document = json.loads((GOLDEN / name).read_text())
        assert as_json(make.read_config(GOLDEN / name).to_json()) == document


def test_prepared_folders_hold_what_they_held(tmp_path):
    for name in make.PREPARED:
        make.unpack(GOLDEN, name, tmp_path)
    check(as_json(make.read_prepared(tmp_path)), EXPECTED["prepared"])


def test_predictors_say_what_they_said():
    check(as_json(make.read_predictors(GOLDEN)), EXPECTED["predictors"])


@pytest.mark.parametrize("name", make.COMMANDS)
def test_a_run_is_read_and_goes_on(name, folder):
    make.unpack(GOLDEN, name, folder)
    expected, within = dict(EXPECTED[name]), tolerance(name)
    continued, ended = expected.pop("continued"), expected.pop("ended")
    check(make.read_run(folder, name), expected, within=within)
    found = make.train(folder, name, epochs=make.ENDED, resume=True)
    within = max(within, 1e-3)  # metrics are printed with four digits
    check(found, continued, within=within)
    check(make.read_run(folder, name), ended, within=within)


@pytest.mark.parametrize("name", [*make.CLICK_MODELS, "fit_items"])
def test_a_training_goes_on(name, folder):
    make.unpack(GOLDEN, name, folder)
    found = make.fit(folder, name, epochs=make.ENDED, resume=True)
    check(as_json(found), EXPECTED[name]["continued"], within=tolerance(name))
