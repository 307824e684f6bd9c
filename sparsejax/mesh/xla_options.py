"""Options of XLA for single programs; flags in the environment are for whole processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from sparsejax.mesh.kept_programs import Keepable
from sparsejax.mesh.layout import is_for_one_device

# XLA then times no programs to choose one, and has no operation whose result depends on
# the order in which threads end. A CPU ignores it.
# A scatter then tells updates apart by one number, that of their place in the flat array. The
# place after a row's last one has the number of the next row's first, whose update is lost
# (jax 0.11.2). So what a scatter shall drop is outside the first axis, or of a flat array.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}

# Matrix products come from cuBLAS. Otherwise XLA compiles dozens of Triton programs for each
# product, to time them: 7 of the 10 seconds that it took for a training program.
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}

# Fusions are compiled in one way. Otherwise XLA compiles many of them in a second way, too,
# to time both: a fifth of the time that it took for the programs of a command. See `is_timed`.
WITHOUT_TIMED_FUSIONS = {"xla_gpu_experimental_enable_fusion_autotuner": False}

# Operations that XLA puts into CUDA graphs by default, and loops. A list replaces
# the default one.
LOOPS_IN_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}

# For programs that run while a profile is recorded. XLA then runs the operations of a CUDA
# graph one by one. If a program did both, steps with momentum or Adam gave wrong numbers and
# then CUDA_ERROR_LAUNCH_FAILED (jax 0.11.2, also without the profiler's library for GPUs).
# A program without graphs and one that has them and is never profiled are both right. XLA's
# default graphs do it, too: so all programs of a training are `Programs`.
WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}

# Arrays cross between devices from when they are there until they are needed, several at a
# time. By default XLA takes an exchange of rows for as quick as a launch.
OVERLAPPED = {
    "xla_gpu_enable_approx_costly_collectives": True,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}

# The devices of a process copy rows to each other. Otherwise NCCL's programs do, which take
# processors from the layers meanwhile.
COPIED = {"xla_gpu_use_memcpy_local_p2p": True}

# Programs traced within it are found again only within it, also those of `jax.jit`.
_same_bits = jax.make_user_context(default_value=False)


def same_bits_are_wanted() -> bool:
    """Whether the program that is traced now must give the same bits in each run.

    XLA's option does not reach the operations of other libraries.
    """
    return _same_bits.value


def is_profiled() -> bool:
    """Whether GPUs are being profiled: by `jax.profiler`, or by a client of its server."""
    if jax.default_backend() != "gpu":
        return False
    if jax.profiler.TraceAnnotation.is_enabled():
        return True
    # A session that does not trace the host. JAX's own names, which may change.
    state = getattr(getattr(jax, "_src", None), "profiler", None)
    state = getattr(state, "_profile_state", None)
    names = "session", "profile_session"
    return any(getattr(state, name, None) is not None for name in names)


def is_timed(modules: Iterable[object]) -> bool:
    """Whether XLA shall time fusions of a training step of these modules: of click models.

    A step of theirs is many short fusions. With 4,096 examples they are 4 % faster then, and
    steps of other models are not (benchmarks/notes/first_result.md).
    """
    return any(getattr(module, "short_fusions", False) for module in modules)


def gpu_options(
    *, loops_in_graphs: bool = False, timed_fusions: bool = False
) -> Mapping[str, Any]:
    """Options for a program's compiler, as far as XLA takes them; none without a GPU.

    They depend on whether a mesh of several devices is set, see `is_for_one_device`, and on
    whether a profile is being recorded.

    Args:
      loops_in_graphs: whether each loop shall be one CUDA graph, without the host. Left out on
        a mesh of several devices: such graphs were not tried with their collectives.
      timed_fusions: fusions are compiled in two ways, to time them. Left out on a mesh of
        several devices, where it was not tried.
    """
    return _gpu_options(
        is_for_one_device(), is_profiled(), loops_in_graphs, timed_fusions
    )


@functools.cache
def _gpu_options(
    one_device: bool, profiled: bool, loops_in_graphs: bool, timed_fusions: bool
) -> Mapping[str, Any]:
    if jax.default_backend() != "gpu":
        return {}
    choices: list[dict[str, Any]] = [WITHOUT_TRITON]
    if not (timed_fusions and one_device):
        choices.append(WITHOUT_TIMED_FUSIONS)
    if not one_device:
        choices += [OVERLAPPED, COPIED]
    if profiled:
        choices.append(WITHOUT_GRAPHS)
    elif loops_in_graphs and one_device:
        choices.append(LOOPS_IN_GRAPHS)
    # XLA's options are no stable interface. All are asked for at once, so that a process
    # compiles one program for it.
    known = (
        WITHOUT_TRITON | WITHOUT_TIMED_FUSIONS | LOOPS_IN_GRAPHS | OVERLAPPED | COPIED
    )
    if not _are_taken(*known.items()):
        choices = [each for each in choices if _are_taken(*each.items())]
    return {name: value for each in choices for name, value in each.items()}


@functools.cache
def _are_taken(*options: tuple[str, Any]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


class Programs:
    """`Keepable(f, ...)` in two forms: `programs[deterministic]`.

    The options of a form are those for the mesh that is set when it is asked for, and for a
    profile that is being recorded then: ask before each call.

    A deterministic program gives the same bits in every process on the same kind of GPU.
    It cannot be called inside another program: that one's options hold for both.

    Args:
      f: the function.
      inside_others: the other form may be called inside other programs. There it has the
        options of the outer program.
      loops_in_graphs: whether each loop becomes one CUDA graph, without the host.
      timed_fusions: whether fusions are compiled in two ways, to time them; never in
        the deterministic form.
      options: further options of `jax.jit`.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        *,
        inside_others: bool = False,
        loops_in_graphs: bool = False,
        timed_fusions: bool = False,
        **options: Any,
    ):
        self._made: dict[tuple[Any, ...], Keepable] = {}
        self._f = f
        self._inside_others = inside_others
        self._for_gpus = {
            "loops_in_graphs": loops_in_graphs,
            "timed_fusions": timed_fusions,
        }
        self._options = options

    @functools.cached_property
    def timed(self) -> Programs:
        """The same programs, with timed fusions."""
        how = {**self._for_gpus, "timed_fusions": True}
        return Programs(
            self._f, inside_others=self._inside_others, **how, **self._options
        )

    def __getitem__(self, deterministic: bool) -> Keepable:
        # Made when it is first asked for: the options ask for the kind of device.
        how = dict(self._for_gpus)
        if deterministic:  # times differ from one process to the next
            how["timed_fusions"] = False
        chosen = gpu_options(**how)
        key = deterministic, *chosen.items()
        if key not in self._made:
            self._made[key] = self._make(deterministic, chosen)
        return self._made[key]

    def _make(self, deterministic: bool, chosen: Mapping[str, Any]) -> Keepable:
        f = self._f
        if deterministic:
            f = _with_same_bits(f)
            chosen = {**chosen, **DETERMINISTIC}
        return Keepable(
            f,
            inside_others=self._inside_others and not deterministic,
            compiler_options=dict(chosen) or None,
            **self._options,
        )


def _with_same_bits(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def same(*arguments, **named):
        with _same_bits(True):
            return f(*arguments, **named)

    return same
