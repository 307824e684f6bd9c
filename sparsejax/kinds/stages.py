"""Two-stage ranking: one model finds candidate items, a click model ranks them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from sparsejax.embeddings.feature_batch import CandidateBatch, Ids
from sparsejax.engine.rank.recommender import Recommender, can_deny
from sparsejax.predictors.stages import DENSE, IDS, INPUTS
from sparsejax.sparse import CSR
from sparsejax.wide_ids import WideIds

# Number of pairs of a row and a candidate that are scored at a time, on a CPU and on other
# devices, and of the places of all their histories on a CPU. DIN with histories of length 200 took
# 15 ms of processor time for 4 of 500 candidates at a time, and 18 ms for 16. With length 50 it
# took 5.7 ms for 4, and 5.2 ms for 16. On a GPU the parts only bound the memory.
_PAIRS, _PLACES, _PAIRS_OF_GPU = 16, 800, 8192


class ItemColumn(nnx.Variable):
    """A column with a value for each item. Optimizers do not train it."""


class Stages(nnx.Module):
    """A `Recommender` that ranks the candidates of another recommender by a click model.

    The click model scores all candidates of a batch as one batch. Vectors of request columns are
    looked up once for each row.

    Args:
      first: recommender that finds the candidates.
      second: click model that ranks them.
      candidates: number of candidates for each row.
      items: item columns, `[items, n]`, by the column names of the click model.
      requests: request columns, as `Requests.inputs` describes them.
      dense: positions of the dense columns, in the order request columns, item columns.
      wide: names of the columns with 64-bit ids, stored as two words.
      ranks_by: with several labels, those that are ranked by: number of each label, its factor,
          and whether it is a probability. A single label has the factor 1.
    """

    kind = "items"

    def __init__(
        self,
        first: Recommender,
        second: Any,
        *,
        candidates: int,
        items: Mapping[str, np.ndarray],
        requests: Mapping[str, jax.ShapeDtypeStruct],
        dense: Sequence[int] = (),
        wide: Sequence[str] = (),
        ranks_by: Sequence[tuple[int, float, bool]] = (),
    ):
        self.first, self.second = nnx.data(first), nnx.data(second)
        self.candidates = min(candidates, first.num_items)
        self.items = nnx.data({n: ItemColumn(jnp.asarray(a)) for n, a in items.items()})
        self.requests = tuple(requests.items())
        self.dense, self.wide = tuple(dense), frozenset(wide)
        self.ranks_by = tuple(ranks_by)
        self.ranks: Literal["both", "first", "second"] = "both"

    def alone(self, which: Literal["first", "second"]) -> Self:
        """A model that ranks all items by the first or the second stage only."""
        found = copy.copy(self)
        found.ranks = which
        return found

    @property
    def num_features(self) -> dict[str, Any]:
        own = self.first.num_features
        own = dict(own) if isinstance(own, Mapping) else {INPUTS: own}
        return own | dict(self.requests)

    @property
    def num_items(self) -> int:
        return self.first.num_items

    @property
    def denies(self) -> bool:
        """Whether `top_k` accepts a mask of items that are excluded in all rows."""
        return can_deny(self.first)

    def top_k(
        self,
        x: Mapping[str, Any],
        k: int,
        *,
        exclude: CSR | None = None,
        excluded: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Ids and predictions. Equal predictions are ordered by the first stage."""
        if self.ranks == "second":
            return self._best_of_all(x, k, exclude, excluded)
        names = self.first.num_features
        of_first = (
            {name: x[name] for name in names}
            if isinstance(names, Mapping)
            else x[INPUTS]
        )
        options = {} if excluded is None else {"excluded": excluded}
        most = k if self.ranks == "first" else self.candidates
        ids, scores = self.first.top_k(of_first, most, exclude=exclude, **options)
        if self.ranks == "first":
            return ids, scores
        logits = jnp.where(ids < 0, -jnp.inf, self._logits(x, ids))
        # NaN ranks first, so that the caller notices it, also if the first stage's score is NaN.
        logits = jnp.where(jnp.isnan(scores), scores, logits)
        order = jnp.where(jnp.isnan(logits), -jnp.inf, -logits)
        _, ids, logits = lax.sort((order, ids, logits), num_keys=1)
        return self._first_of(ids, logits, k)

    def _first_of(self, ids, logits, k: int) -> tuple[jax.Array, jax.Array]:
        """The first `k` ids and predictions, padded with the id -1 if there are fewer."""
        more = ((0, 0), (0, max(0, k - ids.shape[1])))
        ids = jnp.pad(ids, more, constant_values=-1)[:, :k]
        logits = jnp.pad(logits, more)[:, :k]
        return ids, jnp.where(ids < 0, -jnp.inf, self._scores(logits))

    def _best_of_all(self, x, k, exclude, excluded) -> tuple[jax.Array, jax.Array]:
        """Ids and predictions of the `k` best among all items, by the click model alone."""
        rows = next(iter(x.values())).shape[0]
        ids = jnp.arange(self.num_items, dtype=jnp.int32)
        logits = self._logits(x, jnp.broadcast_to(ids, (rows, self.num_items)))
        # `top_k` ranks a NaN with a positive sign bit first, and one with a negative sign bit
        # last.
        logits = jnp.where(jnp.isnan(logits), jnp.nan, logits)
        if exclude is not None:
            logits = jnp.where(exclude.todense() > 0, -jnp.inf, logits)
        if excluded is not None:
            logits = jnp.where(excluded, -jnp.inf, logits)
        logits, ids = lax.top_k(logits, min(k, self.num_items))
        return self._first_of(jnp.where(logits == -jnp.inf, -1, ids), logits, k)

    def _logits(self, x: Mapping[str, Any], ids: jax.Array) -> jax.Array:
        """`[rows, candidates]` logits, which are arbitrary where an id is negative.

        A few candidates are computed at a time, so that activations fit in a CPU's cache.
        """
        given = {name: x[name] for name, _ in self.requests}
        longest = max((1, *(each.shape[1] for each in given.values())))
        cpu, gpu = (
            functools.partial(self._logits_in_parts, most)
            for most in (min(_PAIRS, _PLACES // longest), _PAIRS_OF_GPU)
        )
        return lax.platform_dependent(given, ids, cpu=cpu, default=gpu)

    def _logits_in_parts(self, most: int, x: Mapping[str, jax.Array], ids: jax.Array):
        rows, count = ids.shape
        parts = -(-count // max(1, most // max(1, rows)))
        each = -(-count // parts)
        more = ((0, 0), (0, parts * each - count))
        ids = jnp.pad(ids, more).reshape(rows, parts, each)
        score = functools.partial(self._logits_of_some, x)
        found = lax.map(score, jnp.moveaxis(ids, 1, 0))
        return jnp.moveaxis(found, 0, 1).reshape(rows, parts * each)[:, :count]

    def _logits_of_some(self, x: Mapping[str, Any], ids: jax.Array) -> jax.Array:
        rows, count = ids.shape
        at = jnp.maximum(ids, 0).reshape(-1)
        of_requests = {name: x[name] for name, _ in self.requests}
        of_items = {name: column[...][at] for name, column in self.items.items()}
        parts = [jnp.zeros((len(at), 0), jnp.float32)]
        if DENSE in of_requests:
            parts.append(jnp.repeat(of_requests.pop(DENSE), count, axis=0))
        if DENSE in of_items:
            parts.append(of_items.pop(DENSE))
        dense = jnp.concatenate(parts, axis=1)[:, np.asarray(self.dense, np.int32)]
        batch = CandidateBatch(
            requests=self._ids(of_requests, of_items, rows),
            candidates=self._ids(of_items, of_requests, len(at)),
        )
        self.second.eval()
        logits = self.second(dense, batch)
        if logits.ndim == 2:
            [(label, _, _), *others] = self.ranks_by
            if not others:
                logits = logits[:, label]
            else:
                parts = (
                    factor
                    * (nnx.sigmoid(logits[:, label]) if is_share else logits[:, label])
                    for label, factor, is_share in self.ranks_by
                )
                logits = sum(parts)
        return logits.reshape(ids.shape)

    def _scores(self, logits: jax.Array) -> jax.Array:
        """Converts logits to predictions, which have the same order."""
        is_share = [each for *_, each in self.ranks_by] in ([], [True])
        return nnx.sigmoid(logits) if is_share else logits

    def _ids(self, given, others, rows: int) -> dict[str, Ids]:
        """Ids of the features in `given`, and empty lists for the features of `others` alone."""
        nothing = jnp.zeros((rows, 0), jnp.int32)
        found: dict[str, Ids] = {}
        for name, ids in {**dict.fromkeys(others, nothing), **given}.items():
            feature = name.removeprefix(IDS)
            if feature not in self.wide:
                found[feature] = jnp.asarray(ids)
                continue
            words = lax.bitcast_convert_type(jnp.asarray(ids), jnp.uint32)
            found[feature] = WideIds(words[:, :1], words[:, 1:])
        return found
