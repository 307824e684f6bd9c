"""A model as a program: `load_predictor` needs neither Flax nor the model's code.

A predictor is one file, a zip archive::

    predictor.json      version, k, sizes, what weights there are
    items.json          names of the items, or null
    programs/16         for batches of 16 rows: StableHLO, as `jax.export` writes it
    programs/24         ...
    weights/0.npy       ...

Weights are arguments of the programs: as constants they would be in each of them, would
be compiled, and could not pass 2 GiB. The archive has a checksum of each part.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from sparsejax import distributed
from sparsejax.batching import Batch, Shown, bucket
from sparsejax.data.files import replacing
from sparsejax.data.names import Names, as_names
from sparsejax.recommendations import Recommendations, recommend_by
from sparsejax.sharding import row_parts, without_mesh
from sparsejax.sources import Inputs, Source, Table, check_same_features
from sparsejax.sparse import CSR
from sparsejax.writers import check_writable

VERSION = 1
_SETTINGS, _ITEMS = "predictor.json", "items.json"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Predictor:
    """What `sparsejax.load_predictor` returns.

    >>> export_predictor(model, "model.predictor", k=2)
    >>> load_predictor("model.predictor").recommend(train).ids.shape
    (32711, 2)

    Attributes:
      k: number of items recommended to each row.
      num_features: number of input features.
      num_items: number of items that are scored.
      items: names of the items, or None.
      programs: for each batch size, `(weights, data, indices, indptr, exclude's indices
        and indptr) -> (ids, scores)`.
      weights: their first argument, on the device.
    """

    k: int
    num_features: int
    num_items: int
    items: Names | None
    programs: dict[int, export.Exported]
    weights: tuple[jax.Array, ...]

    def recommend(
        self, inputs: Source, *, exclude: Source | None = None
    ) -> Recommendations:
        """The `k` best of all items for each row, as `sparsejax.recommend` has them.

        On a CPU with the same bits, given the same jaxlib. A batch size is compiled
        when it is first needed.

        Args:
          inputs: `[rows, num_features]`.
          exclude: `[rows, num_items]`, what not to recommend; see `recommend`.

        Raises:
          FloatingPointError: a score is NaN; names the row.
          TypeError: `inputs` or `exclude` is nothing of the kind.
          ValueError: `inputs` or `exclude` does not fit the model or the other.
        """
        x = Table.of("inputs", inputs)
        if self.num_items == self.num_features:
            check_same_features(x, Table("the predictor", x.matrix, None, self.items))
        with without_mesh():  # programs are for one device
            return recommend_by(
                self._step,
                Inputs.of(inputs),
                self.k,
                exclude=exclude,
                num_features=self.num_features,
                num_items=self.num_items,
                batch_size=max(self.programs),
            )

    def names(self, found: Recommendations) -> list[list[str]]:
        """The recommended items of each row by name.

        Raises:
          ValueError: the predictor was exported without names.
        """
        if self.items is None:
            raise ValueError(
                "this predictor has no names; export it with names=..., or use "
                "found.names(...)"
            )
        return found.names(self.items)

    def _step(self, shown: Shown, unwanted: Batch | None):
        assert isinstance(shown, Batch)
        return self._programs[len(shown.rows)](self.weights, shown, unwanted)

    @functools.cached_property
    def _programs(self):
        return {size: jax.jit(_taking(p)) for size, p in self.programs.items()}


def _taking(program: export.Exported):
    """The program, called with rows of a matrix on the device."""

    def call(weights, shown: Batch, unwanted: Batch | None):
        x = shown.take()
        assert isinstance(x, CSR)  # as no mesh is set
        data = jnp.ones(x.nse) if x.data is None else jnp.asarray(x.data)
        if unwanted is None:
            nothing = jnp.zeros(bucket(0), jnp.int32)
            seen = CSR(None, nothing, jnp.zeros_like(x.indptr), num_cols=1)
        else:
            seen = unwanted.take()
            assert isinstance(seen, CSR)
        arrays = (data, x.indices, x.indptr, seen.indices, seen.indptr)
        return program.call(weights, *arrays)

    return call


def save_predictor(
    path: str | os.PathLike[str],
    *,
    k: int,
    num_features: int,
    num_items: int,
    items: Sequence[str] | None,
    programs: Iterable[tuple[int, export.Exported]],
    weights: Sequence[jax.Array],
) -> None:
    """Writes a predictor, whole or not at all; see `sparsejax.export_predictor`.

    Of several processes the first writes; all bring the parts of the weights together.
    """
    parts = [row_parts(weight) for weight in weights]

    def write() -> None:
        try:
            _write(path, settings, items, programs, weights, parts)
        except Exception:
            _take_all(parts)  # as the others do
            raise

    settings = {
        "version": VERSION,
        "jax": jax.__version__,
        "k": k,
        "num_features": num_features,
        "num_items": num_items,
        "batch_sizes": [],
        "weights": [jnp.dtype(weight.dtype).name for weight in weights],
    }
    if not distributed.is_first():
        _take_all(parts)
    distributed.in_first(write)


def _take_all(parts: Iterable[Iterator[np.ndarray]]) -> None:
    for _ in itertools.chain(*parts):
        pass


def _write(path, settings, items, programs, weights, parts) -> None:
    check_writable(path)
    with (
        replacing(path) as temporary,
        zipfile.ZipFile(temporary, "x") as archive,
    ):
        for size, program in programs:
            settings["batch_sizes"].append(size)
            # They are text in the main.
            archive.writestr(
                f"programs/{size}",
                bytes(program.serialize()),
                compress_type=zipfile.ZIP_DEFLATED,
            )
        for i, weight in enumerate(weights):
            dtype = np.dtype(weight.dtype)
            if dtype.isbuiltin != 1:  # bfloat16, which .npy has no name for
                dtype = np.dtype(f"u{dtype.itemsize}")
            header = {"descr": dtype.str, "fortran_order": False, "shape": weight.shape}
            with archive.open(f"weights/{i}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, header)
                for part in parts[i]:
                    file.write(memoryview(np.ascontiguousarray(part).view(dtype)))
        archive.writestr(_ITEMS, json.dumps(items))
        archive.writestr(_SETTINGS, json.dumps(settings, indent=2))


def load_predictor(path: str | os.PathLike[str]) -> Predictor:
    """Reads what `sparsejax.export_predictor` wrote.

    Needs neither Flax nor the model's code. JAX reads programs of releases up to six
    months older than itself.

    >>> export_predictor(model, "model.predictor", k=2, names=train)
    >>> predictor = load_predictor("model.predictor")  # in another process
    >>> predictor.names(predictor.recommend(train, exclude=train))
    [['/...', '/...'], ...]

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is something else, of another version, or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            settings = json.loads(archive.read(_SETTINGS))
            if settings["version"] != VERSION:
                raise ValueError(
                    f"predictor of version {settings['version']!r}; this release reads "
                    f"version {VERSION}"
                )
            items = json.loads(archive.read(_ITEMS))
            return Predictor(
                k=settings["k"],
                num_features=settings["num_features"],
                num_items=settings["num_items"],
                items=None if items is None else as_names(items),
                programs={
                    size: export.deserialize(
                        bytearray(archive.read(f"programs/{size}"))
                    )
                    for size in settings["batch_sizes"]
                },
                weights=tuple(
                    _weight(archive, i, dtype)
                    for i, dtype in enumerate(settings["weights"])
                ),
            )
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ValueError(f"{path}: is no predictor, or is damaged: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _weight(archive: zipfile.ZipFile, index: int, dtype: str) -> jax.Array:
    with archive.open(f"weights/{index}.npy") as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read()  # to the end, where the checksum is compared
    return jnp.asarray(array.view(jnp.dtype(dtype)))
