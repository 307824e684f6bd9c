"""Runs with item content, from events and a table of items to recommendations of new items."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from sparsejax.cli import commands, flags
from sparsejax.cli.main import main
from sparsejax.kinds.kind import kind_called
from sparsejax.options.training import Training

USERS, ITEMS, NEW = 60, 30, 3


def kind_of_item(item: str) -> int:
    return int(item[1:]) % 3


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files in which each user has items of one of three kinds; items 30 to 32 have no event."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    events = ["user,item,time"]
    for i, user in enumerate(np.repeat(np.arange(USERS), 6)):
        item = 3 * rng.integers(0, ITEMS // 3) + user % 3
        events.append(f"u{user},i{item},{i}")
    (folder / "events.csv").write_text("\n".join(events) + "\n")
    items = ["item,kind,title"]
    items += [f"i{i},k{i % 3},Thing {i}" for i in range(ITEMS + NEW)]
    (folder / "items.csv").write_text("\n".join(items) + "\n")
    (folder / "others.csv").write_text("item,kind\ni1,a\ni2,b\n")
    return folder


def recommended(path):
    """The new items among the recommendations, and the users of each."""
    found = []
    for line in path.read_text().splitlines():
        user, items = line.split("\t")
        names = [entry.split(",")[0] for entry in items.split(":")]
        found += [(user, name) for name in names if int(name[1:]) >= ITEMS]
    return found


def test_one_command_from_events_and_attributes(files, tmp_path, capsys):
    events, items = str(files / "events.csv"), str(files / "items.csv")
    run = str(tmp_path / "run")
    train = [
        "train",
        events,
        "--item-features",
        items,
        "--run",
        run,
        "--model",
        "sasrec",
    ]
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"version": 1, "model": "sasrec", "width": 8, "blocks": 1, "dropout": 0.0}
        )
    )
    train += ["--config", str(config), "--epochs", "12", "--learning-rate", ".02"]
    assert main([*train, "--batch-size", "20"]) == 0
    said = capsys.readouterr().err
    assert "0 of 33 items have none, and 3 are in no event" in said
    assert "content of items: kind: category, 3 different\n" in said
    assert (
        "content of items: title: left out, titles: 33 of 33 texts occur once; --words title "
        "makes tags of their words\n" in said
    )
    report = tmp_path / "report.html"
    last = tmp_path / "last.csv"
    last.write_text("user,item,time\nu0,i30,999\nu1,i1,999\n")
    paths = ["--train", events, "--test", str(last), "--out", str(report)]
    assert main(["report", run, *paths, "--keep-seen"]) == 0
    page = report.read_text()
    assert "New and rare items" in page and '<td class="metric">20+</td>' in page
    assert "recall@20[" not in page
    out = tmp_path / "out.tsv"
    assert main(["predict", run, events, "--out", str(out), "--k", "5"]) == 0
    found = recommended(out)
    right = [kind_of_item(item) == int(user[1:]) % 3 for user, item in found]
    assert found and np.mean(right) > 0.8

    # A service of the run recommends them, as an exported file does.
    file = str(tmp_path / "predictor")
    assert main(["export", run, file, "--k", "33"]) == 0
    wanted = sj.load_predictor(file).recommend_names(["i3", "i0"])
    with commands.exported(flags.Serve(model=run)) as served:
        answers = sj.load_predictor(served.model).recommend_names(["i3", "i0"])
    assert answers == wanted and len(wanted) == ITEMS + NEW - 2
    assert next(n for n in answers if int(n[1:]) >= ITEMS) == "i30"

    # A resume has the same content, and loads it.
    assert main([*train, "--batch-size", "20", "--resume"]) == 0
    # So does a run that goes on, of which the items without events are no new ones.
    more = ["train", events, "--item-features", items, "--epochs", "1", "--from", run]
    more += ["--run", str(tmp_path / "more"), "--words", "title", "--columns", "title"]
    assert main(more) == 1
    assert "no tag ('title:0'" in capsys.readouterr().err
    more[-1] = "kind"
    assert main(more) == 1
    assert "words has 'title', but only 'kind' is read" in capsys.readouterr().err
    assert main([*more[:-4], "--columns", "kind"]) == 0
    said = capsys.readouterr().err
    assert "0 of 33 items have none, and 3 are in no event" in said
    assert "title" not in said
    new = ["train", events, "--run", str(tmp_path / "new"), "--words", "title"]
    assert main(new) == 1
    said = capsys.readouterr().err
    assert "--words says how --item-features is read; name the file" in said
    train[train.index(items)] = str(files / "others.csv")
    assert main([*train, "--batch-size", "20", "--resume"]) == 1
    assert "the model was made for 3 and 0" in capsys.readouterr().err


def test_runs_in_python(files, tmp_path):
    options: dict[str, Any] = {"batch_size": 20, "learning_rate": 0.02, "decay": "none"}
    config = sj.NetworkConfig.autoencoder((8,), tied=True)
    run = sj.Run.train(
        files / "events.csv",
        config=config,
        num_epochs=2,
        item_features=sj.read_item_features(files / "items.csv"),
        **options,
    )
    assert run.known.tolist()[ITEMS:] == [f"i{i}" for i in range(ITEMS, ITEMS + NEW)]
    run.save(tmp_path / "run")
    again = sj.Run.load(tmp_path / "run")
    np.testing.assert_array_equal(
        sj.item_vectors(again.model), sj.item_vectors(run.model)
    )
    assert set(run.similar(["i30"], k=3).names()[0]) <= set(run.known)

    # Later there are further items, and further tags that the model does not know.
    later = tmp_path / "later.csv"
    lines = (files / "items.csv").read_text() + "i40,k1,New\ni41,k9,Other\n"
    later.write_text(lines)
    with pytest.raises(ValueError, match="was trained with content of its items"):
        run.train_more(files / "events.csv", **options)
    run.train_more(
        files / "events.csv",
        tmp_path / "more",
        item_features=later,
        num_epochs=1,
        **options,
    )
    assert run.known.tolist()[-2:] == ["i40", "i41"]
    vectors = sj.item_vectors(run.model)
    assert vectors[-2].any() and not vectors[-1].any()
    sj.Run.load(tmp_path / "more").evaluate(
        files / "events.csv",
        inputs=files / "events.csv",
        exclude_seen=False,
        by="entries",
    )


def test_a_model_that_is_saved_goes_on(files, tmp_path):
    """A model of a loop of one's own is a run that goes on, with its content."""
    features = sj.read_item_features(files / "items.csv")
    data = sj.read(files / "events.csv", indicator=True)
    config = sj.NetworkConfig.autoencoder((8,))
    model, optimizer = sj.build(config, data, item_features=features)
    arguments = tmp_path / "run", model, optimizer, data
    with pytest.raises(ValueError, match="has content of its items: item_features"):
        sj.save_model(*arguments)
    wide = sj.read_item_features([{"item": "i1", "kind": "k"}])
    with pytest.raises(ValueError, match="has 1 tags .* was made for 3 and 0"):
        sj.save_model(*arguments, item_features=wide)
    sj.save_model(*arguments, item_features=features)
    run = sj.Run.load(tmp_path / "run")
    run.train_more(
        files / "events.csv", item_features=features, num_epochs=1, batch_size=20
    )
    assert run.known.tolist()[-1] == f"i{ITEMS + NEW - 1}"


def test_content_for_a_model_without(files, tmp_path):
    features = sj.read_item_features(files / "items.csv")
    data = sj.read(files / "events.csv", indicator=True)
    config = sj.NetworkConfig.autoencoder((8,))
    without = sj.build(config, data)
    with pytest.raises(ValueError, match="has no content of its items: .*leave it out"):
        sj.save_model(tmp_path / "no", *without, data, item_features=features)
    sj.save_model(tmp_path / "no", *without, data)
    with pytest.raises(ValueError, match="cannot resume with item_features"):
        sj.Run.train(
            files / "events.csv",
            tmp_path / "no",
            config=config,
            item_features=features,
            resume=True,
        )


def test_what_cannot_be(files, tmp_path, capsys):
    plain = sj.Run.train(files / "events.csv", num_epochs=1)
    items = files / "items.csv"
    with pytest.raises(ValueError, match="was trained without content of its items"):
        plain.train_more(files / "events.csv", item_features=items)
    argv = ["train", str(files / "events.csv"), "--run", str(tmp_path / "run")]
    (tmp_path / "wrong.csv").write_text("item,kind\nx,y\n")
    assert main([*argv, "--item-features", str(tmp_path / "wrong.csv")]) == 1
    said = capsys.readouterr().err
    assert "none of" in said and not (tmp_path / "run").exists()
    assert main([*argv, "--item-features", str(items), "--chunk-rows", "10"]) == 1
    assert "--item-features needs all of the data" in capsys.readouterr().err


def test_content_that_makes_a_model_worse_is_named(files):
    """The trained model ranks the validation data with its content, and without it."""
    data = sj.read(str(files / "events.csv"))
    split = data.split(0.8, seed=0)
    features = sj.read_item_features(str(files / "items.csv"))
    config = sj.NetworkConfig.autoencoder((8,))
    model, optimizer = sj.build(
        config, split.train, sj.optimizers.adagrad(0.1), item_features=features
    )
    sj.fit(model, optimizer, split.train, batch_size=60, num_epochs=60)
    runs = kind_called("items")
    source = runs.source(Training(data=data, config=config, validation=0.2), None)
    assert runs.doubts(model, source, 5) is None
    output: Any = model.output
    kernel = output.content.tag_kernel
    noise = np.random.default_rng(0).normal(0, 30, kernel.shape)
    kernel.set_value(jnp.asarray(noise, kernel.dtype))
    text = runs.doubts(model, source, 5) or ""
    assert text.startswith(
        "the content of items makes the model worse on the validation data: ndcg@5 is 0."
    )
    assert text.endswith("leave item_features out, or read fewer columns")
    nothing = dataclasses.replace(source, heldout=None)
    assert runs.doubts(model, nothing, 5) is None
