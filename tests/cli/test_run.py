"""Run folders."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest

from sparsejax.data import read
from sparsejax.runs import folders


def test_load_model_takes_the_best_checkpoint_else_the_newest(board, tmp_path):
    settings, names = folders.load_run(board.run)
    assert names.tolist() == read(board.files[0]).feature_names.tolist()
    with folders.begun(tmp_path / "run", settings, names, resume=False):
        pass
    with pytest.raises(ValueError, match="no checkpoint yet"):
        folders.load_model(tmp_path / "run")
    checkpoints = folders.checkpoints_of(tmp_path / "run", settings)

    def saved(step: int, score: float | None) -> bytes:
        modules = dataclasses.replace(settings, seed=step).build(names)
        checkpoints.save(step, modules, {}, score=score)
        return np.asarray(modules[0].output.kernel[...]).tobytes()

    def loaded() -> bytes:
        model, found = folders.load_model(tmp_path / "run")
        assert found.tolist() == names.tolist()
        return np.asarray(model.output.kernel[...]).tobytes()

    saved(1, None)
    newest = saved(2, None)
    assert loaded() == newest
    best = saved(3, 0.5)
    saved(4, 0.4)
    assert loaded() == best


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("network", "layers", 1, "activation"), "relu"),
        (("network", "layers", 2, "temperature"), 0.2),
        (("network", "layers", 2), {"kind": "output", "name": "output"}),
        (("network", "loss", "name"), "l2_loss"),
        (("optimizer", "learning_rate"), 1),
        (("seed",), 1),
        (("num_features",), 21),
        (("data_fingerprint",), "0"),
    ],
)
def test_edited_settings_are_refused(board, tmp_path, path, value):
    folder = tmp_path / "run"
    shutil.copytree(board.run, folder)
    settings = json.loads((folder / "run.json").read_text())
    place = settings
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    (folder / "run.json").write_text(json.dumps(settings))
    with pytest.raises(
        ValueError, match="of another run, or the settings of this|states 21 features"
    ):
        folders.load_model(folder)


def _places(document, path=()):
    yield path
    children = {}
    if isinstance(document, dict):
        children = document
    if isinstance(document, list):
        children = dict(enumerate(document))
    for name, child in children.items():
        yield from _places(child, (*path, name))


def test_a_run_folder_with_any_field_of_another_value(board, tmp_path):
    """Each is refused with a line, or tells nothing of the model."""
    folder = tmp_path / "run"
    shutil.copytree(board.run, folder)
    text = (folder / "run.json").read_text()
    values = [None, True, -1, 1e308, math.nan, 10**400, "", "x", [], [[]], {}, {"a": 1}]
    for i, path in enumerate(_places(json.loads(text))):
        # All combinations of values would be too many.
        for value in [values[i % 12], values[(i + 5) % 12], "missing"]:
            document = json.loads(text)
            place = document
            for name in path[:-1]:
                place = place[name]
            if value != "missing":
                if not path:
                    document = value
                else:
                    place[path[-1]] = value
            elif path:
                del place[path[-1]]
            (folder / "run.json").write_text(json.dumps(document))
            settings = None
            try:
                settings, _ = folders.load_run(folder)
                folders.checkpoints_of(folder, settings).check()
            except ValueError as error:
                # The type check of the tests is made before the code's own check.
                assert "\n" not in str(error) or "Type-check error" in str(error)
                continue
            # Arguments that a checkpoint does not store, or that are stored in another form.
            unknown = {("num_epochs",), ("data",), ("validation_split",), ()}
            assert path in unknown or settings == folders.load_run(board.run)[0], path
