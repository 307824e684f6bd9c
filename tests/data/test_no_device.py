"""Data is read, split, saved, scanned and prepared without initializing a device."""

import os
import subprocess
import sys

SCRIPT = """
import jax
from jax._src import xla_bridge


def refuse(*_, **__):
    raise AssertionError("a device was asked for")


jax.devices = jax.local_devices = refuse
xla_bridge.get_backend = xla_bridge.backends = refuse
try:
    jax.numpy.zeros(2)  # so this test can fail
except AssertionError:
    pass
else:
    raise SystemExit("arrays are made without a device")

from sparsejax import data
from sparsejax.data.reading.sources import Inputs

lines = [f"u{n % 7},i{n % 5},{n % 3 + 1},{n}" for n in range(60)]
open("events.csv", "w").write("user,item,rating,time\\n" + "\\n".join(lines) + "\\n")
items = data.read("events.csv")
train, heldout = items.split_last()
print(items.split(0.5, seed=0), items.split_rows(0.5, seed=0))
print(items.without_values().split_at(3))
train.merge(heldout).align_features(["i3", "i1"]).align_rows(["u1"])
items.save("items")
assert data.scan_parquet("items").read(0, 7).nse == data.read("items").num_entries
Inputs.of({"a": items, "b": data.DenseDataset([[0.5]] * 7, items.row_names)})
histories = data.read_sequences("events.csv")
print(histories.split_last(), histories.padded_times(3).sum())
histories.save("histories")
assert data.scan_sequences("histories").read(0, 7).padded(2).shape == (7, 2)
columns = {"user": data.VocabularyColumn(), "item": data.HashedColumn(9)}
open("clicks.csv", "w").write("click,user,item\\n1,ann,tea\\n0,bob,rye\\n0,eve,tea\\n")
clicks = data.read_clicks("clicks.csv", data.ClickSchema("click", ids=columns))
print(clicks.split_rows(0.5, seed=0))
clicks.save("clicks")
assert data.scan_clicks("clicks").read(1, 3).num_rows == 2
data.prepare("events.csv", "prepared", split_last=1)
assert data.read("prepared/test").num_rows == 7
"""


def test_data_needs_no_device(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
