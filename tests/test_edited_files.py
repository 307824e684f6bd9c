"""Files and plans that somebody has edited: each wrong value is refused by its key.

Every value of a valid document is replaced by values of other types, by numbers out of range
and by deep nesting; each key is left out, and others are added.
"""

import copy
import json
import math
import zipfile

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import sparsejax as sj
from sparsejax import codec, optimizers
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.kinds.kind import config_of
from sparsejax.predictors import files as predictor_files
from sparsejax.predictors import signature
from sparsejax.runs import folders
from sparsejax.spark.run_copies import fetch_run

HUGE = 10**400
DEEP = "deep"
OTHERS = [
    None,
    True,
    -1,
    0.5,
    "a",
    [],
    {},
    [1],
    [[]],
    {"a": 1},
    10**30,
    -HUGE,
    math.nan,
]
OTHERS += [math.inf, "../../a", DEEP]
TYPES = {int: "number", float: "number", bool: "flag", str: "text", list: "list"}


def kind_of(value):
    return TYPES.get(type(value), str(type(value)))


def paths(value, path=()):
    """The paths of all values in JSON, of lists those of the first one."""
    if path:
        yield path
    entries = value if isinstance(value, dict) else {}
    if isinstance(value, list) and value:
        entries = {0: value[0]}
    for key, entry in entries.items():
        yield from paths(entry, (*path, key))


def at(document, path):
    for key in path:
        document = document[key]
    return document


def edits(document):
    """Edited copies: the path, the new value, and the text of the document."""
    for path in paths(document):
        *above, key = path
        for other in OTHERS:
            edited = copy.deepcopy(document)
            at(edited, above)[key] = other
            if other == DEEP:
                at(edited, above)[key] = "@"
                text = json.dumps(edited).replace('"@"', "[" * 100_000 + "]" * 100_000)
            else:
                text = json.dumps(edited)
            yield path, other, text
        if isinstance(key, str):
            edited = copy.deepcopy(document)
            del at(edited, above)[key]
            yield path, "nothing", json.dumps(edited)


class Kind:
    """A kind of file: how it is written and read, and which keys hold anything."""

    def __init__(self, document, write, *reads, free=(), named=None):
        self.document, self.write, self.reads = document, write, reads
        self.free, self.named = free, named


def network(folder):
    config = sj.NetworkConfig.autoencoder(
        (4,), loss="scaled_marginal_cross_entropy", linear=sj.nn.LinearConfig(rank=3)
    )
    path = folder / "network.json"
    return Kind(
        config.to_json(),
        path.write_text,
        lambda: sj.NetworkConfig.load(path),
        lambda: codec.load(path, config_of),
        free=("loss",),
        named="network.json",
    )


def histories(folder):
    path = folder / "sasrec.json"
    config = sj.SASRecConfig(width=64, dropout=0.2, temperature=0.2, negatives=5)
    return Kind(
        config.to_json(),
        path.write_text,
        lambda: codec.load(path, config_of),
        named="sasrec.json",
    )


def click_model(folder):
    config = sj.DLRMConfig(dim=4, bottom=(3,), top=(2,), dtype="bfloat16")
    path = folder / "dlrm.json"
    return Kind(
        config.to_json(),
        path.write_text,
        lambda: codec.load(path, sj.clicks.ClickModelConfig.from_json),
    )


def run_folder(folder):
    (folder / "run").mkdir()
    names = np.array(["a", "b", "c"], np.dtypes.StringDType())
    data = sj.data.from_arrow(
        pd.DataFrame({"user": ["x"] * 3, "item": names.tolist()}), features=names
    )
    data.save(folder / "run" / "vocabulary.parquet")
    rate = optimizers.schedule("cosine_decay_schedule", init_value=0.1, decay_steps=9)
    settings = folders.Settings(
        network=sj.NetworkConfig.autoencoder((4,)),
        optimizer=optimizers.adam(rate),
        num_features=3,
        num_epochs=2,
        batch_size=4,
        seed=0,
        deterministic=False,
        indicator=True,
        data="a.csv",
        data_fingerprint="x",
        vocabulary_fingerprint=fingerprint(names),
        validation="x",
        validation_split="last",
        k=5,
        patience=3,
    )
    path = folder / "run" / "run.json"
    return Kind(
        settings.to_json(),
        path.write_text,
        lambda: folders.load_run(folder / "run"),
        free=("loss", "learning_rate"),
        named="run",
    )


def prepared(folder):
    pytest.importorskip("duckdb")
    table = {"user": list("aabbcc"), "item": list("xyxzyz"), "value": [1.0, 2.0] * 3}
    sj.prepare(pd.DataFrame(table), folder / "shop", split_fraction=0.5)
    path = folder / "shop" / "manifest.json"

    def scan():
        scanned = sj.data.scan_parquet(folder / "shop")
        return scanned.feature_names, scanned.read(0, scanned.num_rows)

    return Kind(
        json.loads(path.read_text()),
        path.write_text,
        lambda: sj.read(folder / "shop"),
        scan,
        free=("settings",),
        named="shop",
    )


def saved_clicks(folder):
    path, edited = folder / "clicks.parquet", folder / "edited.parquet"
    (folder / "c.csv").write_text(
        "click,price,user,item\n"
        + "".join(f"{i % 2},{i},u{i % 5},i{i % 3}\n" for i in range(20))
    )
    schema = sj.ClickSchema(
        "click",
        dense={"price": sj.data.DenseColumn(missing=0.0)},
        ids={"user": sj.data.HashedColumn(9), "item": sj.data.VocabularyColumn()},
    )
    sj.read_clicks(folder / "c.csv", schema).save(path)
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    [key] = [key for key in metadata if b"sparsejax" in key]

    def write(text):
        changed = table.replace_schema_metadata(metadata | {key: text.encode()})
        pq.write_table(changed, edited)

    def scan():
        scanned = sj.data.scan_clicks(edited)
        return scanned.read(0, scanned.num_rows)

    return Kind(
        json.loads(metadata[key]),
        write,
        lambda: sj.ClickDataset.load(edited),
        scan,
        named="edited.parquet",
    )


def plan(folder):
    tables = {
        "a": sj.embeddings.TableConfig(100, 8),
        "b": sj.embeddings.TableConfig(10**6, 8),
    }
    made = sj.plan_embeddings(
        tables,
        {"x": "a", "y": "b"},
        batch_size=64,
        model=2,
        memory=10**9,
        rule=optimizers.sgd(0.1),
    )
    path = folder / "plan.json"

    def read():
        found = codec.load(path, sj.embeddings.EmbeddingPlan.from_json)
        return str(found), found.placements(tables)

    return Kind(json.loads(json.dumps(made.to_json())), path.write_text, read)


def click_signature(folder):
    feature = signature.ClickFeature(
        name="user", num_ids=9, first=0, bag=0, length=0, drop=False
    )
    stacks = (signature.ClickStack(bags=1, features=(feature,)),)
    made = signature.Signature(
        kind="clicks",
        stacks=stacks,
        schema=sj.ClickSchema("y", ids={"user": sj.data.HashedColumn(9)}),
        weights=(signature.Array(dtype="float32", shape=(9, 2)),),
        rows=(1,),
        platforms=signature.PLATFORMS,
        calling_convention=9,
        jax="unknown",
        **signature.of_clicks(0, stacks),
    )
    document = json.loads(json.dumps(made.to_json()))
    return predictor(
        folder / "clicks.predictor", document, "predictor.json", "names.json"
    )


def predictor(path, document, settings, names):
    """A predictor without programs."""

    def write(text):
        with zipfile.ZipFile(path, "w") as parts:
            parts.writestr(settings, text)
            parts.writestr(names, "{}")

    def read():
        with zipfile.ZipFile(path) as parts:
            return predictor_files.model_of(*predictor_files.read_signature(parts, 99))

    return Kind(document, write, read, free=("jax",))


KINDS = [
    network,
    histories,
    click_model,
    run_folder,
    prepared,
    saved_clicks,
    plan,
    click_signature,
]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.usefixtures("wrong_types")
def test_each_edited_value_is_refused_by_its_key(make, tmp_path):
    kind = make(tmp_path)
    kind.write(json.dumps(kind.document))
    for read in kind.reads:
        read()  # as it was
    refused = 0
    for path, other, text in edits(kind.document):
        kind.write(text)
        what, before = f"{path} became {str(other)[:40]}", at(kind.document, path)
        for read in kind.reads:
            try:
                read()
            except ValueError as error:
                refused += 1
                assert kind.named is None or kind.named in str(error), what
                assert len(str(error)) < 1000, what
            except NotImplementedError as error:
                assert kind.named is None or kind.named in str(error), what
            except Exception as error:
                raise AssertionError(f"{what}: {type(error).__name__}") from error
            else:  # the same, or another value that is as good
                is_free = {*path} & {*kind.free} or other in (None, "nothing")
                is_same = kind_of(other) == kind_of(before)
                assert is_free or is_same or before is None, what
                assert {*path} & {"settings"} or other not in (DEEP, -HUGE), what
    assert refused > 80


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ("NaN", "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("1e999", "1e999 is too large"),
        ("9" * 5000, "not JSON"),
        (b"\xff\xfe\xff", "not JSON"),
        ("{} {}", "not JSON"),
    ],
)
def test_text_that_is_no_json(tmp_path, text, problem):
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"a.json: .*{problem}"):
        codec.load(path, dict)
    with pytest.raises(ValueError, match=f"a.json: .*{problem}"):
        sj.NetworkConfig.load(path)


@pytest.mark.parametrize(
    "name",
    ["/tmp/a", "../../a", "train/../../a", "manifest.json", "train/", "train/.a"],
)
def test_a_file_of_a_folder_stays_in_it(tmp_path, name):
    kind = prepared(tmp_path)
    document = copy.deepcopy(kind.document)
    document["train"][0]["path"] = name
    kind.write(json.dumps(document))
    for read in kind.reads:
        with pytest.raises(ValueError, match=r'manifest.json: is damaged: .*"path"'):
            read()


def test_the_checksums_of_a_folder_are_compared(tmp_path):
    kind = prepared(tmp_path)
    document = copy.deepcopy(kind.document)
    document["train"][0]["crc32"] ^= 1
    kind.write(json.dumps(document))
    with pytest.raises(ValueError, match="is damaged.* another checksum"):
        kind.reads[0]()
    document = copy.deepcopy(kind.document)
    document["num_items"] += 1
    kind.write(json.dumps(document))
    for read in kind.reads:
        with pytest.raises(ValueError, match="has 3 items, but manifest.json states 4"):
            read()


@pytest.mark.parametrize("name", ["../../../stolen", "/stolen", "a/../../b", ""])
def test_a_copy_of_a_run_stays_in_its_folder(tmp_path, name):
    store = tmp_path / "store"
    (store / "checkpoints" / "1").mkdir(parents=True)
    (store / "checkpoints" / "1.json").write_text(json.dumps({name: [1, 2]}))
    with pytest.raises(ValueError, match=r"1.json: is damaged: .*no file of the"):
        fetch_run(f"file://{store}", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
