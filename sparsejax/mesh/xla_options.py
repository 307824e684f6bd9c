"""XLA options for single programs. (Flags in the environment apply to whole processes.)"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from sparsejax.mesh.kept_programs import Keepable
from sparsejax.mesh.layout import is_for_one_device

# With this option XLA chooses programs without timing them, and uses no operation whose result
# depends on the order in which threads end. CPUs ignore the option. A scatter then identifies an
# update by its index in the flat array. The index after a row's last element is also that of the
# next row's first element, whose update is lost (jax 0.11.2). So an update to be dropped must have
# an index outside the first axis, or the array must be flat.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}

# With this option matrix products are computed by cuBLAS. Otherwise XLA compiles dozens of Triton
# programs for each product, to time them: 7 of the 10 s in which a training program compiled.
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}

# With this option fusions are compiled in one way. Otherwise XLA compiles many of them in two
# ways, to time both: a fifth of the compilation time of a command's programs. See `is_timed`.
WITHOUT_TIMED_FUSIONS = {"xla_gpu_experimental_enable_fusion_autotuner": False}

# Operations that XLA puts into CUDA graphs: its defaults, and loops. A list replaces the defaults,
# so they are repeated here.
LOOPS_IN_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}

# Without CUDA graphs. This is for programs that run while a profile is recorded: XLA then runs the
# operations of a CUDA graph one by one. If a program ran both with its graph and one by one, steps
# with momentum or Adam gave wrong numbers and then CUDA_ERROR_LAUNCH_FAILED (jax 0.11.2, also
# without the profiler's GPU library). A program without graphs is right, and so is one with graphs
# that is never profiled. XLA's default graphs have this fault, too: so all programs of a training
# are `Programs`.
WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}

# With these options an exchange between devices starts when its operands are ready, ends when
# its result is needed, and overlaps others. By default XLA assumes that an exchange takes no
# longer than a launch.
OVERLAPPED = {
    "xla_gpu_enable_approx_costly_collectives": True,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}

# With this option the devices of a process copy rows to each other. Otherwise NCCL's programs do,
# which occupy multiprocessors that the layers need.
COPIED = {"xla_gpu_use_memcpy_local_p2p": True}

# Whether programs must have equal bits in each run. As a part of JAX's context, it is a key of the
# caches of traced and compiled programs.
_same_bits = jax.make_user_context(default_value=False)


def same_bits_are_wanted() -> bool:
    """Whether the program that is traced now must give equal bits in each run.

    XLA's option does not apply to the operations of other libraries.
    """
    return _same_bits.value


def is_profiled() -> bool:
    """Whether GPUs are being profiled: by `jax.profiler`, or by a client of its server."""
    if jax.default_backend() != "gpu":
        return False
    if jax.profiler.TraceAnnotation.is_enabled():
        return True
    # The check above misses a session that does not trace the host. These names are private to JAX
    # and may change.
    state = getattr(getattr(jax, "_src", None), "profiler", None)
    state = getattr(state, "_profile_state", None)
    names = "session", "profile_session"
    return any(getattr(state, name, None) is not None for name in names)


def is_timed(modules: Iterable[object]) -> bool:
    """Whether XLA should time fusions for a training step of these modules: for click models.

    Their steps have many short fusions. With 4,096 examples they become 4 % faster; the
    steps of other models do not (benchmarks/notes/first_result.md).
    """
    return any(getattr(module, "short_fusions", False) for module in modules)


def gpu_options(
    *, loops_in_graphs: bool = False, timed_fusions: bool = False
) -> Mapping[str, Any]:
    """The compiler options for a program that this XLA supports; empty without a GPU.

    They depend on whether a mesh of several devices is set, see `is_for_one_device`, and on
    whether a profile is being recorded.

    Args:
      loops_in_graphs: whether each loop becomes one CUDA graph, which runs without the host.
        Ignored on a mesh of several devices: such graphs were not tried with collectives.
      timed_fusions: whether fusions are compiled in two ways, to time them. Ignored on a mesh of
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
    # XLA's options may change with its version. All are checked at once, so that a process
    # compiles only one program for the check.
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

    Get the form before each call: its options depend on the mesh that is set, and on whether a
    profile is being recorded.

    A deterministic program gives equal bits in every process on equal GPUs.
    It cannot be called inside another program, whose options would apply to both.

    Args:
      f: the function.
      inside_others: whether the other form may be called inside other programs, with the
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
        """These programs with timed fusions."""
        how = {**self._for_gpus, "timed_fusions": True}
        return Programs(
            self._f, inside_others=self._inside_others, **how, **self._options
        )

    def __getitem__(self, deterministic: bool) -> Keepable:
        # Computed at the first call, because the options depend on the kind of device.
        how = dict(self._for_gpus)
        # Measured times differ between processes, so they must not choose the program.
        if deterministic:
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
