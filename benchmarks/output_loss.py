"""Times an output layer's loss with all its gradients against its peers.

    python benchmarks/output_loss.py run [--commit NAME]    on a GPU
    python benchmarks/output_loss.py table                  anywhere

`run` starts a process for JAX and one for torch. They compute the loss and its gradients in `h`
and the kernel, with bfloat16 operands. The gradient of `h` is checked against float64 in some rows
before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from outputs import CHECKED, exact, host_operands, jax_inputs, torch_inputs
from report import command, reported
from timing import measure_jax, measure_torch
from workloads import OUTPUTS, Workload

_RULES = {
    "sigmoid": "sigmoid_binary_cross_entropy",
    "l2": "l2_loss",
    "softmax": "softmax_cross_entropy",
}
_BIASED = "mosaic_gpu, with a bias"
# The squared loss is chosen to be made of scores or of Gram matrices. Here it is of scores.
_SCORES = "mosaic_gpu, by scores"


def _measure(part: str) -> Iterator[dict]:
    measure = {"jax": _measure_jax, "torch": _measure_torch}[part]
    for workload in OUTPUTS:
        yield from measure(workload)


def _error(dh, loss: str, workload: Workload, bias=0.0) -> float:
    """Relative error of some rows of the gradient of `h` in the first batch."""
    scores, listed, kernel = exact(workload)
    scores = scores + bias
    labels = listed.astype(np.float64)
    if loss == "softmax":
        odds = np.exp(scores - scores.max(1, keepdims=True))
        slopes = labels.sum(1, keepdims=True) * odds / odds.sum(1, keepdims=True)
    else:
        slopes = 1 / (1 + np.exp(-scores)) if loss == "sigmoid" else scores
    want = (slopes - labels).astype(np.float32) @ kernel
    off = np.linalg.norm(np.asarray(dh, np.float32)[:CHECKED] - want)
    error = float(off / np.linalg.norm(want))
    if not error < 2e-2:
        raise ValueError(f"relative error {error}")
    return error


def _ours(
    rule: str,
    implementation: Literal["mosaic_gpu", "xla"] | None,
    bias=None,
    form: Literal["chunks", "gram"] | None = None,
):
    """With the gradient of the bias, if there is one."""
    import jax

    from sparsejax import losses
    from sparsejax.ops.output_loss import output_loss_in_chunks

    def loss(h, kernel, bias, labels):
        options: dict[str, Any] = {"implementation": implementation, "form": form}
        return output_loss_in_chunks(
            h, kernel, bias, labels, loss=losses.get(rule), **options
        )

    def function(h, kernel, labels):
        of = (0, 1) if bias is None else (0, 1, 2)
        return jax.value_and_grad(loss, of)(h, kernel, bias, labels)

    return function


def _bias(workload: Workload) -> np.ndarray:
    rng = np.random.default_rng(2)
    items = len(host_operands(workload)[1])
    return 0.1 * rng.standard_normal(items, np.float32)


def _dense(loss: str):
    """Autodiff of the loss of dense labels, as one writes it without a library."""
    import jax
    import jax.numpy as jnp
    import optax

    def function(h, kernel, labels):
        scores = (h @ kernel[: labels.num_cols].T).astype(jnp.float32)
        place = labels.row_ids(), labels.indices
        dense = jnp.zeros(scores.shape, jnp.float32).at[place].set(1, mode="drop")
        if loss == "softmax":
            return optax.softmax_cross_entropy(scores, dense).sum()
        if loss == "sigmoid":
            return optax.sigmoid_binary_cross_entropy(scores, dense).sum()
        return optax.l2_loss(scores, dense).sum()

    return jax.value_and_grad(function, (0, 1))


def _measure_jax(workload: Workload) -> Iterator[dict]:
    import jax.numpy as jnp

    inputs = jax_inputs(workload)
    bias = _bias(workload)
    for loss, rule in _RULES.items():
        candidates = {
            "mosaic_gpu": _ours(rule, "mosaic_gpu"),
            _BIASED: _ours(rule, "mosaic_gpu", jnp.asarray(bias)),
            "xla": _ours(rule, "xla"),
            "autodiff, dense labels": _dense(loss),
        }
        if loss == "l2":
            del candidates["autodiff, dense labels"]
            candidates[_SCORES] = _ours(rule, "mosaic_gpu", form="chunks")
        for name, function in candidates.items():
            if loss == "softmax" and name == _BIASED:
                continue
            added = bias[: workload.features] if name == _BIASED else 0.0

            def check(found, loss=loss, added=added):
                return _error(found[1][0], loss, workload, added)

            with reported(workload.name, loss, name):
                ours = name == "mosaic_gpu"
                found = measure_jax(function, inputs, check, kernels=ours)
                yield _named(workload, loss, name) | found


def _named(workload: Workload, loss: str, name: str) -> dict:
    return {"workload": workload.name, "loss": loss, "implementation": name}


def _measure_torch(workload: Workload) -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]

    functional = torch.nn.functional
    inputs = torch_inputs(workload, trained=True)
    kernel = inputs[0][1]

    def loss_of(h, kernel, rows, columns, loss):
        scores = (h @ kernel.T).float()
        dense = torch.zeros_like(scores)
        dense[rows, columns] = 1.0
        if loss == "softmax":
            return -(dense * functional.log_softmax(scores, 1)).sum()
        return functional.binary_cross_entropy_with_logits(
            scores, dense, reduction="sum"
        )

    for loss in ("sigmoid", "softmax"):
        for name, made in (
            ("torch", loss_of),
            ("torch.compile", torch.compile(loss_of, dynamic=False)),
        ):

            def step(h, kernel, rows, columns, made=made, loss=loss):
                total = made(h, kernel, rows, columns, loss)
                return torch.autograd.grad(total, (h, kernel))

            def check(found, loss=loss):
                return _error(found[0].float().cpu().numpy(), loss, workload)

            with reported(workload.name, loss, name):
                kept = kernel.element_size() * kernel.numel()  # its gradient
                found = measure_torch(step, inputs, check, kept=kept)
                yield _named(workload, loss, name) | found


if __name__ == "__main__":
    parts = {"jax": {}, "torch": {}}
    command(__doc__, __file__, parts, _measure)
