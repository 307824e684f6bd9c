"""The page that `sj.write_report` writes."""

import html.parser
import os
import re
import shutil
import struct
import subprocess

import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.data.sets.vocabulary import popularity_ranks, vocabulary_order
from sparsejax.runs import report

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, _BROWSERS)), "")
HISTORY = [
    {"epoch": e, "step": 7 * e, "loss": 9 / e, "examples_per_second": 1234.5 * e}
    | {"recall@20": 0.1 * e, "ndcg@20": 0.3 - (e - 2) ** 2 / 100}
    for e in (1, 2, 3)
]
MEASURED = {
    "recall@20": 0.5,
    "popularity_recall@20": 0.25,
    "coverage@20": 0.125,
    "users": 4321,
}
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></title><b>&amp;",
    "'; é ✓ \x07",
]
VOID = {"meta", "circle", "path", "polyline", "!doctype"}


class Page(html.parser.HTMLParser):
    """A parser of a page's elements. It fails if they are not closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


def model_of(features: int = 7) -> sj.FeedForward:
    config = sj.NetworkConfig.autoencoder((4,))
    return sj.FeedForward(config, inputs=features, outputs=features, rngs=nnx.Rngs(0))


def page(path, *args, **options) -> Page:
    sj.write_report(path / "report.html", *args, **options)
    return Page((path / "report.html").read_text(encoding="utf-8"))


def test_everything_is_on_the_page(tmp_path):
    example = sj.Example(
        row="ann", shown=["tea"], recommended=["milk", "rye"], heldout=["rye", "oat"]
    )
    found = page(
        tmp_path,
        model_of(),
        HISTORY,
        title="My run",
        measured=MEASURED,
        examples=[example],
        similar={"tea": ["coffee", "milk"]},
        settings={"batch_size": 512},
    )
    for text in ("My run", "ann", "coffee · milk", "batch_size512", "4,321 users"):
        assert text in found.text
    # The item that was held out and found is marked in both lists, and no other item is.
    assert found.text.count("rye ✓") == 2 and found.text.count("✓") == 2
    assert "best ndcg@20, epoch 2" in found.text and "0.3" in found.text
    assert "first.kernel256 x 4float321,024" in found.text
    # Two kernels of 256 rows, and their biases.
    assert f"{2 * 256 * 4 + 4 + 256:,}parameters" in found.text
    assert "recall@20 ↑0.50000.2500" in found.text.replace("\n", "")
    widths = [a["style"] for a in found.all("i") if "style" in a]
    assert widths == ["width:100.0%", "width:50.0%", "width:100.0%"]
    labels = [a["aria-label"] for a in found.all("svg")]
    assert labels == [
        f"{name} over epochs" for name in ("loss", "recall@20", "ndcg@20", "examples/s")
    ]


def test_first_comes_how_good_it_is(tmp_path):
    """The sentences are before all tables, and layers at the end."""

    def said(measured, **options):
        text = page(tmp_path, model_of(), HISTORY, measured=measured, **options).text
        places = [text.index(part) for part in ("report of 20", "loss, epoch", "dtype")]
        assert places == sorted(places)
        return text[: places[0]]

    better = {"recall@9": 0.42, "popularity_recall@9": 0.2, "users": 3}
    text = said(better, data=["plays.csv", "9 rows", "2024-01-01 to 2024-02-01"])
    assert "42 % are on average among the 9 that the model recommends" in text
    assert "and 20 % among the 9 most popular ones" in text
    assert "finds 2.1 times as many as popularity" in text
    assert "which items go together" in text
    assert "plays.csv · 9 rows · 2024-01-01 to 2024-02-01 · " in text
    worse = said(better | {"recall@9": 0.0612})
    assert "6.1 %" in worse and "Popularity is better" in worse and "times" not in worse
    clicks = said(CLICKS)
    assert "the higher probability in 71 % of all cases" in clicks
    assert "1.10 clicks for each" in clicks
    assert "held out of" not in said({"ndcg@9": 0.1, "users": 3})


def test_items_have_their_titles(tmp_path):
    example = sj.Example(row="7", shown=["7"], recommended=["8", "9"], heldout=["9"])
    options = {"examples": [example], "similar": {"7": ["8"]}}
    titles = {"7": "Green <tea>", "9": "Rye"}
    found = page(tmp_path, model_of(), [], titles=titles, **options)
    assert "Green <tea>8" in found.text.replace("\n", "") and "Rye ✓" in found.text
    assert "hasGreen <tea>" in found.text and found.text.count("Rye ✓") == 2


def test_rows_give_intervals(tmp_path):
    figures = np.tile([0.0, 1.0], 50)
    rows = sj.metrics.Rows(None, {"recall@2": figures})
    measured = sj.metrics.Measured({"recall@2": 0.5, "coverage@2": 0.1}, rows)
    low, high = measured.intervals()["recall@2"]
    # For a share of 1/2 in 100 rows, the interval is 1.96 times 0.05 to either side.
    np.testing.assert_allclose([low, high], [0.402, 0.598], atol=0.02)
    text = page(tmp_path, model_of(), [], measured=measured).text.replace("\n", "")
    assert f"recall@2 ↑0.5000{low:.3f} to {high:.3f}coverage@2" in text.replace(
        " ↑0.1", ""
    )
    # Resamples of very many rows would take minutes.
    rows = sj.metrics.Rows(None, {"recall@2": np.zeros(2_000_001)})
    measured = sj.metrics.Measured({"recall@2": 0.0}, rows)
    assert "95 %" not in page(tmp_path, model_of(), [], measured=measured).text


def test_curves_go_through_the_values(tmp_path):
    found = page(tmp_path, model_of(), HISTORY)
    loss = found.all("polyline")[0]["points"]
    places = np.array([p.split(",") for p in loss.split()], float)
    assert (np.diff(places[:, 0]) > 0).all() and np.ptp(np.diff(places[:, 0])) < 0.2
    # In SVG, y grows downwards. The losses 9, 4.5 and 3 must be drawn in proportion.
    slope = (places[1, 1] - places[0, 1]) / (places[2, 1] - places[0, 1])
    assert slope == pytest.approx(4.5 / 6, abs=0.01)
    assert "epoch 2: 4.5" in found.text
    svg = found.all("svg")[0]["viewbox"].split()
    assert (places > 0).all() and (places < [int(svg[2]), int(svg[3])]).all()


@pytest.mark.parametrize("low", [-1234.5, -1e-7, 0.0, 0.37, 5e6])
@pytest.mark.parametrize("span", [0.013, 0.99, 1, 17, 3e9])
def test_ticks_are_few_round_and_around(low, span):
    ticks = report.ticks(low, low + span, 4)
    assert 3 <= len(ticks) <= 7
    tolerance = span * 1e-3
    assert ticks[0] <= low + tolerance and ticks[-1] >= low + span - tolerance
    step = np.diff(ticks).mean()
    assert re.fullmatch(r"[1250]\.?0*e[+-]\d+", f"{step:.6e}")


@pytest.mark.parametrize("history", [[], HISTORY[:1], HISTORY * 40])
def test_short_and_long_histories(tmp_path, history):
    found = page(tmp_path, model_of(), history)
    assert len(found.all("svg")) == (4 if history else 0)
    assert len(found.all("circle")) == {0: 0, 1: 8}.get(len(history), 0)


def test_a_value_that_is_not_finite_is_left_out(tmp_path):
    history = [*HISTORY, {**HISTORY[0], "epoch": 4, "recall@20": float("nan")}]
    found = page(tmp_path, model_of(), history)
    assert len(found.all("polyline")[1]["points"].split()) == 3
    assert not any("nan" in a["points"] for a in found.all("polyline"))


def test_names_are_text_wherever_they_stand(tmp_path):
    bad = HOSTILE[0]
    plain = page(tmp_path, model_of(), HISTORY, measured=MEASURED)
    found = page(
        tmp_path,
        model_of(),
        [entry | {f"{bad}@3": 1.0} for entry in HISTORY],
        title=bad,
        measured={**MEASURED, f"{bad}@3": 1.0},
        examples=[
            sj.Example(row=n, shown=HOSTILE, recommended=HOSTILE, heldout=HOSTILE)
            for n in HOSTILE
        ],
        similar=dict.fromkeys(HOSTILE, HOSTILE),
        settings={bad: bad},
    )
    for name in HOSTILE:
        assert found.text.count(name) >= 4
    for tag in ("script", "img", "b"):
        assert len(found.all(tag)) == len(plain.all(tag)), tag
    for _, attributes in found.elements:
        assert not {"src", "href", "onerror"} & set(attributes)
    [policy] = [a["content"] for a in found.all("meta") if "http-equiv" in a]
    assert policy.startswith("default-src 'none'")


def test_long_lists_are_cut(tmp_path):
    example = sj.Example(row="r", shown=[f"i{i}" for i in range(20)], recommended=["x"])
    found = page(tmp_path, model_of(), [], examples=[example])
    assert "i11 and 8 more" in found.text and "held out" not in found.text


def test_examples_are_rows_with_something_to_find(tmp_path):
    dense = np.ones((5, 9), bool)
    dense[1, 2:] = False  # these are too few values to choose by
    dense[:, 6:] = False
    shown = sj.SparseDataset.from_scipy(scipy.sparse.csr_array(dense))
    held = np.zeros((5, 9), bool)
    held[[1, 2, 4], 7] = True
    heldout = sj.SparseDataset.from_scipy(scipy.sparse.csr_array(held))
    examples = report.examples_of(model_of(9), shown, heldout, k=2)
    assert [e.row for e in examples] == ["2", "4"]
    for example in examples:
        assert example.heldout == ["7"] and len(example.shown) == 6
        assert len(example.recommended) == 2
        assert set(example.recommended) <= {"6", "7", "8"}
    assert len(report.examples_of(model_of(9), shown, rows=3)) == 3
    kept = report.examples_of(model_of(9), shown, heldout, k=9, keep_seen=True)
    assert all(set(example.recommended) > {"0", "1"} for example in kept)
    # If all rows are short, the longest one is chosen.
    few = shown.align_rows(["1"])
    assert [e.row for e in report.examples_of(model_of(9), few)] == ["1"]


def test_similar_to_popular_begins_with_the_most_frequent():
    names = np.array(["a", "b", "c"], np.dtypes.StringDType())
    found = report.similar_to_popular(model_of(3), names, np.array([1, 9, 5]), rows=2)
    assert list(found) == ["b", "c"]
    assert sorted(found["b"]) == ["a", "c"]
    assert report.similar_to_popular(model_of(1), names[:1], np.array([3])) == {}


def test_metrics_of_some_epochs(tmp_path):
    measured = [{**entry} for entry in HISTORY]
    del measured[0]["ndcg@20"]
    assert "best ndcg@20" in page(tmp_path, model_of(), measured).text
    measured[1]["ndcg@20"] = float("nan")
    assert "best" not in page(tmp_path, model_of(), measured[:2]).text


def test_figures_of_the_training_are_no_metrics(tmp_path):
    rates = {"found": 0.7, "inserted": 0.2, "refused": 0.1, "evicted": 0.0}
    history = [{"epoch": 1, "loss": 0.5, "overflows": 3, **rates}]
    text = page(tmp_path, model_of(), history).text
    assert "ids refused" in text and "overflows" in text
    assert "metrics are those" not in text
    history[0]["auc"] = 0.7
    assert "metrics are those" in page(tmp_path, model_of(), history).text


CLICKS = {"auc": 0.71, "log_loss": 0.42, "normalized_entropy": 0.9, "calibration": 1.1}


@pytest.mark.parametrize(
    "history",
    [
        [{}],
        [{"loss": 0.5}],
        [{"epoch": 3}, {"loss": 0.5}],
        [{"examples_per_second": 10.0}],
        [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": None, "note": "late"}],
        [{"epoch": 1, "loss": 0.5} | CLICKS],
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "measured",
    [
        None,
        {},
        CLICKS,
        CLICKS | {"group_auc": float("nan"), "groups": 7},
        {"recall@2": 0.5},
        {"recall@2": float("nan"), "popularity_recall@2": 0.5, "users": 3},
        {"recall@2": 0.5, "users": 3, "entries_unknown": 2},
    ],
    ids=str,
)
def test_what_a_history_or_the_metrics_lack_is_left_out(tmp_path, history, measured):
    found = page(tmp_path, model_of(), history, measured=measured)
    drawn = {name for entry in history for name in entry if entry[name] is not None}
    assert len(found.all("svg")) == len(drawn - {"epoch", "note"})
    assert ("loss, epoch" in found.text) == ("loss" in drawn)
    assert ("examples/s (median)" in found.text) == ("examples_per_second" in drawn)
    assert ("best auc, epoch 1" in found.text) == ("auc" in drawn)
    # A name and its number are in neighbouring cells.
    for name in measured or ():
        if name in CLICKS:
            arrow = {"auc": "↑", "calibration": "→ 1"}.get(name, "↓")
            assert f"{name} {arrow}{CLICKS[name]:.4g}" in found.text
    assert ("7groups measured" in found.text) == ("groups" in (measured or ()))
    assert ("3users measured" in found.text) == ("users" in (measured or ()))
    assert ("2 held-out entries" in found.text) == (
        "entries_unknown" in (measured or ())
    )


def test_ranks_of_the_vocabulary_are_those_it_was_made_from():
    counts = np.random.default_rng(0).permutation(1_000)
    names = np.array([f"{i:04}" for i in range(1_000)], np.dtypes.StringDType())
    ordered = counts[vocabulary_order(counts, names)]
    np.testing.assert_array_equal(popularity_ranks(1_000), 999 - ordered)


@pytest.mark.skipif(not BROWSER, reason="needs Chromium")
def test_a_browser_shows_it(tmp_path):
    page(tmp_path, model_of(), HISTORY, measured=MEASURED)
    sizes = []
    for name, scheme in (("light", 1), ("dark", 0)):
        shot = tmp_path / f"{name}.png"
        subprocess.run(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
            ]
            + [f"--blink-settings=preferredColorScheme={scheme}"]
            + [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=600,900"]
            + [f"--screenshot={shot}", (tmp_path / "report.html").as_uri()],
            check=True,
            capture_output=True,
            timeout=600,
        )
        picture = shot.read_bytes()
        assert struct.unpack(">II", picture[16:24]) == (600, 900)
        sizes.append(len(picture))
    assert min(sizes) > 15_000  # an empty page takes 3 kB
    assert os.listdir(tmp_path).count("report.html") == 1
