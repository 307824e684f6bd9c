"""What the README and the cheaper pages show is run, with XLA's optimizations."""

import pytest
from test_docs import (
    test_a_loop_of_your_own,
    test_deployment,
    test_measuring_while_it_trains,
    test_several_inputs,
    test_your_data,
    trained,
)
from test_readme import (
    test_commands_run_as_pasted,
    test_loss_of_the_docs,
    test_python_prints_what_is_shown,
    test_rules_of_the_docs,
)

__all__ = [  # pytest collects them here
    "test_a_loop_of_your_own",
    "test_commands_run_as_pasted",
    "test_deployment",
    "test_loss_of_the_docs",
    "test_measuring_while_it_trains",
    "test_python_prints_what_is_shown",
    "test_rules_of_the_docs",
    "test_several_inputs",
    "test_your_data",
    "trained",
]


@pytest.fixture
def symbolic_sizes() -> None:
    """Nothing: annotations are not checked here."""
