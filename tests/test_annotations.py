"""Annotations that `--check-annotations` checks."""

import importlib
import pkgutil

import pytest


@pytest.mark.parametrize("package", ["sparsejax", "pallas_kernels"])
def test_each_module_is_imported(package):
    """`make test-x64` does so with the hook, whose decorator refuses what it cannot check."""
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
