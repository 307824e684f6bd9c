"""The devices on which DSSTNE's commands run."""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from sparsejax.mesh import processes


def setting_mesh(text: str | None) -> contextlib.AbstractContextManager[Any]:
    """A context with the mesh of the flag `-mesh`. By default several processes divide weights."""
    if text is None and not processes.is_joined():
        return contextlib.nullcontext()
    text = text or f"model={jax.device_count()}"
    try:
        return jax.set_mesh(processes.mesh_of(text))
    except ValueError as error:
        raise ValueError(str(error).replace("--mesh", "-mesh")) from error
