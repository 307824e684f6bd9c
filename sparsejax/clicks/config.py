"""Configurations of click models: frozen dataclasses, stored as versioned JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args

from sparsejax import codec
from sparsejax.codec import ModelConfig
from sparsejax.embeddings.config import Admit, DynamicTableConfig, Evict, Initializer
from sparsejax.embeddings.row_numbers import RowNumber
from sparsejax.ops.gather_matmul import Combiner

Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTables:
    """The dynamic tables of a click model: of features whose ids have 64 bits.

    >>> DLRMConfig(dynamic=DynamicTables(num_rows=50_000_000, admit=Admit(count=2))).to_json()
    {'version': 1, 'model': 'dlrm', 'dynamic': {'num_rows': 50000000, 'evict': 'lru', ...}}

    Attributes:
      num_rows: rows of each table, see `DynamicTableConfig` for this and the others. A
        configuration is written to JSON, which cannot have a class: `evict` is no `RowNumber`.
    """

    num_rows: int
    evict: Evict | None = "lru"
    time_to_live: int | None = None
    admit: Admit | None = None
    host_rows: int | None = None
    host_path: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.evict, RowNumber):
            raise TypeError(
                'evict of DynamicTables is "lru", "lfu" or None, which JSON can have, got '
                f"{self.evict!r}: take a DynamicTableConfig in a model of your own"
            )
        self.table(1)

    def table(self, dim: int, init: Initializer | None = None) -> DynamicTableConfig:
        """Makes the configuration of a dynamic table of width `dim`."""
        return DynamicTableConfig(dim=dim, init=init, **vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """The sharing of a click model's last layers by its labels; subclasses add settings.

    Attributes:
      tower: sizes of the layers that each label has alone; a last one of size 1 follows.
    """

    tower: tuple[int, ...] = (32,)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_sizes(f"sharing: {field.name}", getattr(self, field.name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedBottom(Sharing):
    """One stack of layers for all labels, and a tower for each (Caruana 1997).

    ::

        logit_k = tower_k(layers(x))

    The layers are those of the model's configuration, such as `hidden`, without their last one
    of size 1.

    >>> DLRMConfig(sharing=SharedBottom(tower=(16,))).to_json()
    {'version': 1, 'model': 'dlrm', 'sharing': {'kind': 'shared_bottom', 'tower': [16]}}
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class MMoE(Sharing):
    """Experts that all labels share, mixed by a gate of each label (Ma et al. 2018).

    ::

        g_k = softmax(W_k x + b_k)
        logit_k = tower_k(sum over e of g_ke expert_e(x))

    An expert has the layers of the model's configuration, such as `hidden`, without their last
    one of size 1.

    >>> DCNConfig(sharing=MMoE(experts=8)).to_json()
    {'version': 1, 'model': 'dcn', 'sharing': {'kind': 'mmoe', 'experts': 8}}

    Attributes:
      experts: number of experts.
    """

    experts: int = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PLE(Sharing):
    """Experts of each label beside shared ones, in levels (Tang et al. 2020).

    ::

        g_k = softmax(W_k x_k + b_k)          over the experts of label k and the shared ones
        y_k = sum over these e of g_ke expert_e
        y_s = a like sum over all experts, by a gate that reads x_s
        logit_k = tower_k(y_k of the last level)

    All `x_k` and `x_s` are the inputs at the first level, and `y_k` and `y_s` of the level
    before at the others. Experts of label k read `x_k`, and shared ones `x_s`. An expert has the
    layers of the model's configuration, such as `hidden`, without their last one of size 1.

    >>> WideDeepConfig(sharing=PLE(levels=2)).to_json()
    {'version': 1, 'model': 'wide_deep', 'sharing': {'kind': 'ple', 'levels': 2}}

    Attributes:
      experts: number of experts that each label has alone.
      shared: number of shared experts.
      levels: number of levels.
    """

    experts: int = 2
    shared: int = 2
    levels: int = 1


_SHARING: Mapping[str, type[Sharing]] = {
    "shared_bottom": SharedBottom,
    "mmoe": MMoE,
    "ple": PLE,
}


def _check_sizes(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless the value is a sequence of positive integers."""
    sizes = value if isinstance(value, tuple) else (value,)
    if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        raise TypeError(f"{name} must be of integers, got {value!r}")
    if any(not 1 <= size < 2**31 for size in sizes):
        raise ValueError(f"{name} must be positive, below 2^31, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickModelConfig(ModelConfig):
    """Settings of all click models. Subclasses such as `DLRMConfig` add further settings.

    >>> ClickModelConfig.from_json({"version": 1, "model": "wide_deep", "hidden": [64]})
    WideDeepConfig(dim=16, combiner='sum', dtype='float32', dynamic=None, regression=False, sharing=None, hidden=(64,))

    Attributes:
      dim: numbers in a row of each table.
      combiner: "sum", "mean" or "sqrtn", of features with several ids.
      dtype: "float32" or "bfloat16", in which layers compute. Parameters and scores are
        float32.
      dynamic: the tables of features with ids of 64 bits.
      regression: whether a logistic regression of the ids and the dense columns is fitted
        before training. Its logit is added to that of the layers, and training leaves it as
        it is. In place of one that is trained, for models that have a linear part.
      sharing: how several labels share the last layers; None is `SharedBottom()`. In JSON it
        has a "kind": "shared_bottom", "mmoe" or "ple".
    """

    kind: ClassVar[str] = "clicks"

    dim: int = 16
    combiner: Combiner = "sum"
    dtype: Dtype = "float32"
    dynamic: DynamicTables | None = None
    regression: bool = False
    sharing: Sharing | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check(field.name, getattr(self, field.name))

    def _check(self, name: str, value: Any) -> None:
        if name in ("combiner", "dtype"):
            known = get_args(Combiner if name == "combiner" else Dtype)
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, got {value!r}")
            return
        if name == "regression":
            if not isinstance(value, bool):
                raise TypeError(f"regression must be true or false, got {value!r}")
            if value and self.dynamic is not None:
                raise ValueError(
                    "regression=True is fitted before training, when dynamic tables have no "
                    "ids yet: leave out regression or dynamic"
                )
            return
        if value is None and name in ("rank", "dynamic", "sharing"):
            return
        if name == "sharing":
            if type(value) not in _SHARING.values():
                raise TypeError(
                    f"sharing must be SharedBottom, MMoE or PLE, got {value!r}"
                )
            return
        if name == "dynamic":
            if not isinstance(value, DynamicTables):
                raise TypeError(f"dynamic must be DynamicTables, got {value!r}")
            return
        _check_sizes(name, value)

    def to_json(self) -> dict[str, Any]:
        """The configuration as a JSON object; defaults are left out."""
        found = super().to_json()
        if self.sharing is not None:
            kinds = {kind: name for name, kind in _SHARING.items()}
            values = codec.document(self.sharing, skip_defaults=True)
            found["sharing"] = {"kind": kinds[type(self.sharing)], **values}
        return found

    @classmethod
    def from_json(cls, document: codec.Json) -> Self:
        """Makes a configuration from a JSON object.

        "model" chooses the class.

        Raises:
          ValueError: not an object, an unknown version, model or key, or a wrong value.
        """
        if isinstance(document, Mapping) and document.get("sharing") is not None:
            given, label = document["sharing"], 'the model: "sharing"'
            sharing = codec.read_tagged(_SHARING, "kind", given, label)
            document = {**document, "sharing": sharing}
        return super().from_json(document)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLRMConfig(ClickModelConfig):
    """Layers of a `DLRM`.

    >>> DLRMConfig(dim=32, bottom=(32,)).to_json()
    {'version': 1, 'model': 'dlrm', 'dim': 32, 'bottom': [32]}

    Attributes:
      bottom: sizes of the layers that dense columns go through; a last one of size `dim`
        follows.
      top: sizes of the layers behind the dot products; a last one of size 1 follows.
    """

    model = "dlrm"
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DCNConfig(ClickModelConfig):
    """Layers of a `DCN`.

    >>> DCNConfig(cross=2, rank=64).to_json()
    {'version': 1, 'model': 'dcn', 'cross': 2, 'rank': 64}

    Attributes:
      cross: number of cross layers.
      rank: rank of the matrix in a cross layer; None stands for a full matrix.
      hidden: sizes of the layers that follow the cross layers; a last layer of size 1 follows
        them.
    """

    model = "dcn"
    cross: int = 3
    rank: int | None = None
    hidden: tuple[int, ...] = (64, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepFMConfig(ClickModelConfig):
    """Layers of a `DeepFM`.

    >>> DeepFMConfig(hidden=(32,)).to_json()
    {'version': 1, 'model': 'deepfm', 'hidden': [32]}

    Attributes:
      hidden: sizes of the layers of the deep part; a last one of size 1 follows.
    """

    model = "deepfm"
    hidden: tuple[int, ...] = (64, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideDeepConfig(ClickModelConfig):
    """Layers of a `WideDeep`.

    >>> WideDeepConfig(dtype="bfloat16").to_json()
    {'version': 1, 'model': 'wide_deep', 'dtype': 'bfloat16'}

    Attributes:
      hidden: sizes of the layers of the deep part; a last one of size 1 follows.
    """

    model = "wide_deep"
    hidden: tuple[int, ...] = (64, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DINConfig(ClickModelConfig):
    """Layers of a `DIN`.

    >>> DINConfig(length=100).to_json()
    {'version': 1, 'model': 'din', 'length': 100}

    Attributes:
      length: number of ids that are read from the end of each history.
      attention: sizes of the layers that weigh an id of a history; a last one of size 1
        follows.
      hidden: sizes of the layers behind the histories' sums; a last one of size 1 follows.
    """

    model = "din"
    length: int = 50
    attention: tuple[int, ...] = (80, 40)
    hidden: tuple[int, ...] = (64, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TINConfig(ClickModelConfig):
    """Layers of a `TIN`.

    >>> TINConfig(beside=(("bought", "days_since"),)).to_json()
    {'version': 1, 'model': 'tin', 'beside': [['bought', 'days_since']]}

    Attributes:
      length: number of ids that are read from the end of each history.
      beside: pairs of a history and a column of lists that are as long as its own. A place of
        the history has the vectors of both.
      hidden: sizes of the layers behind the histories' sums; a last one of size 1 follows.
    """

    model = "tin"
    length: int = 50
    beside: tuple[tuple[str, str], ...] = ()
    hidden: tuple[int, ...] = (64, 32)

    def _check(self, name: str, value: Any) -> None:
        if name != "beside":
            super()._check(name, value)
        elif [[type(each) for each in pair] for pair in value] != [[str] * 2] * len(
            value
        ):
            raise TypeError(
                f"beside must be pairs of a history and a column, got {value!r}"
            )
