"""What the README and some pages show is run, with XLA's optimizations."""

import dataclasses

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from test_docs import (
    test_a_loop_of_your_own,
    test_deployment,
    test_measuring_while_it_trains,
    test_several_inputs,
    test_splits,
    test_tasks,
    test_your_data,
    trained,
)
from test_readme import (
    test_commands_run_as_pasted,
    test_loss_of_the_docs,
    test_python_prints_what_is_shown,
    test_rules_of_the_docs,
)

from sparsejax.kinds.histories.kind import Histories
from sparsejax.kinds.items.kind import Items

__all__ = [  # pytest collects them here
    "test_a_loop_of_your_own",
    "test_commands_run_as_pasted",
    "test_deployment",
    "test_loss_of_the_docs",
    "test_measuring_while_it_trains",
    "test_python_prints_what_is_shown",
    "test_rules_of_the_docs",
    "test_several_inputs",
    "test_splits",
    "test_tasks",
    "test_your_data",
    "trained",
]


@pytest.fixture
def symbolic_sizes() -> None:
    """Replaces the fixture of the other tests; does nothing, as annotations are not checked
    here.
    """


@pytest.fixture(autouse=True)
def _cheaper(request, monkeypatch, tmp_path_factory):
    """Halves the time of the longest pages.

    Commands find the programs that the blocks beside them compiled. The optimizer rule is one that
    compiles in half the time of the default rule, which the other tests here use.
    """
    if request.node.name not in ("test_splits", "test_tasks"):
        yield
        return
    for kind in Items, Histories:
        rule = {"optimizer": "adagrad", "options": {}}
        monkeypatch.setattr(
            kind, "defaults", dataclasses.replace(kind.defaults, **rule)
        )
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for values in settings, before:
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is settings:
            yield
