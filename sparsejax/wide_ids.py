"""Ids of 64 bits, as two words of 32 bits: the ids of dynamic tables, and lists of any ids.

JAX has no integers of 64 bits unless a program asks for them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.sparse import CSR

Array = jax.Array | np.ndarray

NUM_IDS = 2**64  # number of possible ids of a feature with a dynamic table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WideIds:
    """The 64-bit ids of a feature, for a batch. Each number from 0 to 2^64 - 1 is an id.

    >>> ids = WideIds.of(np.array([7, 2**63 - 1, -1]))
    >>> ids.high.tolist(), ids.low.tolist(), ids.present.tolist()
    ([0, 2147483647, 0], [7, 4294967295, 0], [True, True, False])

    `EmbeddingCollection.pack` makes them of NumPy's int64 and uint64.

    Attributes:
      low: the lower 32 bits, uint32: `[batch]`, `[batch, n]`, or one behind the other.
      high: the upper ones.
      present: which places have an id; None if all have one. For ids in a fixed shape.
      offsets: `[batch + 1]` int32: where the ids of each example begin, if they lie one
        behind the other.
      weights: weights of ids with offsets; all 1 by default.
    """

    low: Array
    high: Array
    present: Array | None = None
    offsets: Array | None = None
    weights: Array | None = None

    @classmethod
    def of(cls, ids: Any, *, mask: Any = None) -> WideIds:
        """Ids in a fixed shape, on the host.

        >>> WideIds.of(np.array([5], np.uint64)).present is None
        True

        Args:
          ids: `[batch]` or `[batch, n]`, integers of NumPy, or an array of Arrow. In signed
            ones -1 is no id.
          mask: true where there is an id. Of a masked array, elements that are not
            masked are ids.

        Raises:
          TypeError: ids are not integers.
          ValueError: a signed id that is not masked is below -1; the mask has another shape.
        """
        array, present = _integers(ids, mask)
        return cls(*_words(array, present), present)

    @classmethod
    def ragged(cls, values: Any, offsets: Any, weights: Any = None) -> WideIds:
        """Lists of ids, one behind the other, on the host.

        >>> WideIds.ragged(np.array([5, 6, 7]), np.array([0, 2, 3])).low.tolist()
        [5, 6, 7]

        Args:
          values: the ids of all examples.
          offsets: `[batch + 1]`: example i has the ids `offsets[i]` to `offsets[i + 1]
            - 1`.
          weights: weight of each id; all 1 by default.

        Raises:
          TypeError: ids or offsets are not integers.
          ValueError: an id is negative; offsets do not ascend from 0, or end elsewhere.
        """
        array, present = _integers(values)
        offsets, _ = _integers(offsets)
        if array.ndim != 1 or (present is not None and not present.all()):
            raise ValueError(
                "ids with offsets are one behind the other, none is left out: got the "
                f"shape {array.shape}, {_missing(present):,} of them -1 or masked"
            )
        if (
            offsets.ndim != 1
            or len(offsets) == 0
            or offsets[0] != 0
            or offsets[-1] != len(array)
            or (offsets[1:] < offsets[:-1]).any()
        ):
            raise ValueError(
                f"offsets must ascend from 0 to {len(array):,}, the number of ids"
            )
        if weights is not None:
            weights = np.asarray(weights, np.float32)
            if weights.shape != array.shape:
                raise ValueError(
                    f"{len(array):,} ids have weights of the shape {weights.shape}"
                )
        low, high = _words(array, None)
        return cls(low, high, None, offsets.astype(np.int32), weights)

    def narrow(self, num_rows: int) -> Array | CSR:
        """The ids as int32 for a table with `num_rows` rows, or as a CSR of lists in their order.

        An id that is no int32 is the largest one, which no table has.
        """
        on_host = isinstance(self.low, np.ndarray) and isinstance(self.high, np.ndarray)
        xp = np if on_host else jnp
        most = np.uint32(2**31 - 1)
        low = xp.where(self.high == 0, xp.minimum(self.low, most), most)
        ids = low.astype(np.int32)
        if self.offsets is not None:
            leaves = (self.weights, ids, self.offsets, None)
            return CSR.tree_unflatten(num_rows, leaves)
        if self.present is None:
            return ids
        return xp.where(self.present, ids, np.int32(-1))


def _missing(present: np.ndarray | None) -> int:
    return 0 if present is None else int(np.sum(~present))


def _integers(ids: Any, mask: Any = None) -> tuple[np.ndarray, np.ndarray | None]:
    """The ids, and a mask of where there is an id (None if everywhere)."""
    if isinstance(ids, jax.Array):
        raise TypeError(
            f"64-bit ids on a device are WideIds, two words of 32 bits; got {ids.dtype}. "
            "Make them of NumPy's arrays by `EmbeddingCollection.pack`, before a compiled "
            "step: JAX cuts int64 to 32 bits"
        )
    present = None
    if isinstance(ids, np.ma.MaskedArray):
        present = ~np.ma.getmaskarray(ids)
        ids = ids.filled(0)
    array = np.asarray(ids)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"ids of dynamic tables are integers, got {array.dtype}; hash names to 64 bits, "
            "and give missing ones as -1 or by a mask"
        )
    if mask is not None:
        mask = np.asarray(mask)
        if mask.shape != array.shape or mask.dtype != bool:
            raise ValueError(
                f"mask must be bool of the shape {array.shape}, like the ids; got "
                f"{mask.dtype} of the shape {mask.shape}"
            )
        present = mask if present is None else present & mask
        array = np.where(mask, array, 0)  # masked elements may have any value
    if array.dtype.kind == "i":
        if (array < -1).any():
            raise ValueError(
                f"id {array.min()} is negative; in int64 only -1 stands, for no id. Give "
                "ids above 2^63 - 1 as uint64, by .view(np.uint64)"
            )
        if (array == -1).any():
            there = array != -1
            present = there if present is None else present & there
    return array, present


def _words(
    array: np.ndarray, present: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    if present is not None:
        array = np.where(present, array, 0)
    wide = np.asarray(array, np.uint64)
    low = (wide & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return low, (wide >> np.uint64(32)).astype(np.uint32)


def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Joins low and high 32-bit words to uint64 ids."""
    return np.uint64(high) << np.uint64(32) | np.asarray(low, np.uint64)
