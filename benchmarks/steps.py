"""Times a training step of each kind, ours and PyTorch's in turns, and the speed of `fit`.

    python benchmarks/steps.py run [--cases gpu] [--torch PYTHON] [--commit NAME]
    python benchmarks/steps.py table

`clicks` is a DLRM of a shop: 26 tables with 1.2 M ids in all, 16 wide, 13 dense numbers, zipf 1.2.
`sasrec` and `hstu` have two blocks, 50 places and 512 sampled negatives among 200,000 items; in
`--cases lengths` 50 to 16,384 places, 65,536 in a batch, and 1,024 negatives; in `--cases events`
columns of events, of users and a context beside ids, some 65,000 tokens of up to 200 in a history.
`items` is an autoencoder over 40,981 items with a softmax over all. `din` is a DIN with a million
users and items, vectors of 16, and layers of 80 and 40 that weigh a history, of whose places a
uniform share is filled; `din-SharedBottom`, `din-MMoE` and `din-PLE` have two labels. In float32,
*difference* is the largest one between the losses of both in 20 steps of SGD from the same
weights, as a share. All others have Adam. *Own* is a custom loop under `sj.jit`, *plain* a custom
loop without `max_targets`, *recommend* ranks items for one full history. *Kernels* is the time of
GPU programs by CUPTI, *host* the time until a call returns.

Each side is a process that waits while the other works, so both have the whole machine. Of
each form there are several rounds, in turns. A busy machine makes all of them slower: compare
what one report has.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
from report import RESULTS, largest, print_results, versions
from workloads import histories, zipf_ids

_ROWS = (400_000, 300_000, 200_000, 100_000, 100_000, 50_000, 20_000, 10_000)
_ROWS += (5_000, 4_000, 3_000, 2_000, 1_000, 1_000, 500, 500, 200, 100, 100, 50, 24)
_ROWS += (20, 10, 7, 4, 3)
_DENSE, _DIM, _LAYERS, _SKEW = 13, 16, (512, 256), 1.2
_LENGTH, _DROPOUT = 50, 0.4
_ITEMS, _ENTRIES, _HIDDEN = 40_981, 27, 256
_IDS, _FACTS = 1_000_000, 4  # sizes of DIN's data
_RATE, _SGD_RATE = 1e-3, 0.1

# Names of a case's values: kind, batch, width of a sequence model, dtype, places of a history,
# sampled negatives.
_CASE = "kind", "batch", "width", "dtype", "places", "negatives"
_Case = tuple[str, int, int, str, int, int]


def _case(
    kind: str,
    batch: int,
    width: int = 256,
    dtype: str = "bfloat16",
    places: int = _LENGTH,
    negatives: int = 512,
) -> _Case:
    return kind, batch, width, dtype, places, negatives


_DINS = "din", "din-SharedBottom", "din-MMoE", "din-PLE"
# For each number of places in a history, the number of histories in a batch.
_LENGTHS = {50: 1024, 200: 256, 512: 128, 1024: 64, 4096: 16, 16384: 1}
_CASES: dict[str, tuple[_Case, ...]] = {
    "gpu": (
        _case("clicks", 4_096),
        _case("clicks", 65_536),
        _case("sasrec", 512),
        _case("hstu", 512),
        _case("items", 512),
    ),
    "fits": (
        _case("clicks", 512),
        _case("hstu", 4_096),
        _case("hstu", 65_536),
        _case("items", 4_096),
        _case("items", 65_536),
    ),
    "din": tuple(
        _case("din", batch, places=places)
        for batch in (4_096, 65_536)
        for places in (50, 200)
    ),
    "tops": (
        _case("din-MMoE", 4_096),
        _case("din-PLE", 65_536),
        _case("din-PLE", 4_096, places=200),
        _case("din-MMoE", 65_536, places=200),
    ),
    "lengths": tuple(
        _case(kind, batch, dtype=dtype, places=places, negatives=1024)
        for kind in ("hstu", "sasrec")
        for places, batch in _LENGTHS.items()
        for dtype in ("bfloat16", "float32")
    ),
    "events": (
        _case("hstu-events", 1024, places=200, negatives=1024),
        _case("sasrec-events", 1024, places=200, negatives=1024),
    ),
    "cpu": (
        *(_case(kind, 512, 64, "float32") for kind in _DINS),
        _case("clicks", 4_096, 64, "float32"),
        _case("sasrec", 128, 64, "float32"),
        _case("hstu", 128, 64, "float32"),
        _case("items", 512, 64, "float32"),
    ),
    "tiny": (
        *(_case(kind, 16, 16, "float32", 8) for kind in _DINS),
        _case("clicks", 64, 16, "float32"),
        _case("sasrec", 8, 16, "float32", 8),
        _case("hstu", 8, 16, "float32", 8),
        _case("hstu-events", 8, 16, "float32", 8),
        _case("items", 64, 16, "float32"),
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
        for path in (RESULTS / f"steps_{cases}.json" for cases in _CASES):
            if path.exists():
                print_results(json.loads(path.read_text()))
    else:
        _work(_Ours if arguments.action == "jax" else _Torch)


def _run(arguments: argparse.Namespace) -> None:
    """Starts two processes that take turns, and writes their results after each case."""
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
        named = dict(zip(_CASE, case, strict=True))
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
                result = named | {"form": form, "first_seconds": first}
                for name in ("milliseconds", "host", "cpu") if found else ():
                    middle = statistics.median(each[name] for each in found)
                    result[name] = round(middle, 3)
                report["results"].append(result | side.ask(profile=form))
            if case[0] in _DINS and case[3] == "float32":
                with tempfile.NamedTemporaryFile(suffix=".npz") as weights:
                    both = [side.ask(losses=weights.name) for side in sides]
                a, b = (np.array(each.get("losses", np.nan)) for each in both)
                difference = {"difference": float(np.abs(a / b - 1).max())}
                report["results"].append(named | {"form": "losses"} | difference)
            for side in sides:
                fits = side.ask(fit=True).get("fit", [])
                report["results"] += [named | each for each in fits]
        output.write_text(json.dumps(report, indent=1) + "\n")
    for result in report["results"]:
        print(json.dumps(result), flush=True)


class _Side:
    """A process that times steps when it is asked to."""

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


def _work(side: Callable) -> None:
    """Answers requests until the input ends."""
    made: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if "make" in request:
                made = side(*request["make"])
                without = request["without"].split(",")
                answer = {"forms": _first_steps(made, without), "versions": versions()}
                made.fitted = "fit" not in without
            elif "time" in request:
                answer = _times(made.forms[request["time"]], request["seconds"])
            elif "losses" in request:
                answer["losses"] = made.losses(request["losses"])
            elif "profile" in request:
                answer = made.profile(made.forms[request["profile"]])
            elif made and made.fitted:
                answer["fit"] = made.fits()
        except Exception as error:  # noqa: BLE001
            print(request, repr(error)[:500], file=sys.stderr)
            answer = {"error": repr(error)[:200], "forms": {}}
        print("RESULT " + json.dumps(answer), flush=True)


def _first_steps(made: Any, without: list[str]) -> dict[str, float]:
    """Seconds of the first step of each form. A form that fails is named, and omitted."""
    found = {}
    for name, step in made.forms.items():
        begin = time.perf_counter()
        if any(part in name for part in without):
            continue
        try:
            step()[1]()
        except Exception as error:  # noqa: BLE001
            print(name, repr(error)[:300], file=sys.stderr)
            continue
        found[name] = round(time.perf_counter() - begin, 2)
    return found


def _times(step: Callable, seconds: float) -> dict[str, float]:
    """Milliseconds of a step, of the host until a call returns, and of all processor cores."""
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
    found = {"milliseconds": whole, "host": called, "cpu": processor}
    return {name: 1e3 * each / count for name, each in found.items()}


# --- data of both sides ---


def _clicks(batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((batch, _DENSE)).astype(np.float32)
    ids = np.stack([zipf_ids(rng, batch, rows, _SKEW) for rows in _ROWS], 1)
    return dense, ids, (rng.random(batch) < 0.2).astype(np.float32)


def _examples(batch: int, places: int, labels: int) -> tuple[np.ndarray, ...]:
    """Draws dense columns, users, items, histories and labels; with `labels` 0 the labels are a
    vector.
    """
    rng = np.random.default_rng(0)
    filled = rng.integers(0, places + 1, (batch, 1))
    had = rng.integers(0, _IDS, (batch, places))
    had = np.where(np.arange(places) < filled, had, -1)
    dense = rng.standard_normal((batch, _FACTS)).astype(np.float32)
    user, item = rng.integers(0, _IDS, (2, batch))
    click = rng.integers(0, 2, (batch, labels) if labels else batch).astype(np.float32)
    return dense, *(a.astype(np.int32) for a in (user, item, had)), click


def _rows(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """`indptr` and `indices` of rows with about 27 items."""
    rng = np.random.default_rng(0)
    lengths = rng.poisson(_ENTRIES, batch) + 1
    rows = [np.unique(zipf_ids(rng, n, _ITEMS, _SKEW)) for n in lengths]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return indptr.astype(np.int32), np.concatenate(rows).astype(np.int32)


def _items(batch: int, negatives: int) -> int:
    return 200_000 if batch >= 512 or negatives > 512 else 10_000


class _Ours:
    """Our side: a model, the forms of its step, and the speed of `fit`."""

    def __init__(
        self, kind: str, batch: int, width: int, dtype: Any, places: int, negatives: int
    ):
        import jax.numpy as jnp
        import optax
        from flax import nnx

        import sparsejax as sj

        self.kind, self.batch, self.places = kind, batch, places
        self.items, self.forms = _items(batch, negatives), {}
        rngs: Any = nnx.Rngs

        def loss_of(model, dense, ids, labels):
            logits = model(dense, ids)
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

        if kind in _DINS:
            top = kind.partition("-")[2]
            weighed = sj.DINConfig(
                dim=_DIM,
                length=places,
                attention=(80, 40),
                hidden=(64, 32),
                dtype=dtype,
                sharing=getattr(sj, top)() if top else None,
            )
            asked = dict.fromkeys(("click", "buy")) if top else {}
            read: Any = {"user": _IDS, "item": _IDS, "had": "item"}
            self.make = lambda: sj.clicks.build_click_model(
                weighed, num_dense=_FACTS, features=read, labels=asked, rngs=rngs(0)
            )
            examples = _examples(batch, places, len(asked))
            dense, *ids, labels = map(jnp.asarray, examples)
            given: tuple = dense, dict(zip(read, ids, strict=True)), labels
        elif kind == "clicks":
            names = [f"C{i}" for i in range(len(_ROWS))]
            features = dict(zip(names, _ROWS, strict=True))
            shape = {"num_dense": _DENSE, "features": features}
            clicked = sj.DLRMConfig(dim=_DIM, bottom=_LAYERS, top=_LAYERS, dtype=dtype)
            self.make = lambda: sj.clicks.DLRM(clicked, **shape, rngs=rngs(0))  # pyrefly: ignore
            dense, ids, labels = _clicks(batch)
            columns = {n: jnp.asarray(ids[:, i]) for i, n in enumerate(names)}
            given = jnp.asarray(dense), columns, jnp.asarray(labels)

        elif kind == "items":
            hidden = sj.nn.HiddenConfig(name="hidden", size=_HIDDEN, activation="tanh")
            network = sj.NetworkConfig(
                layers=(sj.nn.InputConfig(), hidden, sj.nn.OutputConfig(dtype=dtype)),
                loss="softmax_cross_entropy",
            )
            sizes = {"inputs": _ITEMS, "outputs": _ITEMS}
            self.make = lambda: sj.FeedForward(network, **sizes, rngs=rngs(0))
            indptr, indices = map(jnp.asarray, _rows(batch))
            given = (sj.CSR(None, indices, indptr, num_cols=_ITEMS),)

            def loss_of(model, x):
                return model.loss(x, x) / x.num_rows

        else:
            self._make_histories(width, dtype, negatives)
            return
        self._add_forms("", self.make, loss_of, given)

    def _make_histories(self, width: int, dtype: Any, negatives: int) -> None:
        """Makes models of histories. Models with events have a form for each kind of columns."""
        import jax.numpy as jnp
        from flax import nnx

        import sparsejax as sj

        name, batch, places = self.kind.split("-")[0], self.batch, self.places
        config = {"sasrec": sj.SASRecConfig, "hstu": sj.HSTUConfig}[name](
            max_length=places,
            width=width,
            heads=negatives // 256,
            dropout=_DROPOUT,
            temperature=0.1,
            negatives=negatives,
            dtype=dtype,
        )

        def made(events=None):
            sizes = {"items": self.items, "events": events}
            return sj.sequence.build_sequence_model(config, **sizes, rngs=nnx.Rngs(0))

        def loss_of(model, histories, times, columns, **more):
            times = times if name == "hstu" else None
            events = {} if columns is None else {"events": columns}
            return model.loss(histories, times, **events, **more)

        rows, times = histories(places, batch, self.items)
        given, self.make = (jnp.asarray(rows), jnp.asarray(times)), made
        targets = int((rows[:, 1:] >= 0).sum())
        exact = functools.partial(loss_of, max_targets=targets)
        if self.kind.endswith("events"):
            users = (
                targets + batch
            )  # with a user's place at the front, the first item is a target, too
            more = functools.partial(loss_of, max_targets=users)
            self._add_forms(", ids", made, exact, (*given, None))
            for form, sizes, own in _columns(rows.shape):
                columns = {key: jnp.asarray(value) for key, value in own.items()}
                loss = more if "users/plan" in own else exact
                make = functools.partial(made, sizes)
                self._add_forms(f", {form}", make, loss, (*given, columns))
            return
        self._add_forms("", made, exact, (*given, None))
        self._add_forms(", plain", made, loss_of, (*given, None), only=True)
        self.forms["recommend"] = self._recommend

    def _recommend(self) -> tuple[Any, Callable]:
        """Makes a function that ranks items for one full history."""
        import sparsejax as sj

        rng, items = np.random.default_rng(1), self.items
        if not hasattr(self, "_asked"):
            rows = rng.integers(0, items, self.places)
            times = np.cumsum(rng.exponential(3e4, self.places))
            model: Any = self.make()
            self._asked = model, _dataset(rows[None], times[None], items)
        return sj.recommend(*self._asked, k=10, exclude=None), lambda: None

    def _add_forms(
        self, name: str, make: Callable, loss_of: Callable, given: tuple, only=False
    ) -> None:
        """Adds a form of the step compiled by `sj.jit`, and one compiled by `nnx.jit`."""
        from flax import nnx

        import sparsejax as sj

        def written(model, optimizer, *given):
            loss, grads = optimizer.value_and_grad(lambda m: loss_of(m, *given))(model)
            optimizer.update(model, grads)
            return loss

        def form(jit, rule=None):
            state: list[Any] = []

            def call():
                if not state:
                    model = make()
                    model.train()
                    adam = sj.optimizers.adam(_RATE)
                    optimizer = sj.Optimizer(model, rule or adam)
                    state[:] = model, optimizer, jit(written)
                loss = state[2](state[0], state[1], *given)
                return loss, loss.block_until_ready

            return call

        self.forms[f"own, sj.jit{name}"] = form(sj.jit)
        self._sgd = form(sj.jit, sj.optimizers.sgd(_SGD_RATE))
        if not (only or name):
            nnx_jit = lambda f: nnx.jit(f, donate_argnums=(0, 1))
            self.forms["own, nnx.jit"] = form(nnx_jit)

    def losses(self, path: str) -> list[float]:
        """The losses of a DIN in 20 steps of SGD. Saves the first weights in the file, for
        torch.
        """
        from flax import nnx

        def weights(model):
            yield from (model.embeddings.table(name) for name in ("user", "item"))
            modules: Any = nnx.iter_modules(model)
            for _, part in modules:
                if hasattr(part, "kernel"):
                    yield from (part.kernel[...].T, part.bias[...])
                for i in range(part.count if hasattr(part, "biases") else 0):
                    for kernel, bias in zip(part.kernels, part.biases, strict=True):
                        yield from (kernel[...][i].T, bias[...][i])

        np.savez(path, *weights(self.make()))
        return [float(self._sgd()[0]) for _ in range(20)]

    def profile(self, step: Callable) -> dict:
        """Milliseconds of the kernels of a step, and microseconds of the largest kernels."""
        import jax
        from timing import time_kernels

        if jax.default_backend() != "gpu":
            return {}
        kernels = time_kernels(lambda i: step()[1](), 5)
        milliseconds = round(sum(kernels.values()) / 1e3, 3)
        return {"kernels": milliseconds, "largest": largest(kernels, 8)}

    def fits(self) -> list[dict]:
        """For each training with `fit`: examples in a second, and the fraction of time in which
        the GPU works.
        """
        import jax
        from timing import time_kernels

        import sparsejax as sj

        if self.kind in _DINS or self.kind.endswith("events"):
            return []
        data, found, on_gpu = self._data(), [], jax.default_backend() == "gpu"
        for rule in (sj.optimizers.adagrad(_RATE), sj.optimizers.adam(_RATE)):
            model = self.make()
            optimizer = sj.Optimizer(model, rule)
            settings = {"batch_size": self.batch, "num_epochs": 4}
            history = sj.fit(model, optimizer, data, **settings)
            speeds = [entry["examples_per_second"] for entry in history[1:]]
            milliseconds = 1e3 * self.batch / statistics.median(speeds)
            result: dict[str, Any] = {"form": f"fit, {rule.name}"}
            result |= {"examples_per_second": round(statistics.median(speeds))}
            result |= {"milliseconds": round(milliseconds, 4)}
            if on_gpu:
                fit = functools.partial(sj.fit, model, optimizer, data, **settings)
                steps = -(-data.num_rows // self.batch) * settings["num_epochs"]
                times = {
                    n: t / steps
                    for n, t in time_kernels(lambda _, f=fit: f(), 1, warm=0).items()
                }
                kernels = sum(times.values()) / 1e3
                result |= {"kernels": round(kernels, 4), "largest": largest(times, 12)}
                result["share_of_gpu"] = round(kernels / milliseconds, 3)
            found.append(result)
        return found

    def _data(self) -> Any:
        """Draws data for several hundred batches."""
        import jax

        import sparsejax as sj

        steps = 256 if jax.default_backend() == "gpu" else 16
        rows = min(self.batch * steps, 2**21)
        if self.kind == "clicks":
            dense, ids, labels = _clicks(rows)
            schema = sj.ClickSchema(
                "click",
                {f"d{i}": sj.data.DenseColumn() for i in range(_DENSE)},
                {f"C{i}": sj.data.HashedColumn(n) for i, n in enumerate(_ROWS)},
            )
            columns = {f"C{i}": ids[:, i] for i in range(len(_ROWS))}
            return sj.ClickDataset(labels, dense, columns, schema, {})
        if self.kind == "items":
            indptr, indices = _rows(min(rows, 131_072))
            matrix = sj.CSR(None, indices, indptr, num_cols=_ITEMS).to_scipy()
            return sj.SparseDataset.from_scipy(matrix)
        items, times = histories(self.places, rows, self.items)
        return _dataset(items, times, self.items)


def _dataset(rows: np.ndarray, times: np.ndarray, items: int) -> Any:
    """Converts histories, in which padding is negative, to a dataset."""
    import sparsejax as sj

    kept = rows >= 0
    return sj.SequenceDataset(
        np.concatenate([[0], np.cumsum(kept.sum(1))]),
        rows[kept],
        np.arange(len(rows)).astype(str),
        np.arange(items).astype(str),
        times[kept].astype(np.float64),
    )


def _columns(shape: tuple[int, ...]) -> Iterator[tuple[str, Any, dict]]:
    """Yields columns that models read besides ids: a name, its sizes, and the columns."""
    from sparsejax.sequence.events import Categories, EventSizes

    ids = tuple(Categories(f"c{n}", f"c{n}", n, None) for n in (1000, 100, 24))
    users = EventSizes((), (Categories("plan", "plan", 100, None),))
    rng = np.random.default_rng(0)
    every = {each.name: rng.integers(0, each.size, shape) for each in ids}
    every["users/plan"] = rng.integers(0, 100, shape[0])
    for form, sizes in {
        "columns": EventSizes((), ids),
        "users": EventSizes((), ids, users=users),
        "context": EventSizes((), ids, (ids[-1].name,), users),
    }.items():
        names = [*sizes.shapes, *sizes.user_shapes]
        yield form, sizes, {name: every[name] for name in names}


class _Torch:
    """The other side: the model in torch, eager and compiled."""

    fits = list

    def __init__(
        self, kind: str, batch: int, width: int, dtype: str, places: int, negatives: int
    ):
        import torch  # pyrefly: ignore[missing-import]
        from peers import DIN, Autoencoder, Clicks, Sequences

        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            torch.set_num_threads(2)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.manual_seed(0)
        place = lambda array: torch.from_numpy(array).to(device)
        long = lambda array: place(array.astype(np.int64))
        self._torch, self._on_gpu, drawn = torch, device == "cuda", tuple
        if kind in _DINS:
            top = kind.partition("-")[2]
            make: Callable = lambda: DIN(_FACTS, _IDS, _DIM, (80, 40), (64, 32), top)
            dense, *ids, labels = _examples(batch, places, 2 * bool(top))
            given: tuple = place(dense), *map(long, ids), place(labels)
        elif kind == "clicks":
            make = lambda: Clicks(_DENSE, _ROWS, _DIM, _LAYERS)
            dense, ids, labels = _clicks(batch)
            given = place(dense), long(ids), place(labels)
        elif kind == "items":
            make = lambda: Autoencoder(_ITEMS, _HIDDEN)
            indptr, indices = _rows(batch)
            lengths = np.diff(indptr)
            rows = np.repeat(np.arange(batch), lengths)
            given = long(indices), long(indptr[:-1]), long(rows), place(lengths)
        else:
            if kind.endswith("events") or places > 1024:
                # For long histories the eager form is omitted: 4,096 squared padded scores need
                # too much memory.
                self.forms = {}
                return
            items, sizes = (
                _items(batch, negatives),
                {"width": width, "heads": negatives // 256},
            )
            make = lambda: Sequences(kind, items, places, dropout=_DROPOUT, **sizes)
            events, times = histories(places, batch, items)
            targets = events[:, 1:].reshape(-1)
            where = np.flatnonzero(targets >= 0)
            shown = long(events[:, :-1].clip(min=0)), place(times[:, :-1].copy())
            given = *shown, long(where), long(targets[where])
            drawn = lambda: (torch.randint(items, (negatives,), device=device),)

        def form(compiled, path=None):
            state: list[Any] = []

            def call():
                if not state:
                    net = make().to(device)
                    optimizer = torch.optim.Adam(net.parameters(), _RATE, fused=True)
                    if path is not None:
                        optimizer = torch.optim.SGD(net.parameters(), _SGD_RATE)
                        weights = np.load(path).values()
                        for mine, read in zip(net.parameters(), weights, strict=True):
                            mine.data.copy_(place(read))
                    state[:] = torch.compile(net) if compiled else net, optimizer
                net, optimizer = state
                half = dtype == "bfloat16"
                with torch.autocast(device, torch.bfloat16, enabled=half):
                    loss = net(*given, *drawn())
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                return loss, torch.cuda.synchronize if self._on_gpu else loss.item

            return call

        self.forms = {"torch, eager": form(False), "torch, compiled": form(True)}
        self._form = form

    def losses(self, path: str) -> list[float]:
        """The losses in 20 steps of SGD by torch, from the weights that our side saved."""
        step = self._form(False, path)
        return [float(step()[0].detach()) for _ in range(20)]

    def profile(self, step: Callable) -> dict:
        """Milliseconds of the kernels of a step."""
        from timing import time_torch

        if not self._on_gpu:
            return {}
        return {"kernels": round(time_torch(step, [()], rounds=2).kernel / 1e3, 3)}


if __name__ == "__main__":
    main()
