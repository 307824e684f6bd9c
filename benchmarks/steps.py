"""Times a training step of each kind, ours and PyTorch's in turns, and what `fit` makes of it.

    python benchmarks/steps.py run [--cases gpu] [--torch PYTHON] [--commit NAME]
    python benchmarks/steps.py table

`clicks` is a DLRM of a shop: 26 tables with 1.2 M ids in all, 16 wide, 13 dense numbers,
zipf 1.2. `sasrec` and `hstu` have two blocks, 50 places and 512 sampled negatives. `items` is
an autoencoder over 40,981 items with a softmax over all. All have Adam. *Own* is a loop of
one's own under `sj.jit`; *kernels* is its time by CUPTI, *host* the time until a call returns.

Each side is a process that waits while the other works, so both have the whole machine. Of
each form there are several rounds, in turns. A busy machine makes all of them slower: compare
what one report has.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Self

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import RESULTS, origin, table, write_section

_ROWS = (400_000, 300_000, 200_000, 100_000, 100_000, 50_000, 20_000, 10_000)
_ROWS += (5_000, 4_000, 3_000, 2_000, 1_000, 1_000, 500, 500, 200, 100, 100, 50, 24)
_ROWS += (20, 10, 7, 4, 3)
_DENSE, _DIM, _LAYERS = 13, 16, (512, 256)
_LENGTH, _NEGATIVES, _DROPOUT = 50, 512, 0.4
_ITEMS, _ENTRIES, _HIDDEN = 40_981, 27, 256
_RATE = 1e-3

# Kind, batch, width of a sequence model, dtype.
_CASES = {
    "gpu": (
        ("clicks", 4_096, 0, "bfloat16"),
        ("clicks", 65_536, 0, "bfloat16"),
        ("sasrec", 512, 256, "bfloat16"),
        ("hstu", 512, 256, "bfloat16"),
        ("items", 512, 0, "bfloat16"),
    ),
    "fits": (
        ("clicks", 512, 0, "bfloat16"),
        ("hstu", 4_096, 256, "bfloat16"),
        ("hstu", 65_536, 256, "bfloat16"),
        ("items", 4_096, 0, "bfloat16"),
        ("items", 65_536, 0, "bfloat16"),
    ),
    "cpu": (
        ("clicks", 4_096, 0, "float32"),
        ("sasrec", 128, 64, "float32"),
        ("hstu", 128, 64, "float32"),
        ("items", 512, 0, "float32"),
    ),
    "tiny": (
        ("clicks", 64, 0, "float32"),
        ("sasrec", 8, 16, "float32"),
        ("hstu", 8, 16, "float32"),
        ("items", 64, 0, "float32"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["run", "table", "jax", "torch"])
    parser.add_argument("--cases", choices=list(_CASES), default="gpu")
    parser.add_argument("--only", help="kinds, with a comma between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round")
    parser.add_argument("--torch", default=sys.executable, help="a Python with torch")
    parser.add_argument(
        "--without", default="-", help="forms with one of these in their names"
    )
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.action == "run":
        _run(arguments)
    elif arguments.action == "table":
        _write_table()
    else:
        _work(_jax_forms if arguments.action == "jax" else _torch_forms)


def _run(arguments: argparse.Namespace) -> None:
    """Two processes take turns; what they found is written after each case."""
    output = arguments.output or RESULTS / f"steps_{arguments.cases}.json"
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": arguments.commit,
        "command": f"python benchmarks/steps.py run --cases {arguments.cases}",
        "versions": {},
        "results": [],
    }
    wanted = arguments.only and arguments.only.split(",")
    for case in _CASES[arguments.cases]:
        if wanted and case[0] not in wanted:
            continue
        with contextlib.ExitStack() as stack:
            sides = [
                stack.enter_context(_Side("jax", sys.executable)),
                stack.enter_context(_Side("torch", arguments.torch)),
            ]
            forms = []
            for side in sides:
                made = side.ask(make=case, without=arguments.without)
                report["versions"] |= made.get("versions", {})
                forms += [(side, form, first) for form, first in made["forms"].items()]
            rounds: dict[str, list] = {form: [] for _, form, _ in forms}
            for _ in range(arguments.rounds):
                for side, form, _ in forms:
                    rounds[form].append(side.ask(time=form, seconds=arguments.seconds))
            for side, form, first in forms:
                found = [each for each in rounds[form] if "error" not in each]
                result = dict(
                    zip(("kind", "batch", "width", "dtype"), case, strict=True)
                )
                result |= {"form": form, "first_seconds": first}
                for name in ("milliseconds", "host", "cpu"):
                    if found:
                        result[name] = round(
                            statistics.median(each[name] for each in found), 3
                        )
                result |= side.ask(profile=form)
                report["results"].append(result)
                print(json.dumps(result), flush=True)
            report["results"] += [
                dict(zip(("kind", "batch", "width", "dtype"), case, strict=True)) | each
                for side in sides
                for each in side.ask(fit=True).get("fit", [])
            ]
        output.write_text(json.dumps(report, indent=1) + "\n")
    for result in report["results"]:
        if result["form"].startswith("fit"):
            print(json.dumps(result), flush=True)


class _Side:
    """A process that times when it is asked to."""

    def __init__(self, name: str, python: str):
        self._process = subprocess.Popen(
            [python, __file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, **request: Any) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.poll() is None:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        return {"error": "the process ended", "forms": {}}


def _work(make: Callable) -> None:
    """Answers requests until there are no more."""
    forms: dict[str, Any] = {}
    fits: Callable[[], list[dict]] = list
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if "make" in request:
                found, fits, profile, answer["versions"] = make(*request["make"])
                answer["forms"] = {}
                without = request["without"].split(",")
                for name, step in found.items():
                    begin = time.perf_counter()
                    if any(part in name for part in without):
                        continue
                    try:
                        step()[1]()
                    except Exception as error:  # noqa: BLE001
                        print(name, repr(error)[:300], file=sys.stderr)
                        continue
                    forms[name] = step
                    answer["forms"][name] = round(time.perf_counter() - begin, 2)
                if "fit" in without:
                    fits = list
            elif "time" in request:
                answer = _times(forms[request["time"]], request["seconds"])
            elif "profile" in request:
                answer = profile(forms[request["profile"]])  # pyrefly: ignore
            else:
                answer["fit"] = fits()
        except Exception as error:  # noqa: BLE001
            print(request, repr(error)[:500], file=sys.stderr)
            answer = {"error": repr(error)[:200], "forms": {}}
        print("RESULT " + json.dumps(answer), flush=True)


def _times(step: Callable, seconds: float) -> dict[str, float]:
    """Milliseconds of a step, of the host until a call returns, and of all processors."""
    for _ in range(2):
        step()[1]()
    begin = time.perf_counter()
    step()[1]()
    count = max(3, int(seconds / (time.perf_counter() - begin)))
    begin, processor = time.perf_counter(), time.process_time()
    for _ in range(count):
        _, wait = step()
    called = time.perf_counter() - begin
    wait()  # pyrefly: ignore
    whole = time.perf_counter() - begin
    processor = time.process_time() - processor
    return {
        "milliseconds": 1e3 * whole / count,
        "host": 1e3 * called / count,
        "cpu": 1e3 * processor / count,
    }


# What both sides are given


def _clicks(batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((batch, _DENSE)).astype(np.float32)
    ids = np.stack([_zipf(rng, batch, rows) for rows in _ROWS], 1)
    return dense, ids, (rng.random(batch) < 0.2).astype(np.float32)


def _zipf(rng: np.random.Generator, count: int, rows: int) -> np.ndarray:
    """Ids with the zipf law of exponent 1.2, the popular ones anywhere."""
    skew = 1.2
    places = 1 + rng.random(count) * (rows ** (1 - skew) - 1)
    places = np.minimum(places ** (1 / (1 - skew)), rows).astype(np.int64) - 1
    return (places * 3_000_017 % rows).astype(np.int32)


def _histories(batch: int, items: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Items and times; a third of the places is filled, the others are at the end."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(_LENGTH / 4), 1, batch).astype(int)
    lengths = np.clip(lengths, 2, _LENGTH + 1)
    missing = np.arange(_LENGTH + 1) >= lengths[:, None]
    histories = rng.integers(0, items, (batch, _LENGTH + 1)).astype(np.int32)
    times = np.cumsum(rng.exponential(3e4, histories.shape), 1)
    return np.where(missing, -1, histories), times.astype(np.float32)


def _rows(batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`indptr` and `indices` of rows with about 27 items."""
    rng = np.random.default_rng(seed)
    rows = [np.unique(_zipf(rng, n, _ITEMS)) for n in rng.poisson(_ENTRIES, batch) + 1]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return indptr.astype(np.int32), np.concatenate(rows).astype(np.int32)


def _items(batch: int) -> int:
    return 200_000 if batch >= 512 else 10_000


# Ours


def _jax_forms(kind: str, batch: int, width: int, dtype: str):
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import sparsejax as sj

    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    if kind == "clicks":
        names = [f"C{i}" for i in range(len(_ROWS))]
        config: Any = sj.DLRMConfig(dim=_DIM, bottom=_LAYERS, top=_LAYERS, dtype=dtype)  # pyrefly: ignore
        features = dict(zip(names, _ROWS, strict=True))

        def make():
            return sj.embeddings.DLRM(
                config,  # pyrefly: ignore
                num_dense=_DENSE,
                features=features,
                rngs=nnx.Rngs(0),
            )

        dense, ids, labels = _clicks(batch)
        columns = {n: jnp.asarray(ids[:, i]) for i, n in enumerate(names)}
        given: tuple = jnp.asarray(dense), columns, jnp.asarray(labels)

        def loss_of(model, dense, ids, labels):
            logits = model(dense, ids)
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    elif kind == "items":
        config = sj.NetworkConfig(
            layers=(
                sj.nn.InputConfig(),
                sj.nn.HiddenConfig(name="hidden", size=_HIDDEN, activation="tanh"),
                sj.nn.OutputConfig(dtype=dtype),
            ),
            loss="softmax_cross_entropy",
        )

        def make():
            return sj.FeedForward(
                config,  # pyrefly: ignore
                inputs=_ITEMS,
                outputs=_ITEMS,
                rngs=nnx.Rngs(0),
            )

        indptr, indices = _rows(batch)
        given = (
            sj.CSR(None, jnp.asarray(indices), jnp.asarray(indptr), num_cols=_ITEMS),
        )

        def loss_of(model, x):
            return model.loss(x, x) / x.num_rows

    else:
        of = {"sasrec": sj.SASRecConfig, "hstu": sj.HSTUConfig}[kind]
        config = of(
            max_length=_LENGTH,
            width=width,
            dropout=_DROPOUT,
            negatives=_NEGATIVES,
            dtype=dtype,
        )

        def make():
            return sj.sequence.build_sequence_model(
                config, items=_items(batch), rngs=nnx.Rngs(0)
            )

        histories, times = _histories(batch, _items(batch))
        given = (jnp.asarray(histories), jnp.asarray(times))
        targets = int((histories[:, 1:] >= 0).sum())

        def loss_of(model, histories, times):
            times = times if kind == "hstu" else None
            return model.loss(histories, times, max_targets=targets)

    def written(model, optimizer, *given):
        loss, grads = optimizer.value_and_grad(lambda m: loss_of(m, *given))(model)
        optimizer.update(model, grads)
        return loss

    def form(jit):
        state: list[Any] = []

        def call():
            if not state:
                model = make()
                model.train()
                state[:] = (
                    model,
                    sj.Optimizer(model, sj.optimizers.adam(_RATE)),
                    jit(written),
                )
            loss = state[2](state[0], state[1], *given)
            return loss, loss.block_until_ready

        return call

    def profile(step) -> dict:
        if jax.default_backend() != "gpu":
            return {}
        from timing import time_kernels

        kernels = time_kernels(lambda i: step()[1](), 5)
        largest = sorted(kernels.items(), key=lambda item: -item[1])[:8]
        return {
            "kernels": round(sum(kernels.values()) / 1e3, 3),
            "largest": {name[:50]: round(each) for name, each in largest},
        }

    def fits() -> list[dict]:
        return _fits(kind, batch, make)

    forms = {
        "own, sj.jit": form(sj.jit),
        "own, nnx.jit": form(lambda f: nnx.jit(f, donate_argnums=(0, 1))),
    }
    return forms, fits, profile, versions


def _fits(kind: str, batch: int, make: Callable) -> list[dict]:
    """Examples a second of `fit`, and the share of its time that the GPU works."""
    import jax

    import sparsejax as sj
    from sparsejax.data.sets.click_schema import HashedColumn

    steps = 256 if jax.default_backend() == "gpu" else 16
    rows = min(batch * steps, 2**21)
    if kind == "clicks":
        dense, ids, labels = _clicks(rows)
        columns = {f"C{i}": ids[:, i] for i in range(len(_ROWS))}
        schema = sj.ClickSchema(
            "click",
            {f"d{i}": sj.data.DenseColumn() for i in range(_DENSE)},
            {f"C{i}": HashedColumn(n) for i, n in enumerate(_ROWS)},
        )
        data: Any = sj.ClickDataset(labels, dense, columns, schema, {})
    elif kind == "items":
        rows = min(rows, 131_072)
        indptr, indices = _rows(rows)
        data = sj.SparseDataset.from_scipy(
            sj.CSR(None, indices, indptr, num_cols=_ITEMS).to_scipy()
        )
    else:
        histories, times = _histories(rows, _items(batch))
        kept = histories >= 0
        indptr = np.concatenate([[0], np.cumsum(kept.sum(1))])
        names = np.arange(_items(batch)).astype(str)
        users = np.arange(rows).astype(str)
        data = sj.SequenceDataset(
            indptr, histories[kept], users, names, times[kept].astype(np.float64)
        )
    found = []
    for rule in (sj.optimizers.adagrad, sj.optimizers.adam):
        model = make()
        optimizer = sj.Optimizer(model, rule(_RATE))
        settings = {"batch_size": batch, "num_epochs": 4}
        history = sj.fit(model, optimizer, data, **settings)
        speed = statistics.median(entry["examples_per_second"] for entry in history[1:])
        milliseconds = 1e3 * batch / speed
        result: dict[str, Any] = {"form": f"fit, {rule(_RATE).name}"}
        result |= {"examples_per_second": round(speed)}
        result |= {"milliseconds": round(milliseconds, 4)}
        if jax.default_backend() == "gpu":
            times = _kernels_of_fit(model, optimizer, data, settings)
            kernels = sum(times.values())
            result["kernels"] = round(kernels, 4)
            result["share_of_gpu"] = round(kernels / milliseconds, 3)
            result["largest"] = {
                name[:50]: round(1e3 * each)
                for name, each in sorted(times.items(), key=lambda item: -item[1])
                if each > 0.02 * kernels
            }
        found.append(result)
        print(json.dumps(result), file=sys.stderr, flush=True)
    return found


def _kernels_of_fit(model, optimizer, data, settings) -> dict[str, float]:
    """Milliseconds of each kernel in a step, from a profile of a further `fit`."""
    import jax
    from timing import kernels_of_trace

    import sparsejax as sj

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            sj.fit(model, optimizer, data, **settings)
        times: dict[str, float] = collections.defaultdict(float)
        for name, nanoseconds in kernels_of_trace(folder):
            times[name] += nanoseconds / 1e6
    steps = -(-data.num_rows // settings["batch_size"]) * settings["num_epochs"]
    return {name: time / steps for name, time in times.items()}


# PyTorch


def _torch_forms(kind: str, batch: int, width: int, dtype: str):
    import torch  # pyrefly: ignore[missing-import]

    nn, functional = torch.nn, torch.nn.functional
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(2)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    versions = {"torch": torch.__version__}
    place = lambda array: torch.from_numpy(array).to(device)
    long = lambda array: place(array.astype(np.int64))

    def layers(sizes, *, end):
        parts = []
        for a, b in itertools.pairwise(sizes):
            parts += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*(parts if end else parts[:-1]))

    class Clicks(nn.Module):
        def __init__(self):
            super().__init__()
            firsts = np.concatenate([[0], np.cumsum(_ROWS)[:-1]])
            self.register_buffer("firsts", torch.from_numpy(firsts))
            self.rows = nn.Embedding(sum(_ROWS), _DIM)
            nn.init.uniform_(self.rows.weight, -0.01, 0.01)
            vectors = len(_ROWS) + 1
            self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1))
            self.bottom = layers((_DENSE, *_LAYERS, _DIM), end=True)
            self.top = layers(
                (_DIM + vectors * (vectors - 1) // 2, *_LAYERS, 1), end=False
            )

        def forward(self, dense, ids, labels):
            given = self.bottom(dense)
            rows = torch.cat([given[:, None], self.rows(ids + self.firsts)], 1)
            products = torch.bmm(rows, rows.transpose(1, 2))
            pairs = products[:, self.pairs[0], self.pairs[1]]
            logits = self.top(torch.cat([given, pairs], 1))[:, 0]
            return functional.binary_cross_entropy_with_logits(logits, labels)

    class Items(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.EmbeddingBag(_ITEMS, _HIDDEN, mode="sum")
            self.bias = nn.Parameter(torch.zeros(_HIDDEN))
            self.output = nn.Linear(_HIDDEN, _ITEMS)

        def forward(self, indices, ends, rows, lengths):
            h = torch.tanh(self.rows(indices, ends) + self.bias)
            scores = self.output(h).float()
            mine = scores[rows, indices].sum()
            return ((lengths * scores.logsumexp(1)).sum() - mine) / len(lengths)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.mixed = nn.Linear(width, width, bias=False)
            self.up, self.down = (
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )

        def forward(self, x, _):
            parts = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 2, -1)
            q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = self.mixed(y.transpose(1, 2).reshape(x.shape))
            x = x + functional.dropout(y, _DROPOUT)
            y = self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
            return x + functional.dropout(y, _DROPOUT)

    class Pointwise(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
            self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
            self.uvqk, self.mixed = (
                nn.Linear(width, 4 * width, bias=False),
                nn.Linear(width, width),
            )
            self.by_place = nn.Parameter(0.02 * torch.randn(2 * _LENGTH - 1))
            self.by_time = nn.Parameter(0.02 * torch.randn(129))
            place = torch.arange(_LENGTH)
            apart = place[:, None] - place[None]
            self.register_buffer("apart", apart + _LENGTH - 1)
            self.register_buffer("causal", (apart >= 0).float())

        def forward(self, x, bucket):
            shape = (*x.shape[:2], 2, -1)
            u, v, q, k = functional.silu(self.uvqk(self.norm1(x))).chunk(4, -1)
            scores = torch.einsum("bnhd,bmhd->bhnm", q.view(shape), k.view(shape))
            bias = self.by_place[self.apart][None] + self.by_time[bucket]
            scores = functional.silu(scores + bias[:, None]) / _LENGTH * self.causal
            y = torch.einsum("bhnm,bmhd->bnhd", scores, v.view(shape)).reshape(x.shape)
            return x + self.mixed(functional.dropout(u * self.norm2(y), _DROPOUT))

    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Embedding(_items(batch), width)
            self.places = nn.Parameter(0.02 * torch.randn(_LENGTH, width))
            block = Attention if kind == "sasrec" else Pointwise
            self.blocks = nn.ModuleList(block() for _ in range(2))
            self.norm = nn.LayerNorm(width)

        def forward(self, histories, times, where, targets, negatives):
            bucket = None
            if kind == "hstu":
                between = (times[:, 1:, None] - times[:, None, :-1]).abs()
                bucket = (between.clamp(min=1).log() / 0.301).long().clamp(0, 128)
            given = self.rows(histories[:, :-1].clamp(min=0)) + self.places
            x = functional.dropout(given, _DROPOUT)
            for block in self.blocks:
                x = block(x, bucket)
            h = functional.normalize(self.norm(x).flatten(0, 1)[where], dim=-1) / 0.1
            mine = functional.normalize(self.rows(targets), dim=-1)
            others = functional.normalize(self.rows(negatives), dim=-1)
            scores = (h @ others.T).masked_fill(targets[:, None] == negatives, -1e9)
            first = (h * mine).sum(-1, keepdim=True)
            scores = torch.cat([first, scores], 1).float()
            return (scores.logsumexp(1) - scores[:, 0]).mean()

    if kind == "clicks":
        make: Callable = Clicks
        dense, ids, labels = _clicks(batch)
        given: tuple = place(dense), long(ids), place(labels)
    elif kind == "items":
        make = Items
        indptr, indices = _rows(batch)
        lengths = np.diff(indptr)
        rows = np.repeat(np.arange(batch), lengths)
        given = long(indices), long(indptr[:-1]), long(rows), place(lengths)
    else:
        make = Sequences
        histories, times = _histories(batch, _items(batch))
        targets = histories[:, 1:].reshape(-1)
        where = np.flatnonzero(targets >= 0)
        given = long(histories), place(times), long(where), long(targets[where])

    def form(compiled):
        state: list[Any] = []

        def call():
            if not state:
                net = make().to(device)
                optimizer = torch.optim.Adam(net.parameters(), _RATE, fused=True)
                state[:] = torch.compile(net) if compiled else net, optimizer
            net, optimizer = state
            more = ()
            if kind in ("sasrec", "hstu"):
                more = (torch.randint(_items(batch), (_NEGATIVES,), device=device),)
            with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = net(*given, *more)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            return loss, torch.cuda.synchronize if device == "cuda" else loss.item

        return call

    def profile(step) -> dict:
        if device == "cpu":
            return {}
        from torch.profiler import (  # pyrefly: ignore[missing-import]
            ProfilerActivity,
            profile,
        )

        with profile(activities=[ProfilerActivity.CUDA]) as events:
            for _ in range(5):
                step()
            torch.cuda.synchronize()
        total = sum(event.self_device_time_total for event in events.key_averages())
        return {"kernels": round(total / 5e3, 3)}

    forms = {"torch, eager": form(False), "torch, compiled": form(True)}
    return forms, list, profile, versions


def _write_table() -> None:
    """Of the committed reports, those that are there."""
    lines: list[str] = []
    for cases in ("gpu", "fits", "cpu"):
        path = RESULTS / f"steps_{cases}.json"
        if not path.exists():
            continue
        report = json.loads(path.read_text())
        shown = [
            [
                f"{r['kind']} {r['dtype']}",
                f"{r['batch']:,}",
                r["form"],
                r.get("milliseconds", "-"),
                r.get("kernels", "-"),
                r.get("host", "-"),
                r.get("cpu", "-"),
                r.get("first_seconds", "-"),
                r.get("share_of_gpu", "-"),
            ]
            for r in report["results"]
        ]
        columns = ["model", "batch", "form", "ms", "kernels", "host", "all processors"]
        columns += ["first step, s", "GPU works"]
        lines += [origin(report), "", *table(columns, shown), ""]
    write_section("steps", lines[:-1])


if __name__ == "__main__":
    main()
