"""Gradients that have only the rows that a batch has touched.

A kernel that `lookup` reads is not differentiated. Each lookup adds a *tap*, a zero
that is never read, to its sums. The tap is differentiated, and its gradient is
the gradient dY of the sums. Afterwards `X^T dY` is formed outside autodiff, over all
lookups of a kernel together, on the touched rows only::

    forward     y_k = X_k stop_gradient(W) + tap_k
    backward    dY_k = d loss / d tap_k
    afterwards  rows of sum_k X_k^T dY_k

A tap does not cover other uses of W. A first, abstract pass over the loss checks
whether there are any, see `_trace`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.extend
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sparsejax.mesh.blocks import LookupRows, ShardedCSR
from sparsejax.mesh.exchange import DividedRows, one_each
from sparsejax.mesh.layout import BY_ROWS, axis_sizes, replicated, reshard_if_explicit
from sparsejax.ops import gather_matmul as gather
from sparsejax.ops import scatter_gradient
from sparsejax.ops.gather_sum import mosaic_is_fastest
from sparsejax.ops.implementations import Implementation
from sparsejax.ops.item_chunks import accumulator
from sparsejax.ops.row_update import takes_rows
from sparsejax.optimizers.row_gradient import RowGradient, RowSums, RowTerms
from sparsejax.sparse import CSR, sums_so_far

Path = tuple[Any, ...]  # the attribute names and indices that lead to a parameter
Dense = Literal["error", "allow"]
# Function that brings all rows of a kernel's stored array up to date.
Settler = Callable[[jax.Array], jax.Array]
# Function that sums rows of a kernel: (x, kernel, implementation) -> [batch, hidden].
Reader = Callable[[LookupRows, jax.Array, Implementation], jax.Array]


class RowParam(nnx.Param):
    """A `[rows, hidden]` parameter of which a step reads few rows, through `lookup`.

    `RowParam(array, rule=adagrad(0.1))` has a rule of its own. Without one, the rule of
    the `Optimizer` trains it.

    >>> isinstance(SparseLinear(5, 3, rngs=nnx.Rngs(0)).kernel, RowParam)
    True
    """

    # A weak reference is needed to free rows in host memory together with the parameter.
    __slots__ = ("__weakref__",)


def lookup(
    kernel: nnx.Variable,
    x: LookupRows,
    *,
    combiner: gather.Combiner = "sum",
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "batch hidden"]:
    """`gather_matmul(x, kernel)`; `value_and_grad` differentiates the touched rows only.

    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0.0]]))
    >>> lookup(SparseLinear(5, 3, rngs=nnx.Rngs(0)).kernel, x).shape
    (2, 3)

    Args:
      kernel: the *Variable*, not its value. Unless it is a `RowParam`, and outside
        `sparsejax.value_and_grad`, this is the plain operation with a dense gradient.
      x: `[batch, features]`.
      combiner: "sum", "mean" or "sqrtn": how the rows of a bag are combined.
      dtype: floating dtype of the result; that of the kernel by default.
      implementation: "mosaic_gpu", "xla", "xla_gpu" or "cusparse", as in
        `gather_matmul`; None picks the fastest here.
    """
    if is_divided(kernel) and isinstance(x, CSR):
        x = ShardedCSR.of(x)
    scope, x = _scope.get(), gather.combined(x, combiner)
    if scope is None or not isinstance(kernel, RowParam):
        w = kernel[...]
        if isinstance(x, ShardedCSR):  # the gradient's type must have this sharding
            w = reshard_if_explicit(w, BY_ROWS)
        return _read(None, x, w, implementation, dtype)
    return scope.read(kernel, x, implementation, dtype)


def rows_of(
    kernel: nnx.Variable | jax.Array, ids: Int[Array, "count"]
) -> Float[Array, "count hidden"]:
    """`kernel[ids]`, by `lookup` if it is a `RowParam`.

    >>> rows_of(RowParam(jnp.ones((2, 3))), jnp.array([1, -1])).tolist()
    [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]

    Args:
      kernel: `[rows, hidden]`, a Variable or an array.
      ids: row numbers; -1 gives zeros and touches no row.
    """
    if not isinstance(kernel, RowParam):
        # Padding ids are out of range, so that they have no gradient.
        ids = jnp.where(ids >= 0, ids, kernel.shape[0])
        return kernel[...].at[ids].get(mode="fill", fill_value=0)
    count = len(ids)
    if is_divided(kernel):  # the ids are divided over the axis "data"
        # Gathered once here: otherwise XLA gathers each array computed from the ids.
        ids = replicated(ids)
        ids = jnp.pad(ids, (0, -count % axis_sizes()[0]), constant_values=-1)
    used = ids >= 0
    ends = sums_so_far(used)
    places = jnp.where(used, ends - 1, len(ids) + jnp.arange(len(ids)))
    packed = jnp.zeros_like(ids).at[places].set(ids, mode="drop", unique_indices=True)
    indptr = jnp.append(jnp.int32(0), ends)
    return lookup(kernel, CSR(None, packed, indptr, num_cols=kernel.shape[0]))[:count]


def rows_of_parts(
    kernel: nnx.Variable,
    ids: Int[Array, "count"],
    *,
    distinct: int,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "count hidden"]:
    """`rows_of` on a mesh on which each device has its own ids.

    A device receives each row once, and adds up the gradients of a row before it sends them.

    Args:
      kernel: a `RowParam` whose rows are divided over "model".
      ids: row numbers, divided evenly over all devices; -1 gives zeros and touches no row.
      distinct: the most distinct rows that a device reads.
      wire_dtype: dtype in which rows and gradients are sent; None is the kernel's.
    """
    rows = one_each(ids, kernel.shape[0], distinct=distinct, wire_dtype=wire_dtype)
    return lookup(kernel, rows)


def whole(kernel: nnx.Variable) -> Float[Array, "rows *hidden"]:
    """All rows of a kernel; while `Optimizer.reading` is open, up to date.

    >>> whole(RowParam(jnp.ones((5, 3)))).shape
    (5, 3)
    """
    scope = _scope.get()
    if isinstance(scope, _Reading) and isinstance(kernel, RowParam):
        return scope.whole(kernel)
    return kernel[...]


def value_and_grad(
    f: Callable[..., Any],
    *,
    wrt: nnx.filterlib.Filter = nnx.Param,
    has_aux: bool = False,
    dense: Dense = "error",
) -> Callable[..., Any]:
    """`nnx.value_and_grad` with a `RowGradient` for each `RowParam`.

    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0.0]]))
    >>> layer = SparseLinear(5, 3, rngs=nnx.Rngs(0))
    >>> loss, grads = value_and_grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)
    >>> grads["kernel"][...].ids
    Array([1, 3], dtype=int32)

    No gradient with a kernel's full size is made. `f` is traced twice, the first time
    only for its shapes, so side effects in Python (such as `print`) happen twice.

    Args:
      f: function that is called as `f(model, ...)`, and returns a scalar.
      wrt: which Variables to differentiate.
      has_aux: whether `f` returns `(loss, aux)`.
      dense: how to treat a `RowParam` that the loss also reads elsewhere, not through
        `lookup`: "error" raises, "allow" gives it a dense gradient.

    Returns:
      A function of the arguments of `f` that returns `(loss, grads)`, or
      `((loss, aux), grads)`. `grads` is a State in which the leaf of each `RowParam` is
      a `RowGradient`. Its capacity is 0 if the loss did not read the kernel.

    Raises:
      ValueError: when called: a `RowParam` is read elsewhere, or its lookup is inside
        `jit`, `scan`, `vmap` or `remat` within the loss.
    """
    return value_and_grad_with(None, f, wrt=wrt, has_aux=has_aux, dense=dense)


def grad(
    f: Callable[..., Any],
    *,
    wrt: nnx.filterlib.Filter = nnx.Param,
    has_aux: bool = False,
    dense: Dense = "error",
) -> Callable[..., Any]:
    """`value_and_grad` without the value: returns `grads`, or `(grads, aux)`.

    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0.0]]))
    >>> layer = SparseLinear(5, 3, rngs=nnx.Rngs(0))
    >>> grad(lambda layer: jnp.sum(layer(x)))(layer)["kernel"][...].ids.tolist()
    [1, 3]
    """
    both = value_and_grad(f, wrt=wrt, has_aux=has_aux, dense=dense)

    @functools.wraps(both)
    def wrapped(*args, **kwargs):
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


class UpdatePlan(NamedTuple):
    """How an optimizer reads and differentiates the kernels of a model.

    Attributes:
      readers: functions that read rows of kernels. A kernel without a reader is read
        without changes.
      whole: kernels that get a dense gradient.
    """

    readers: Mapping[Path, Reader]
    whole: frozenset[Path]


# Function that plans the update of a model. Its arguments are the model, the kernels that are also
# read outside lookups, and the capacity of each kernel's RowGradient.
Planner = Callable[[Any, AbstractSet[Path], Mapping[Path, int]], UpdatePlan]


def value_and_grad_with(
    planner: Planner | None,
    f: Callable[..., Any],
    *,
    wrt: nnx.filterlib.Filter,
    has_aux: bool,
    dense: Dense,
) -> Callable[..., Any]:
    """`value_and_grad` with rows that are read as an optimizer's plan says."""
    if dense not in ("error", "allow"):
        raise ValueError(f'dense is "error" or "allow", got {dense!r}')

    @functools.wraps(f)
    def wrapped(model, *args, **kwargs):
        if not isinstance(model, nnx.Pytree) or isinstance(model, nnx.Variable):
            raise TypeError(
                f"the first argument must be a module, not a {type(model).__name__}; "
                "several can be in an nnx.List or an nnx.Dict"
            )
        kernels = row_params(model, wrt)
        calls, elsewhere = _trace(f, kernels, has_aux, model, args, kwargs)
        if elsewhere and dense == "error":
            path = min(elsewhere, key=str)
            _raise_dense(path, kernels[path])
        capacities = dict.fromkeys(kernels, 0)
        for call in calls:
            capacities[call.path] += call.nse
        plan = UpdatePlan({}, frozenset())
        if planner is not None:
            plan = planner(model, elsewhere, capacities)
        taps = [jnp.zeros(call.shape, call.dtype) for call in calls]

        def run(model, taps, args, kwargs):
            inner = row_params(model, wrt)
            with _recording(inner, (model, args, kwargs)) as recorder:
                recorder.taps, recorder.readers = taps, plan.readers
                recorder.dense, recorder.expected = elsewhere, calls
                out = f(model, *args, **kwargs)
            if recorder.calls != calls:
                raise RuntimeError(
                    "the loss made other lookups than when it was first traced: "
                    f"{recorder.calls}, expected {calls}"
                )
            loss, aux = out if has_aux else (out, None)
            return loss, (aux, recorder.inputs)

        def differentiated(path, variable):
            return tuple(path) not in kernels or tuple(path) in elsewhere

        argnums = (nnx.DiffState(0, nnx.All(wrt, differentiated)), 1)
        transformed = nnx.value_and_grad(run, argnums=argnums, has_aux=True)
        (loss, (aux, inputs)), (grads, slopes) = transformed(model, taps, args, kwargs)
        flat = dict(nnx.to_flat_state(grads))
        for path, kernel in kernels.items():
            mine = [i for i, call in enumerate(calls) if call.path == path]
            xs, dys = [inputs[i] for i in mine], [slopes[i] for i in mine]
            if path in elsewhere or path in plan.whole:
                value = _dense_gradient(xs, dys, kernel)
            else:
                value = _row_gradient(xs, dys, kernel, planner is not None)
            if path in elsewhere:
                value += flat[path][...]
            flat[path] = type(kernel).from_metadata(value, kernel.get_metadata())
        return ((loss, aux) if has_aux else loss), nnx.from_flat_state(flat)

    return wrapped


def row_params(
    model: Any, wrt: nnx.filterlib.Filter = nnx.Param
) -> dict[Path, RowParam]:
    """The row parameters of a model that `wrt` selects, by their paths."""
    selected = nnx.filterlib.to_predicate(wrt)
    return {
        tuple(path): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, RowParam) and selected(path, node)
    }


def is_divided(kernel: nnx.Variable) -> bool:
    """Whether the rows of a kernel are divided over the mesh axis "model".

    A kernel that a `SparseOutput` shares may be divided over "data" too.
    """
    axes, *_ = kernel.get_metadata().get("out_sharding") or (None,)
    return "model" in (axes or ())


def is_differentiating() -> bool:
    """Whether the loss of `value_and_grad` is being traced."""
    return isinstance(_scope.get(), _Recorder)


def is_read_once(kernel: nnx.Variable) -> bool:
    """Whether a loss of `value_and_grad` is being traced in which one lookup reads the kernel.

    It is false in the pass that finds the lookups. Gradients of several lookups are sorted
    together.
    """
    scope = _scope.get()
    return isinstance(scope, _Recorder) and scope.read_once(kernel)


@contextlib.contextmanager
def reading(
    model: Any,
    readers: Mapping[Path, Reader],
    settlers: Mapping[Path, Settler] | None = None,
) -> Iterator[None]:
    """While this context is open, `lookup` reads the kernels of `model` through `readers`.

    Args:
      model: the model.
      readers: functions that read rows of some kernels. Other kernels are read without changes.
      settlers: functions that `whole` applies to some kernels.
    """
    kernels, wholes = row_params(model, ...), settlers or {}
    scope = _Reading(
        {id(v): readers.get(path) for path, v in kernels.items()},
        {id(v): wholes[path] for path, v in kernels.items() if path in wholes},
    )
    token = _scope.set(scope)
    try:
        with _mode("reading"):
            yield
    finally:
        _scope.reset(token)


def _row_gradient(xs, dys, kernel: RowParam, current: bool) -> RowGradient:
    num_rows, hidden = kernel.shape
    nse = sum(x.nse for x in xs)
    if nse == 0:
        ids = jnp.zeros(0, jnp.int32)
        values = jnp.zeros((0, hidden), accumulator(kernel.dtype))
    elif takes_rows(hidden) and mosaic_is_fastest(
        dys[0], nse, divided=is_divided(kernel)
    ):
        return RowTerms(scatter_gradient.row_terms(xs, dys, num_rows), current)
    else:
        ids, values = scatter_gradient.row_gradient(xs, dys, num_rows)
    divided = any(
        isinstance(x, ShardedCSR)
        or (isinstance(x, DividedRows) and x.route is not None)
        for x in xs
    )
    return RowSums(ids, values, num_rows, current, divided)


def _dense_gradient(xs, dys, kernel: RowParam) -> jax.Array:
    if not xs:
        return jnp.zeros_like(kernel[...])
    parts = [
        scatter_gradient.dense_gradient(x, dy, kernel.shape[0])
        for x, dy in zip(xs, dys, strict=True)
    ]
    return functools.reduce(operator.add, parts).astype(kernel.dtype)


def _read(
    reader: Reader | None,
    x: LookupRows,
    w: jax.Array,
    implementation: Implementation,
    dtype: jax.typing.DTypeLike | None,
) -> jax.Array:
    """Sums rows of a kernel, by the reader if there is one."""
    if reader is None:
        return gather.gather_matmul(x, w, dtype=dtype, implementation=implementation)
    y = reader(x, w, implementation)
    return y if dtype is None else y.astype(dtype)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A lookup: its kernel, and the shape and dtype of its result."""

    path: Path
    nse: int
    shape: tuple[int, ...]
    dtype: jnp.dtype


class _Recorder:
    """Records the calls of `lookup` inside the loss of `value_and_grad`."""

    def __init__(self, kernels: Mapping[Path, RowParam], arguments: Any):
        self.trace = _trace_state()
        self.paths = {id(kernel): path for path, kernel in kernels.items()}
        self.known = {id(v) for v in row_params(arguments, ...).values()}
        self.calls: list[_Call] = []
        self.inputs: list[LookupRows] = []
        # None in the first pass, which is abstract.
        self.taps: Sequence[jax.Array] | None = None
        self.readers: Mapping[Path, Reader] = {}
        self.dense: AbstractSet[Path] = frozenset()
        # The calls that the first pass has found, in order.
        self.expected: Sequence[_Call] = ()

    def read_once(self, kernel) -> bool:
        path = self.paths.get(id(kernel))
        return sum(call.path == path for call in self.expected) == 1

    def read(self, kernel, x, implementation, dtype):
        w, path = kernel[...], self.paths.get(id(kernel))
        if path is None:
            if self.readers and id(kernel) not in self.known:
                _raise_unknown("the loss")
            return _read(None, x, w, implementation, dtype)
        outermost = _trace_state() == self.trace
        abstract = self.taps is None
        if not outermost and (abstract or path in self.dense):
            # This reads the kernel in the ordinary way, which `_trace` then detects.
            return _read(None, x, w, implementation, dtype)
        stop = abstract or path in self.dense
        w = jax.lax.stop_gradient(w) if stop else _not_differentiable(w)
        y = _read(self.readers.get(path), x, w, implementation, dtype)
        if not outermost:
            return y
        self.calls.append(_Call(path, x.nse, y.shape, y.dtype))
        self.inputs.append(x)
        if self.taps is None:
            return y
        if len(self.calls) > len(self.taps):
            raise RuntimeError("the loss made more lookups than when first traced")
        tap = self.taps[len(self.calls) - 1]
        return _attach(y, reshard_if_explicit(tap, jax.typeof(y).sharding.spec))


class _Reading:
    """How `lookup` and `whole` read kernels while the context `reading` is open."""

    def __init__(
        self, readers: Mapping[int, Reader | None], settlers: Mapping[int, Settler]
    ):
        self.readers, self.settlers = readers, settlers

    def read(self, kernel, x, implementation, dtype):
        if id(kernel) not in self.readers:
            _raise_unknown("`reading`")
        return _read(self.readers[id(kernel)], x, kernel[...], implementation, dtype)

    def whole(self, kernel):
        if id(kernel) not in self.readers:
            _raise_unknown("`reading`")
        settle = self.settlers.get(id(kernel))
        return kernel[...] if settle is None else settle(kernel[...])


# Each thread and each asyncio task has its own scope.
_scope: contextvars.ContextVar[_Recorder | _Reading | None] = contextvars.ContextVar(
    "sparsejax_lookup", default=None
)
# The scope is part of the key of every jit cache: an inner jit must not reuse a program
# that was traced in another scope.
_mode = jax.make_user_context(None)


@contextlib.contextmanager
def _recording(kernels, arguments) -> Iterator[_Recorder]:
    recorder = _Recorder(kernels, arguments)
    token = _scope.set(recorder)
    try:
        with _mode("gradients"):
            yield recorder
    finally:
        _scope.reset(token)


def _trace_state():
    return jax.extend.core.get_opaque_trace_state(convention="nnx")


def _trace(f, kernels, has_aux, model, args, kwargs) -> tuple[list[_Call], set[Path]]:
    """Traces the loss abstractly; finds its lookups, and kernels that it also reads elsewhere.

    Each kernel passes through a custom_vjp identity, whose backward rule JAX runs (while
    tracing) only if the cotangent is not a symbolic zero: if some use of the kernel
    other than a lookup has a gradient. The loss is differentiated in a scalar, not in
    the kernel, so that no zeros of the kernel's size are made. Nothing is computed, and
    changes that the loss makes to the model's state affect a copy.
    """
    if not kernels:
        return [], set()
    graphdef, state = nnx.split((model, args, kwargs))
    calls: list[_Call] = []
    elsewhere: set[Path] = set()

    def abstract(probes, state):
        model, args, kwargs = nnx.merge(graphdef, state, copy=True)
        copies = row_params(model, ...)
        copies = {path: copies[path] for path in kernels}
        for (path, kernel), probe in zip(copies.items(), probes, strict=True):
            kernel.set_value(_guard(path, elsewhere)(kernel[...], probe))
        with _recording(copies, (model, args, kwargs)) as recorder:
            out = f(model, *args, **kwargs)
        calls.extend(recorder.calls)
        return out[0] if has_aux else out

    probes = [jnp.zeros(()) for _ in kernels]
    jax.eval_shape(jax.grad(abstract), probes, state)
    return calls, elsewhere


def _guard(path: Path, elsewhere: set[Path]):
    @jax.custom_vjp
    def guard(w, probe):
        return w

    def backward(_, cotangent):
        elsewhere.add(path)
        return None, None

    guard.defvjp(lambda w, probe: (w, None), backward)
    return guard


@jax.custom_vjp
def _attach(y, tap):
    """Returns `y + tap`. The tap is zero and never read, so XLA removes the addition."""
    return y


_attach.defvjp(lambda y, tap: (y, None), lambda _, dy: (dy, dy))


@jax.custom_vjp
def _not_differentiable(w):
    """Returns `w`. Raises an error if it is differentiated, because its derivative would be
    wrong.
    """
    return w


def _refuse(_, cotangent) -> NoReturn:
    raise NotImplementedError(
        "derivatives of a row gradient: sparsejax.value_and_grad cannot be "
        "differentiated; use nnx.value_and_grad inside"
    )


_not_differentiable.defvjp(lambda w: (w, None), _refuse)


def _raise_dense(path: Path, kernel: RowParam) -> NoReturn:
    num_rows, hidden = kernel.shape
    size = num_rows * hidden * kernel.dtype.itemsize
    raise ValueError(
        f"kernel '{'.'.join(map(str, path))}' ({num_rows:,} x {hidden:,}) is also read "
        "outside lookups (SparseLinear), or its lookup is inside jit, scan, vmap or "
        f"remat within the loss, so its gradient is dense ({size / 1e6:,.1f} MB); move "
        'the lookup out, pass dense="allow", or make it an nnx.Param'
    )


def _raise_unknown(where: str) -> NoReturn:
    raise ValueError(
        f"a lookup within {where} reads a RowParam that is not the model's, so its rows "
        "may be out of date: it is a copy (nnx.clone), inside nnx.jit, nnx.scan or "
        "nnx.remat, or of another model; move the lookup out, or pass that model as an "
        "argument of the loss"
    )
