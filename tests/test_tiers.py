"""What `make test` runs of everything there is; `make test-all` runs the rest, too."""

import pathlib

import pytest

import sparsejax as sj
from sparsejax.cli import flags

TESTS = pathlib.Path(__file__).parent

# Quick tests of each public operation: in XLA's operations, as a GPU program that is
# interpreted on the CPU, lowered for CUDA, and on a mesh of eight devices.
OPERATIONS = {
    "gather_matmul": {
        "xla": "ops/test_gather_matmul.py::test_equals_scipy",
        "interpreted": "pallas_kernels/test_gather_matmul.py::test_equals_float64",
        "lowered": "ops/test_gather_matmul.py::test_lowers_for_cuda",
        "mesh": "ops/test_gather_matmul.py::test_sharded_over_features_is_the_same",
    },
    "output_loss": {
        "xla": "ops/test_output_loss.py::test_equals_the_oracle",
        "interpreted": "ops/test_output_loss.py::test_kernel_equals_the_oracle",
        "lowered": "ops/test_output_loss.py::test_kernel_lowers_for_cuda",
        "mesh": "ops/test_output_loss.py::test_sharded_by_items_equals_unsharded",
    },
    "output_loss_per_example": {
        "xla": "ops/test_output_loss.py::test_per_example_is_differentiable",
        "mesh": "ops/test_output_on_mesh.py::test_loss_per_example",
    },
    "linear_cross_entropy": {
        "xla": "ops/test_linear_cross_entropy.py::test_equals_the_oracle",
        "interpreted": "ops/test_linear_cross_entropy.py::test_kernel_equals_the_oracle",
        "lowered": "ops/test_linear_cross_entropy.py::test_kernel_lowers_for_cuda",
        "mesh": "ops/test_linear_cross_entropy.py::test_mesh_equals_one_device",
    },
    "history_attention": {
        "xla": "ops/test_history_attention.py::test_equals_float64",
        "interpreted": "pallas_kernels/test_history_attention.py",
        "lowered": "pallas_kernels/test_history_attention.py::test_lowers_for_cuda",
        "mesh": "ops/test_history_attention.py::test_on_a_mesh",
    },
    "top_k": {
        "xla": "ops/test_top_k.py::test_random_scores",
        "interpreted": "ops/test_top_k.py::test_kernel_equals_a_full_sort",
        "lowered": "ops/test_top_k.py::test_kernel_lowers_for_cuda",
        "mesh": "ops/test_top_k.py::test_sharded_by_items_equals_unsharded",
    },
}
# What an operation is made of: gradients and updates of rows, and each GPU program.
PROGRAMS = {
    "gather_matmul": "pallas_kernels/test_gather_matmul.py::test_equals_float64",
    "catch_up": "pallas_kernels/test_catch_up.py",
    "dot_interaction": "pallas_kernels/test_dot_interaction.py::test_products_and_slopes",
    "gram_loss": "pallas_kernels/test_gram_loss.py::test_squared_gradient",
    "hash_index": "pallas_kernels/test_hash_index.py::test_equals_the_operations_of_xla",
    "history_attention": "pallas_kernels/test_history_attention.py",
    "output_loss": "pallas_kernels/test_output_loss.py::test_slopes",
    "rounding": "pallas_kernels/test_rounding.py::test_bits_are_those_of_murmur3",
    "row_update": "pallas_kernels/test_row_update.py::test_nothing_touched",
    "selection": "pallas_kernels/test_selection.py::test_places_of_the_best",
    "slopes_product": "pallas_kernels/test_slopes_product.py::test_slopes_product",
    "top_k": "pallas_kernels/test_top_k.py::test_maxima",
    "weight_gradient": "pallas_kernels/test_weight_gradient.py::test_weight_gradient",
    "weight_update": "pallas_kernels/test_weight_update.py::test_weight_update",
}
COMMANDS = {
    "train": "cli/test_train.py::test_train_says_what_it_does",
    "tune": "cli/test_tune.py::test_it_is_interrupted_and_goes_on",
    "evaluate": "cli/test_evaluate.py::test_evaluate_finds_what_was_held_out",
    "compare": "cli/test_compare.py::test_a_better_run_is_told_from_a_worse_one",
    "predict": "cli/test_predict.py::test_predict_recommends_the_users_colour",
    "export": "cli/test_export.py::test_a_run_is_exported",
    "exporttriton": "serving/test_triton.py::test_versions_of_one_model_are_asked_alike",
    "convert": "cli/test_convert.py::test_convert_keeps_everything",
    "prepare": "data/test_prepare.py",
    "split": "cli/test_split.py::test_split",
    "report": "cli/test_report_command.py::test_report_of_a_run",
    "vectors": "cli/test_vectors.py::test_vectors_of_a_run",
    "similar": "cli/test_vectors.py::test_similar_items_of_a_run",
    "serve": "cli/test_serve.py::test_a_signal_ends_it_and_loses_nothing",
    "plan": "cli/test_plan_command.py::test_plan_says_whether_it_fits",
}
# Quick tests of each kind of process; the ones that need more than a few seconds are slow.
PROCESSES = {
    "an interrupted command": "cli/test_resume.py::test_a_signal_saves_a_checkpoint",
    "a killed writer": "test_whole_files.py::test_what_was_killed_is_removed_by_the_next_write",
    "a lock of another process": "mesh/test_locks.py",
    "processes of one training": "training/test_processes.py::test_what_one_process_does_for_all",
    "processes that predict": "prediction/test_parts.py",
    "two kinds of precision": "training/test_rounding.py",
    "ids that are asked ahead": "embeddings/test_collection.py::test_ahead_says_which_batches_have_places",
}


@pytest.fixture
def quick(request) -> set[str]:
    """Names of all quick tests, with and without their file and parameters."""
    config = request.config
    if config.args != config.getini("testpaths") or config.getoption("keyword"):
        pytest.skip("only a part of the tests was collected")
    names = set()
    for item in request.session.items:
        skipped = any(
            m.name in ("skip", "slow", "release") for m in item.iter_markers()
        )
        if not skipped:
            name = item.nodeid.removeprefix("tests/")
            names |= {name, name.partition("[")[0], name.partition("::")[0]}
    return names


def test_each_operation_program_command_and_kind_of_process_has_a_quick_test(quick):
    forms = [test for tests in OPERATIONS.values() for test in tests.values()]
    tests = {*forms, *PROGRAMS.values(), *COMMANDS.values(), *PROCESSES.values()}
    assert not tests - quick


def test_the_lists_of_slow_tests_have_their_names(quick, renamed_tests):
    assert not renamed_tests


def test_each_function_has_a_case_in_ci(quick, functions_outside_ci):
    """`release_tests.txt` names further cases of a function.

    `weekly_tests.txt` has the functions that have no other: CI runs one in seven of them a
    day. No name is added there. One that has got a case in CI is removed.
    """
    weekly = (TESTS / "weekly_tests.txt").read_text().splitlines()
    assert functions_outside_ci == set(weekly)


def test_nothing_is_missing_here():
    public = {name for name in dir(sj) if _is_operation(getattr(sj, name))}
    assert public == set(OPERATIONS)
    kinds = {kind.__name__.lower() for kind in flags.Command.__subclasses__()}
    assert kinds == COMMANDS.keys() | {"demo"}  # `make demo`, and a slow test
    programs = {path.stem for path in (TESTS / "pallas_kernels").glob("test_*.py")}
    others = {"test_mosaic", "test_unwritten_slopes"}
    assert {f"test_{name}" for name in PROGRAMS} | others == programs


def _is_operation(public: object) -> bool:
    return getattr(public, "__module__", "").startswith("sparsejax.ops.")
