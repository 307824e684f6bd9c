"""A report: an HTML page about a model, which loads nothing from a network."""

from __future__ import annotations

import dataclasses
import datetime
import html
import math
import numbers
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from sparsejax.codec import Config
from sparsejax.data import SequenceDataset, SparseDataset
from sparsejax.data.files.names import Names, find_names
from sparsejax.engine.rank.recommender import Recommender
from sparsejax.kinds.histories.next_items import HistoryModel
from sparsejax.kinds.kind import kind_of
from sparsejax.mesh import processes
from sparsejax.metrics import Measured
from sparsejax.metrics.ranking import METRICS
from sparsejax.options.measuring import WriteReport
from sparsejax.options.option import verb
from sparsejax.verbs.recommend import recommend
from sparsejax.verbs.vectors import HasItems, similar_items
from sparsejax.whole_files import check_writable, whole_text_file

_STYLE = pathlib.Path(__file__).with_name("report.css")

# Width and height of a chart in SVG units.
_WIDTH, _HEIGHT = 340, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 24
_MOST_POINTS = 60  # with more points, a chart shows only a line
_MOST_NAMES = 12  # largest number of names shown of a list


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """The recommendations for one row, for `write_report`.

    >>> example = Example(row="ann", shown=["tea"], recommended=["milk", "rye"])
    >>> write_report("report.html", model, history, examples=[example])

    Attributes:
      row: name of the row.
      shown: names of the items that the model read, in any order.
      recommended: names of the recommended items, the best first.
      heldout: names of the held-out items.
    """

    row: str
    shown: Sequence[str]
    recommended: Sequence[str]
    heldout: Sequence[str] = ()


@verb(WriteReport)
def write_report(asked: WriteReport) -> None:
    """Writes an HTML page about a model.

    It begins with a sentence on the quality of the model, the data, and the kind of model. Metrics
    and recommendations follow, then the course of training, layers and settings. The page loads
    nothing and contains no scripts. The file is renamed into place when it is complete.

    >>> history = fit(model, optimizer, train, num_epochs=1, validation=heldout)
    >>> measured = evaluate(model, train, heldout)
    >>> write_report("report.html", model, history, measured=measured)

    Raises:
      OSError: the file cannot be written.
      ValueError: `path` is a folder, or its folder does not exist.
    """
    model, measured, title = asked.model, asked.measured or {}, _text(asked.title)
    epochs = [{"epoch": n} | {**entry} for n, entry in enumerate(asked.history, 1)]
    of_items = any("@" in name for name in measured)
    labels = {
        n: x
        for n, x in measured.items()
        if "/" in n and n.partition("/")[0].isidentifier()
    }
    titles = asked.titles or {}
    titled = lambda name: titles.get(name, name)
    examples = (_example(each, titled) for each in asked.examples)
    parts = [
        f"<h1>{title}</h1>",
        _summary(model, measured, asked.data),
        _section("Held-out items found", _metrics(measured)) if of_items else "",
        _section("New and rare items", _by_entries(measured)),
        _section("Kinds of events", _by_kinds(measured)),
        _section("Labels of the next event", _values(labels)) if of_items else "",
        _section("Measured", _values(measured)) if not of_items else "",
        *_calibrations(asked.calibration),
        _section("Recommendations", _cards(examples)),
        _section("Most similar items", _similar(asked.similar or {}, titled)),
        _section("How it was trained", _tiles(model, epochs, measured)),
        _charts(epochs),
        _section("Parameters", _layers(model)),
        _section("Settings", _settings(asked.settings or {})),
    ]

    def write() -> None:
        check_writable(asked.path)
        with whole_text_file(asked.path) as file:
            file.write(
                '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
                '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
                '<meta http-equiv="Content-Security-Policy" '
                "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
                f"<title>{title}</title>\n"
                f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n"
            )
            file.write("\n".join(part for part in parts if part))
            file.write("\n</html>\n")

    processes.in_first(write)


def examples_of(
    model: Recommender | HistoryModel,
    shown: SparseDataset | SequenceDataset,
    heldout: SparseDataset | SequenceDataset | None = None,
    *,
    keep_seen: bool = False,
    rows: int = 6,
    k: int = 8,
) -> list[Example]:
    """Makes examples from the first rows that have enough items to show, and a held-out item.

    If the model reads the context of the next event, it is taken from the held-out histories;
    without them there are no examples.

    Args:
      model: a `FeedForward`, or a module with `num_features`, `num_items` and `top_k`; for
        histories a `SASRec`, or another `HistoryModel`.
      shown: entries or histories that the model reads.
      heldout: held-out entries with the same features, for all or some of these rows.
      keep_seen: whether a row's items in `shown` may be recommended to it.
      rows: largest number of examples.
      k: number of items recommended to each row.
    """
    if hasattr(heldout, "only_targets"):
        heldout = heldout.only_targets()
    known = np.diff(_indptr(shown))
    chosen = shown.row_names[known >= min(3, known.max(initial=0))]
    if heldout is not None:
        has_some = heldout.row_names[np.diff(_indptr(heldout)) > 0]
        chosen = chosen[find_names(chosen, has_some) >= 0]
    shown = shown.align_rows(chosen[:rows])
    exclude = None if keep_seen else shown
    events = getattr(shown, "events", None)
    if events is not None and events.schema.context:
        in_context = getattr(shown, "with_context_of", None)
        if heldout is None or in_context is None:
            return []
        shown = in_context(heldout)
    found = recommend(model, shown, k, exclude=exclude).names(shown.feature_names)
    wanted = None if heldout is None else heldout.align_rows(shown.row_names)
    return [
        Example(
            row=name,
            shown=features_of(shown, i),
            recommended=found[i],
            heldout=() if wanted is None else features_of(wanted, i),
        )
        for i, name in enumerate(shown.row_names.tolist())
    ]


def similar_to_popular(
    model: HasItems, names: Names, counts: np.ndarray, *, rows: int = 10, k: int = 5
) -> dict[str, list[str]]:
    """The most similar items, by name, of the items with the highest counts.

    Args:
      model: a `FeedForward`, or a module with a `SparseOutput` called `output`.
      names: `[items]` names.
      counts: `[items]` number of occurrences of each item.
      rows: number of items to list.
      k: number of similar items for each of them.
    """
    if len(names) < 2:
        return {}
    popular = np.argsort(-counts, kind="stable")[:rows]
    found = similar_items(model, popular, min(k, len(names) - 1)).names(names)
    return dict(zip(names[popular].tolist(), found, strict=True))


def means_over(measured: Mapping[str, float]) -> str:
    """A sentence on how many users the metrics are means of, and how many items are unknown."""
    text = f"means over {measured['users']:,} users" if "users" in measured else "means"
    if new := measured.get("users_new"):
        text += f"; {new:,} users are new: the model is shown nothing of them"
    if entries := measured.get("entries_unknown"):
        are = (
            "entry is of an unknown item"
            if entries == 1
            else "entries are of unknown items"
        )
        text += f"; {entries:,} held-out {are}"
        if "users_unknown" in measured:
            users = measured["users_unknown"]
            have = "user has" if users == 1 else "users have"
            text += f", and {users:,} {have} no others"
    return text


def features_of(data: SparseDataset | SequenceDataset, row: int) -> list[str]:
    """The names of the features in a row."""
    start, end = _indptr(data)[row : row + 2]
    return data.feature_names[_rows(data).indices[start:end]].tolist()


def _indptr(data: SparseDataset | SequenceDataset) -> np.ndarray:
    return np.asarray(_rows(data).indptr)


def _rows(data: Any) -> Any:
    """The matrix of a data set; histories have none, and are returned unchanged."""
    return getattr(data, "matrix", data)


def _text(value: object) -> str:
    """Converts a value to escaped HTML text, which is also valid in an attribute."""
    return html.escape(str(value))


def _number(value: float) -> str:
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _tick(value: float) -> str:
    """Short text for a number on an axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _section(title: str, content: str) -> str:
    return f"<h2>{_text(title)}</h2>\n{content}" if content else ""


def _cards(sections: Iterable[str]) -> str:
    content = "\n".join(f"<section>{section}</section>" for section in sections)
    return f'<div class="cards">\n{content}\n</div>' if content else ""


def _summary(
    model: nnx.Module, measured: Mapping[str, float], data: Sequence[str]
) -> str:
    """HTML about the model's quality, its kind and its data."""
    parts = []
    if verdict := _verdict(measured):
        parts.append(f'<p class="verdict">{_text(verdict)}</p>')
    config = getattr(model, "config", None)
    if isinstance(config, Config):
        parts.append(f"<p>{_text(kind_of(config).about)}</p>")
    facts = [*data, f"report of {datetime.date.today():%Y-%m-%d}"]
    parts.append(f'<p class="soft">{_text(" · ".join(facts))}</p>')
    return "\n".join(parts)


def _verdict(measured: Mapping[str, float]) -> str:
    """A sentence with the most important metrics."""
    for name, found in measured.items():
        popular = measured.get(f"popularity_{name}")
        if not name.startswith("recall@") or popular is None:
            continue
        k = name.removeprefix("recall@")
        text = (
            f"Of the items that were held out of a user, {_percent(found)} are on average "
            f"among the {k} that the model recommends, and {_percent(popular)} among the "
            f"{k} most popular ones."
        )
        if popular > 0 and found >= popular:
            text += (
                f" The model finds {found / popular:.1f} times as many as popularity."
            )
        elif popular > found:
            text += " Popularity is better: this model should not be used."
        return text
    sentences = []
    for metric in measured:
        name, _, label = metric.partition("/")
        if name != "auc":
            continue
        label = label or "click"
        text = (
            f"Of an example with a {label} and one without, the model gives the {label} the "
            f"higher probability in {_percent(measured[metric])} of all cases; by chance it is "
            "50 %."
        )
        right = measured.get(metric.replace("auc", "calibration", 1))
        if right is not None:
            text += f" It predicts {right:.2f} {label}s for each that there was."
        sentences.append(text)
    return " ".join(sentences)


def _percent(share: float) -> str:
    digits = 1 if share < 0.1 else 0
    return f"{share:.{digits}%}".replace("%", " %")


# Names of metrics that are best if high, if low, or if equal to 1.
_MORE = (*METRICS, "coverage", "auc", "group_auc")
_LESS = "gini", "log_loss", "normalized_entropy", "squared_error", "quantile_loss"
_ONE = ("calibration",)


def _direction(name: str) -> str:
    """HTML of an arrow that shows the better direction of a metric; "" if there is none."""
    name = name.partition("@")[0].partition("/")[0]
    if name in _ONE:
        return ' <span class="soft" title="1 is right">→ 1</span>'
    if name in _LESS:
        return ' <span class="soft" title="less is better">↓</span>'
    if name in _MORE:
        return ' <span class="soft" title="more is better">↑</span>'
    return ""


# Most rows that are drawn for all resamples of a page; for clicks this takes about 15 s.
_DRAWN = 10**8


def _intervals(measured: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Confidence intervals of metrics, by name.

    More rows permit fewer resamples in the same time; with very many rows there are no intervals.
    """
    if not isinstance(measured, Measured):
        return {}
    resamples = min(1000, _DRAWN // max(len(measured.rows), 1))
    # Fewer resamples give unreliable intervals. With so many rows the intervals would be tiny.
    return measured.intervals(resamples=resamples) if resamples >= 50 else {}


def _interval(ends: tuple[float, float] | None) -> tuple[str, str]:
    """A table cell with an interval, as a pair of a CSS class and HTML."""
    text = "" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"
    return "number soft interval", text


_INTERVAL_HEAD = "number interval", "95 % interval"


def _table(
    text: str,
    heads: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[tuple[str, str]]],
) -> str:
    """HTML of a table with a caption. Heads and cells are pairs of a CSS class and HTML."""

    def line(tag: str, cells: Sequence[tuple[str, str]]) -> str:
        each = (f'<{tag} class="{kind}">{cell}</{tag}>' for kind, cell in cells)
        return f"<tr>{''.join(each)}</tr>"

    above = f'<p class="soft">{text}</p>\n' if text else ""
    lines = "\n".join([line("th", heads), *(line("td", row) for row in rows)])
    return f'{above}<div class="scroll"><table>{lines}</table></div>' if rows else ""


def _bars(*shares: float) -> tuple[str, str]:
    """A table cell with bars for one or two numbers, as a pair of a CSS class and HTML."""
    pairs = zip(("model", "other"), shares, strict=False)
    bars = (f'<i class="{each}" style="width:{x:.1%}"></i>' for each, x in pairs)
    return "bars", "".join(bars)


def _key(first: str, second: str) -> tuple[str, str]:
    """A table head that explains the two bars of `_bars`, as a pair of a CSS class and HTML."""
    pairs = ("model", first), ("other", second)
    keys = (f'<span class="key"><i class="{c}"></i>{text}</span>' for c, text in pairs)
    return "bars", " ".join(keys)


def _tiles(model, history, measured) -> str:
    tiles = []
    if history:
        metrics = _metrics_of(history)
        ndcg = [name for name in metrics if name.startswith("ndcg@")]
        ranked = [name for name in metrics if "@" in name]
        auc = [name for name in metrics if name.startswith("auc")]
        for name in [*ndcg, *ranked, *auc][:1]:
            # In a history that joins several trainings, some epochs may lack this metric.
            if points := _points(history, name):
                best = max(points, key=lambda point: point[1])
                tiles.append((_number(best[1]), f"best {name}, epoch {best[0]}"))
        if losses := _points(history, "loss"):
            epoch, loss = losses[-1]
            tiles.append((_number(loss), f"loss, epoch {epoch}"))
        if speeds := [speed for _, speed in _points(history, "examples_per_second")]:
            tiles.append((_number(float(np.median(speeds))), "examples/s (median)"))
    for name in ("users", "groups"):
        if name in measured:
            tiles.append((_number(measured[name]), f"{name} measured"))
    parameters = sum(leaf.size for _, leaf in _parameters(model))
    tiles.append((_number(parameters), "parameters"))
    content = "".join(
        f'<div><b>{value}</b><span class="soft">{_text(label)}</span></div>'
        for value, label in tiles
    )
    return f'<div class="tiles">{content}</div>'


def _points(
    history: Sequence[Mapping[str, float]], name: str
) -> list[tuple[float, float]]:
    """Pairs (epoch, value) of a metric, for the epochs in which its value is finite."""
    found = [(entry["epoch"], entry.get(name)) for entry in history]
    return [(x, y) for x, y in found if _is_finite(y)]  # pyrefly: ignore[bad-return]


# Metrics of `fit` about the training itself, besides the loss, and their titles in charts.
_OF_TRAINING = {
    "examples_per_second": "examples/s",
    "overflows": "overflows",
    "found": "ids found",
    "inserted": "ids inserted",
    "refused": "ids refused",
    "evicted": "ids evicted",
}


def _metrics_of(history: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of the validation metrics in a history."""
    names = dict.fromkeys(name for entry in history for name in entry)
    others = {"epoch", "step", "loss", *_OF_TRAINING}
    return [name for name in names if name not in others]


def _is_finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _charts(history: Sequence[Mapping[str, float]]) -> str:
    if not history:
        return ""
    metrics = _metrics_of(history)
    figures = []
    for name in ["loss", *metrics, *_OF_TRAINING]:
        if not (points := _points(history, name)):
            continue
        label = _OF_TRAINING.get(name, name)
        figures.append(
            f"<figure><figcaption>{_text(label)} "
            f"<span>last {_number(points[-1][1])}</span></figcaption>"
            f"{_chart(label, points)}</figure>"
        )
    if not figures:
        return ""
    caption = '<p class="soft">Over epochs'
    if metrics:
        caption += "; metrics are those of the validation data"
    return f'{caption}.</p>\n<div class="charts">\n' + "\n".join(figures) + "\n</div>"


def _calibrations(found: Any) -> list[str]:
    """HTML sections with calibration curves. A single curve is not named after its label."""
    if not isinstance(found, Mapping):
        found = {"": found}
    return [
        _section(f"Calibration of {name}" if len(found) > 1 else "Calibration", drawn)
        for name, points in found.items()
        if (drawn := _calibration(points))
    ]


def _calibration(points: Sequence[tuple[float, float]]) -> str:
    """A chart of the observed click rates over the predicted click rates."""
    if not points:
        return ""
    rows = [
        (
            ("number", f"{predicted:.4f}"),
            ("number", f"{true:.4f}"),
            _bars(predicted, true),
        )
        for predicted, true in points
    ]
    heads = ("number", "predicted"), ("number", "clicks"), _key("predicted", "clicks")
    drawn = _chart("share of clicks", points, over="predicted share", diagonal=True)
    return (
        '<p class="soft">Parts of the examples, with as many each, by the probability that '
        "the model predicts.</p>\n"
        f'<div class="charts"><figure><figcaption>share of clicks over predicted share'
        f"</figcaption>{drawn}</figure></div>\n"
        f"<details><summary>In numbers</summary>{_table('', heads, rows)}</details>"
    )


def _chart(
    label: str,
    points: Sequence[tuple[float, float]],
    *,
    over: str = "epoch",
    diagonal: bool = False,
) -> str:
    """A curve as inline SVG. `over` names the horizontal axis; `diagonal` draws the line y = x."""
    xs, ys = zip(*points, strict=True)
    y_ticks = ticks(min(ys), max(ys), 4)
    low, high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)
    first, last = min(xs), max(xs)
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        right = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return round(_LEFT + right * wide, 1), round(_TOP + (1 - up) * tall, 1)

    drawn = []
    for tick in y_ticks:
        _, y = place(first, tick)
        drawn.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
        drawn.append(
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_tick(tick)}</text>'
        )
    x_ticks = set(ticks(first, last, 6))
    if over == "epoch":
        x_ticks = {t for t in x_ticks if t == int(t)} | {first}
    for tick in sorted(x_ticks):
        if first <= tick <= last:
            x, _ = place(tick, low)
            drawn.append(
                f'<text x="{x}" y="{_HEIGHT - 6}" text-anchor="middle">{tick:g}</text>'
            )
    begin, end = max(first, low), min(last, high)
    if diagonal and begin < end:
        ends = [place(both, both) for both in (begin, end)]
        line = "L".join(f"{x} {y}" for x, y in ends)
        drawn.append(f'<path class="equal" d="M{line}"/>')
    places = [place(*point) for point in points]
    line = " ".join(f"{x},{y}" for x, y in places)
    drawn.append(f'<polyline class="curve" points="{line}"/>')
    if len(points) <= _MOST_POINTS:
        for (epoch, value), (x, y) in zip(points, places, strict=True):
            drawn.append(
                f"<g><title>{over} {epoch:.4g}: {_number(value)}</title>"
                f'<circle class="point" cx="{x}" cy="{y}" r="2.5"/>'
                f'<circle class="hit" cx="{x}" cy="{y}" r="9"/></g>'
            )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{_text(label)} over {over}{"s" * (over == "epoch")}">{"".join(drawn)}</svg>'
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Labels of an axis: about `count` round numbers, from `low` or below to `high` or above.

    >>> ticks(0.3, 17.2, 4)
    [0.0, 5.0, 10.0, 15.0, 20.0]
    """
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _metrics(measured: Mapping[str, float]) -> str:
    rows, intervals = [], _intervals(measured)
    for name, value in measured.items():
        if "@" not in name or name.startswith("popularity_") or name.endswith("]"):
            continue
        other = measured.get(f"popularity_{name}")
        both = [value] if other is None else [value, other]
        sizes = [abs(x) if _is_finite(x) else 0 for x in both]
        largest = max(sizes) or 1
        rows.append(
            [
                ("metric", f"{_text(name)}{_direction(name)}"),
                ("number", f"{value:.4f}"),
                *[_interval(intervals.get(name))] * bool(intervals),
                ("number", "" if other is None else f"{other:.4f}"),
                _bars(*(size / largest for size in sizes)),
            ]
        )
    heads = [
        ("", ""),
        ("number", "model"),
        *[_INTERVAL_HEAD] * bool(intervals),
        ("number", "popularity"),
        _key("model", "popularity"),
    ]
    text = (
        "Popularity recommends the most popular items to everyone. "
        f"Values are {means_over(measured)}. ↑ more is better, ↓ less is better."
    )
    return _table(text, heads, rows)


def _by_entries(measured: Mapping[str, float]) -> str:
    """A table of metrics for groups of items with similar numbers of users, see `by="entries"`."""
    text = (
        "Items by the number of users who have them in the data that the model is shown. share "
        "is that of the recommendations."
    )
    return _groups(measured, "users", text, kinds=False)


def _by_kinds(measured: Mapping[str, float]) -> str:
    """A table of metrics for kinds of events, see `by="kinds"`, and for groups of users."""
    text = "Held-out events by their kinds, or by a category of their users."
    return _groups(measured, "events", text, kinds=True)


def _groups(measured: Mapping[str, float], head: str, text: str, *, kinds: bool) -> str:
    """A table of metrics of groups.

    With `kinds`, the groups are kinds of events or of users: their names contain "=".
    """
    named = [name[8:-1] for name in measured if name.startswith("entries[")]
    groups = [name for name in named if ("=" in name) == kinds]
    if not groups:
        return ""
    metrics = dict.fromkeys(
        name[: name.index("[")]
        for name in measured
        if name.endswith("]") and "@" in name
    )
    rows = []
    for group in groups:
        found = [measured.get(f"{each}[{group}]") for each in metrics]
        cells = [("number", "" if x is None else f"{x:.4f}") for x in found]
        count = ("number", f"{measured[f'entries[{group}]']:,.0f}")
        rows.append([("metric", _text(group)), count, *cells])
    heads = [("", head), ("number", "held out")]
    return _table(text, heads + [("number", _text(each)) for each in metrics], rows)


def _values(measured: Mapping[str, float]) -> str:
    """A table of the metrics that are not ranking metrics, such as those of clicks."""
    intervals = _intervals(measured)
    rows = [
        [
            ("metric", f"{_text(name)}{_direction(name)}"),
            ("number", _number(value)),
            *[_interval(intervals.get(name))] * bool(intervals),
        ]
        for name, value in measured.items()
    ]
    heads = [("", ""), ("", ""), *[_INTERVAL_HEAD] * bool(intervals)]
    return _table("↑ more is better, ↓ less is better, → 1 is right.", heads, rows)


def _names(
    names: Sequence[str], titled: Callable[[str], str], marked: Iterable[str] = ()
) -> str:
    marked = set(marked)
    shown = [_text(titled(name)) for name in names[:_MOST_NAMES]]
    shown = [
        f"<mark>{text} ✓</mark>" if name in marked else text
        for name, text in zip(names, shown, strict=False)
    ]
    more = len(names) - len(shown)
    return " · ".join(shown) + (
        f' <span class="soft">and {more} more</span>' * (more > 0)
    )


def _example(example: Example, titled: Callable[[str], str]) -> str:
    found = (_names([name], titled, example.heldout) for name in example.recommended)
    ranks = "".join(f"<li>{name}</li>" for name in found)
    facts = [
        ("has", _names(example.shown, titled)),
        ("recommended", f"<ol>{ranks}</ol>"),
    ]
    if example.heldout:
        wanted = _names(example.heldout, titled, example.recommended)
        facts.append(("held out", wanted))
    terms = "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in facts)
    return f"<h3>{_text(example.row)}</h3><dl>{terms}</dl>"


def _similar(similar: Mapping[str, Sequence[str]], titled: Callable[[str], str]) -> str:
    rows = [
        (("", _text(titled(item))), ("", _names(others, titled)))
        for item, others in similar.items()
    ]
    heads = ("", "item"), ("", "most similar, by cosine of the vectors")
    return _table("", heads, rows)


def _parameters(model: nnx.Module) -> list[tuple[str, jax.Array]]:
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in leaves
    ]


def _layers(model: nnx.Module) -> str:
    rows = [
        (
            ("", _text(name)),
            ("whole", " x ".join(f"{n:,}" for n in leaf.shape)),
            ("whole", f"{leaf.dtype}"),
            ("number", f"{leaf.size:,}"),
        )
        for name, leaf in _parameters(model)
    ]
    heads = ("", "name"), ("", "shape"), ("", "dtype"), ("number", "number")
    text = "Rows of features and items are rounded up to a multiple of 256."
    return _table(text, heads, rows)


def _settings(settings: Mapping[str, object]) -> str:
    terms = "".join(
        f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>"
        for name, value in settings.items()
    )
    return f"<dl>{terms}</dl>" if terms else ""
