"""Logistic regression on the ids and dense columns of clicks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import scipy.sparse
from flax import nnx
from jax.typing import ArrayLike

from sparsejax.data.scans.scan_clicks import ScannedClicks
from sparsejax.data.sets.clicks import ClickDataset
from sparsejax.kinds.clicks.model import ClickModel
from sparsejax.ops.gather_matmul import Combiner
from sparsejax.sparse import CSR
from sparsejax.whole_files import opened_regular, whole_file

# Prior variances of the weights, tried in this order. Held-out examples choose one.
_VARIANCES = 0.03, 0.1, 0.3, 1.0, 3.0
# With at most 50,000 examples, the variance is chosen by cross-validation with five folds.
_IN_FOLDS, _FOLDS = 50_000, 5
_SHARES = 41
# At most this many examples are used to choose the variance: more examples do not change it.
_CHOOSING = 250_000
# Newton's method makes at most 50 steps. It stops if the norm of the gradient with respect to the
# scaled weights is below 0.03: the total loss is then within 0.001 of its minimum.
_ITERATIONS, _TOLERANCE = 50, 0.03


@dataclasses.dataclass(frozen=True)
class Regression:
    """Fitted weights of a logistic regression.

    Attributes:
      dense: `[columns]` weight for each dense column.
      bias: intercept.
      tables: weights for the ids of each table, `[num_rows]`; 0 for ids that are in no example.
      variance: prior variance of the weights that held-out examples chose; 0 if unknown.
    """

    dense: np.ndarray
    bias: float
    tables: Mapping[str, np.ndarray]
    variance: float = 0.0


def fit_regression(
    clicks: ClickDataset,
    combiner: Combiner = "sum",
    *,
    before: Regression | None = None,
    near: Regression | None = None,
) -> Regression:
    """Fits a logistic regression with L2 penalty by Newton's method in float64.

    ::

        loss = sum over examples of -v log p(label) + |w - before|^2 / (2 variance)

    Here `v` are the weights of the examples, 1 by default. `w` are the weights of ids and of dense
    columns, each divided by its standard deviation. The intercept has no penalty. Held-out
    examples choose the variance.

    Args:
      clicks: examples to fit.
      combiner: how the weights of several ids in a list are combined.
      before: an earlier regression of the same columns; by default its weights are all 0.
      near: a regression fitted on most of the examples. Newton's method begins with its weights.
        With more than 50,000 examples its variance is used: a tenth more would not change it.
    """
    columns = _Columns(clicks)
    x, y = columns.matrix(clicks, combiner), clicks.trained_labels.astype(np.float64)
    if before is None:
        none = {name: np.zeros(clicks.num_ids[name]) for name in columns.ids}
        before = Regression(np.zeros(clicks.dense.shape[1]), 0.0, none)
    offsets = regression_logits(before, clicks, combiner)
    v = np.ones(len(y)) if clicks.weights is None else clicks.weights.astype(np.float64)
    begin = None if near is None else columns.weights(near, before)
    if near is None or len(y) <= _IN_FOLDS:
        variance = _chosen(x, y, v, offsets)
    else:
        variance = near.variance
    w = _fitted(x, y, v, variance, offsets, begin)
    first = clicks.dense.shape[1]
    dense = w[:first] / columns.deviation
    tables = {name: weights.copy() for name, weights in before.tables.items()}
    for name, ids in columns.ids.items():
        tables[name][ids] += w[first : first + len(ids)]
        first += len(ids)
    bias = before.bias + float(w[-1] - columns.mean @ dense)
    return Regression(before.dense + dense, bias, tables, variance)


def regression_logits(
    fitted: Regression, clicks: ClickDataset, combiner: Combiner = "sum"
) -> np.ndarray:
    """The logits `[examples]` that a fitted regression predicts."""
    z = clicks.dense.astype(np.float64) @ fitted.dense + fitted.bias
    for name, ids in clicks.ids.items():
        rows, found, weights = _entries(ids, combiner)
        of_ids = weights * fitted.tables[_table_of(clicks, name)][found]
        z = z + np.bincount(rows, of_ids, minlength=clicks.num_rows)
    return z


def set_regression(
    model: Any,
    clicks: ClickDataset | ScannedClicks,
    everything: ClickDataset | ScannedClicks | None = None,
    earlier: pathlib.Path | None = None,
) -> Callable[[pathlib.Path], None] | None:
    """Fits the regression of a click model whose configuration has one, in place.

    Fitting starts from the model's current weights, and the penalty pulls towards them. If nothing
    is held out, the weights in the file `earlier` take their place.

    Args:
      model: the click model.
      clicks: examples to fit.
      everything: `clicks`, and the examples that were held out of the same data; None if none were.
      earlier: the file with the regression on all examples of the run that is trained further.

    Returns:
      A function that fits a regression on `everything`, and writes it into a file for `set_final`;
      None if nothing was held out. It starts from the weights in `earlier`: these were fitted on
      examples that may be held out now, so the share must not be chosen with them.

    Raises:
      NotImplementedError: the examples are scanned.
      ValueError: there are no examples, or all have one label while the model has no weights yet.
    """
    if getattr(model, "share", None) is None:  # as for models of several labels
        return None
    if not isinstance(clicks, ClickDataset):
        raise NotImplementedError(
            "the regression of a click model is fitted on examples in memory, and these are "
            "scanned; leave regression out of the configuration"
        )
    before = last = _regression_of(model, clicks)
    if earlier is not None:
        last = _grown(earlier, before)
    if everything is None or everything is clicks:
        everything, before = None, last
    if len(np.unique(clicks.labels)) < 2:
        # Training further on examples with a single label would destroy the fitted weights.
        if before.bias:
            _replace(model, before)
            kept = functools.partial(_save_final, lambda: last)
            return None if everything is None else kept
        raise ValueError(
            f"the regression of a click model needs examples of both labels, got "
            f"{clicks.num_rows:,} of one; leave regression out of the configuration"
        )
    combiner = model.config.combiner
    fitted = fit_regression(clicks, combiner, before=before)
    _replace(model, fitted)
    if not isinstance(everything, ClickDataset):
        return None
    fit = functools.partial(
        fit_regression, everything, combiner, before=last, near=fitted
    )
    return functools.partial(_save_final, fit)


def _save_final(fit: Callable[[], Regression], path: pathlib.Path) -> None:
    """Fits and writes a regression on all examples, including those held out to choose the share.

    Where many ids are rare, a tenth more examples improve the predictions, even in large data.
    """
    found = fit()
    tables = {f"of {name}": w for name, w in found.tables.items()}
    arrays = {"dense": found.dense, "bias": np.asarray(found.bias), **tables}
    with whole_file(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def set_final(model: ClickModel, path: pathlib.Path) -> None:
    """Loads the regression on all examples, which a run has written, into a model.

    Raises:
      ValueError: the file is damaged, or belongs to another model.
    """
    with _read_final(path) as found:
        _replace(model, found)


@contextlib.contextmanager
def _read_final(path: pathlib.Path) -> Iterator[Regression]:
    """Reads a regression from a file. Errors while this context is open name the file."""
    try:
        with opened_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            tables = {n[3:]: arrays[n] for n in arrays.files if n.startswith("of ")}
            found = Regression(arrays["dense"], float(arrays["bias"]), tables)
        yield found
    except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: is not the regression of this run") from error


def _grown(path: pathlib.Path, like: Regression) -> Regression:
    """Reads a regression from a file; ids that were added to the model since have the weight 0."""
    with _read_final(path) as found:
        tables = {name: np.zeros_like(weights) for name, weights in like.tables.items()}
        for name, weights in tables.items():
            own = found.tables[name]
            weights[: len(own)] = own
        return Regression(found.dense + 0 * like.dense, found.bias, tables)


def _regression_of(model: Any, clicks: ClickDataset) -> Regression:
    """The linear part of a click model."""
    linear = model.linear
    tables = {
        name: np.asarray(linear.embeddings.table(name), np.float64)[:, 0]
        for name in {_table_of(clicks, feature) for feature in clicks.ids}
    }
    dense = np.asarray(linear.weights[...], np.float64)
    return Regression(dense, float(linear.bias[...]), tables)


def _replace(model: Any, found: Regression) -> None:
    """Sets the linear part of a click model to a fitted regression."""
    linear = model.linear
    set_to(linear.weights, found.dense)
    set_to(linear.bias, found.bias)
    for name, weights in found.tables.items():
        linear.embeddings.set_table(name, weights[:, None].astype(np.float32))


def set_to(variable: nnx.Variable, value: ArrayLike) -> None:
    """Replaces the value of a variable by one with equal shape, keeping its sharding."""
    # An array that was put on a named device would cause another compilation.
    before = variable[...]
    place = before.sharding if before.committed else None
    value = np.asarray(value, before.dtype)
    variable.set_value(jax.device_put(value, place))


def least_share(first: np.ndarray, second: np.ndarray, labels: np.ndarray) -> float:
    """The least share of a correction that is not significantly worse than the best share.

    ::

        logit = first + share (second - first)        share = 0, .025, ... 1

    The log loss of the result is at most one standard error above the minimum. So a correction
    that only fits noise gets the share 0.

    Args:
      first: `[examples]` logits without the correction.
      second: `[examples]` logits with the whole correction.
      labels: `[examples]` labels of examples that neither model was fitted on.
    """
    shares = np.linspace(0, 1, _SHARES)
    losses = [
        np.logaddexp(0, z) - labels * z
        for z in (first + share * (second - first) for share in shares)
    ]
    best = losses[int(np.argmin([loss.mean() for loss in losses]))]
    differences = (loss - best for loss in losses)
    error = 1 / np.sqrt(len(labels))
    good = [d.mean() <= error * d.std() for d in differences]
    return float(shares[good.index(True)])


class _Columns:
    """Layout of the regression's matrix: dense columns, then a column for each id of each
    table.
    """

    def __init__(self, clicks: ClickDataset):
        dense = clicks.dense.astype(np.float64)
        deviation = dense.std(axis=0) if len(dense) else np.ones(dense.shape[1])
        self.mean = dense.mean(axis=0) if len(dense) else np.zeros(dense.shape[1])
        self.deviation = np.where(deviation > 0, deviation, 1)
        found: dict[str, list[np.ndarray]] = {}
        for name, ids in clicks.ids.items():
            entries = _entries(ids, "sum")[1]
            found.setdefault(_table_of(clicks, name), []).append(np.unique(entries))
        self.ids = {name: np.unique(np.concatenate(x)) for name, x in found.items()}

    def weights(self, fitted: Regression, before: Regression) -> np.ndarray:
        """`fitted` minus `before`, as an array: weights of the columns, then the intercept."""
        dense, own = fitted.dense - before.dense, self.ids.items()
        of_ids = ((fitted.tables[n] - before.tables[n])[ids] for n, ids in own)
        bias = fitted.bias - before.bias + self.mean @ dense
        return np.concatenate([dense * self.deviation, *of_ids, [bias]])

    def matrix(
        self, clicks: ClickDataset, combiner: Combiner
    ) -> scipy.sparse.csr_array:
        """`[examples, columns]` CSR. All ids must be known."""
        scaled = (clicks.dense - self.mean) / self.deviation
        count, examples = clicks.dense.shape[1], clicks.num_rows
        rows = [np.repeat(np.arange(examples), count)]
        columns = [np.tile(np.arange(count), examples)]
        values = [scaled.reshape(-1)]
        *starts, width = np.cumsum([count, *map(len, self.ids.values())]).tolist()
        first = dict(zip(self.ids, starts, strict=True))
        for name, ids in clicks.ids.items():
            table = _table_of(clicks, name)
            at, found, weights = _entries(ids, combiner)
            rows.append(at)
            columns.append(first[table] + np.searchsorted(self.ids[table], found))
            values.append(weights)
        places = np.concatenate(rows), np.concatenate(columns)
        entries = np.concatenate(values), places
        return scipy.sparse.coo_array(entries, shape=(examples, width)).tocsr()


def _table_of(clicks: ClickDataset, name: str) -> str:
    """The name of the feature whose table this feature shares, or its own name."""
    like = clicks.features[name]
    return like if isinstance(like, str) else name


def _entries(
    ids: np.ndarray | CSR, combiner: Combiner
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three arrays with an entry for each id of a feature.

    They are the id's example number, the id, and its factor by the combiner.
    """
    if not isinstance(ids, CSR):
        return np.arange(len(ids)), np.asarray(ids), np.ones(len(ids))
    indptr = np.asarray(ids.indptr)
    lengths = np.diff(indptr)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    power = {"sum": 0.0, "sqrtn": 0.5, "mean": 1.0}[combiner]
    factors = np.repeat(np.maximum(lengths, 1) ** -power, lengths)
    return rows, np.asarray(ids.indices)[: indptr[-1]], factors


def _chosen(x: Any, y: np.ndarray, v: np.ndarray, offsets: np.ndarray) -> float:
    """The prior variance with the least log loss on held-out examples."""
    fold = np.random.default_rng(0).permutation(len(y))[:_CHOOSING] % _FOLDS
    x, y, v, offsets = (each[: len(fold)] for each in (x, y, v, offsets))
    losses = np.zeros(len(_VARIANCES))
    for held in range(_FOLDS if len(y) <= _IN_FOLDS else 1):
        mine, w = fold == held, None
        kept = x[~mine], y[~mine], v[~mine]
        for i, variance in enumerate(_VARIANCES):
            w = _fitted(*kept, variance, offsets[~mine], w)
            z = offsets[mine] + x[mine] @ w[:-1] + w[-1]
            losses[i] += np.sum(v[mine] * (np.logaddexp(0, z) - y[mine] * z))
    return _VARIANCES[int(np.argmin(losses))]


def _fitted(
    x: Any,
    y: np.ndarray,
    v: np.ndarray,
    variance: float,
    offsets: np.ndarray,
    first: np.ndarray | None = None,
) -> np.ndarray:
    """Weights and intercept that minimize the penalized log loss.

    Args:
      x: matrix `[examples, columns]`.
      y: labels.
      v: weights of the examples.
      variance: prior variance of the weights, which sets the penalty.
      offsets: numbers added to the logits.
      first: initial weights and intercept.
    """
    import scipy.optimize  # imported here, as nothing else in this module needs scipy
    import scipy.special

    share = np.clip(v @ y / max(v.sum(), 1e-30), 1e-3, 1 - 1e-3)
    if first is None:
        first = np.zeros(x.shape[1] + 1)
        first[-1] = scipy.special.logit(share) - offsets.mean()
    # The weights are scaled so that the loss has equal curvature along each of them. Weights of
    # frequent and of rare ids then converge in equally many steps.
    curvature = share * (1 - share) * np.append(v @ x.power(2), v.sum())
    scale = 1 / np.sqrt(curvature + 1 / variance)
    penalty = np.append(np.full(x.shape[1], 1 / variance), 0)
    xt = x.T.tocsr()

    def logits(w: np.ndarray) -> np.ndarray:
        return offsets + x @ w[:-1] + w[-1]

    def gradient(error: np.ndarray) -> np.ndarray:
        return np.append(xt @ error, error.sum())

    def loss(u: np.ndarray) -> tuple[float, np.ndarray]:
        w = scale * u
        z = logits(w)
        value = v @ (np.logaddexp(0, z) - y * z) + (penalty * w * w).sum() / 2
        slope = gradient(v * (scipy.special.expit(z) - y)) + penalty * w
        return float(value), scale * slope

    last: list[np.ndarray] = [first, y]  # a point, and the second derivatives at it

    def curved(u: np.ndarray, direction: np.ndarray) -> np.ndarray:
        if last[0] is not u:
            p = scipy.special.expit(logits(scale * u))
            last[:] = u, v * p * (1 - p)
        w = scale * direction
        along = x @ w[:-1] + w[-1]
        return scale * (gradient(last[1] * along) + penalty * w)

    # L-BFGS is not used: it waits for BLAS threads much longer than it computes.
    found = scipy.optimize.minimize(
        loss,
        first / scale,
        jac=True,
        hessp=curved,
        method="trust-ncg",
        options={"maxiter": _ITERATIONS, "gtol": _TOLERANCE},
    )
    return scale * found.x
