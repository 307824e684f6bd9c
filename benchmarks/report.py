"""Code that benchmarks share: parts in separate processes, results, tables."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import importlib.metadata
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_HERE = pathlib.Path(__file__).resolve().parent
RESULTS = _HERE / "results"
# Imports find the packages of this checkout first.
sys.path.insert(1, str(_HERE.parent))

# Bytes that a copy on the device reads and writes in a second on an H200.
COPY_BYTES_PER_SECOND = 4.3e12

_COLUMNS = 12  # if results have more numbers than this, each number gets a table row
_LIBRARIES = "jax", "optax", "torch", "cupy", "fbgemm_gpu", "duckdb", "pyarrow"


def command(
    doc: str | None,
    script: str,
    parts: Mapping[str, Mapping[str, str]],
    measure: Callable[..., Iterable[dict]],
    write_table: Callable[[dict], None] | None = None,
    *,
    by_operation: bool = False,
) -> None:
    """The command line of a benchmark: `run`, `table`, and its parts one by one.

    Args:
      doc: text of `--help`.
      script: path of the benchmark; the file of its results has an equal name.
      parts: see `run_parts`.
      measure: function that yields the results of a part; each gets `versions`.
      write_table: called with the committed report; by default `print_results`.
      by_operation: whether results have the names of operations, which parts begin with.
    """
    files: dict[pathlib.Path, dict[str, Mapping[str, str]]] = {}
    for part, environment in parts.items():
        name = part.split()[0] if by_operation else pathlib.Path(script).stem
        files.setdefault(RESULTS / f"{name}.json", {})[part] = environment
    parser = argparse.ArgumentParser(description=doc)
    actions = ["run", "table", *parts]
    parser.add_argument("action", choices=actions, metavar="{run,table,PART}")
    parser.add_argument(
        "--only", nargs="+", default=["*"], help="parts, with wildcards"
    )
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.action not in ("run", "table"):
        for result in measure(arguments.action):
            emit({"versions": versions(), **result})
        return
    if arguments.action == "table":
        for results in files:
            (write_table or print_results)(json.loads(results.read_text()))
        return
    wanted: dict[pathlib.Path, dict[str, Mapping[str, str]]] = {}
    for results, given in files.items():
        for part, environment in given.items():
            if any(fnmatch.fnmatch(part, pattern) for pattern in arguments.only):
                wanted.setdefault(results, {})[part] = environment
    if not wanted:
        parser.error(f"--only names none of {', '.join(parts)}")
    if arguments.output and len(wanted) > 1:
        parser.error("--output takes the results of one operation: name it by --only")
    for results, some in wanted.items():
        run_parts(script, some, arguments.output or results, arguments.commit)


def versions() -> dict[str, str]:
    """The versions of libraries that this process has imported, and its device."""
    loaded = {name: sys.modules[name] for name in _LIBRARIES if name in sys.modules}
    found = {
        name: getattr(module, "__version__", "") or importlib.metadata.version(name)
        for name, module in loaded.items()
    }
    if "torch" in found:
        import torch  # pyrefly: ignore[missing-import]

        if torch.cuda.is_available():
            found["device"] = torch.cuda.get_device_name()
    elif "jax" in found:
        import jax

        found["device"] = jax.devices()[0].device_kind
    return found


def save(found: Mapping, output: str | pathlib.Path | None) -> None:
    """Prints results, and writes them into a JSON file if one is named."""
    print(text := json.dumps(found, indent=2))
    if output:
        pathlib.Path(output).write_text(text + "\n")


def mean(values: Sequence[float], digits: int = 4) -> str:
    """The mean as a table cell; for several values with the standard deviation."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def grouped(results: Iterable[dict], *names: str) -> list[tuple[tuple, list[dict]]]:
    """Groups results whose values of some names are equal; returns (values, results) pairs."""
    found: dict[tuple, list[dict]] = {}
    for row in results:
        found.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return [*found.items()]


def largest(times: Mapping[str, float], count: int) -> dict[str, float]:
    """The kernels that take longest, with shortened names."""
    found = sorted(times.items(), key=lambda item: -item[1])[:count]
    return {name[:80]: round(each, 1) for name, each in found}


def emit(result: dict) -> None:
    """Sends a result to the process that started this part. "versions" is sent separately."""
    print("RESULT " + json.dumps(result), flush=True)


def write_report(
    output: pathlib.Path, line: str, commit: str, results: list[dict], **more
) -> None:
    """Writes results and their origin into a JSON file; `line` is the script with its
    arguments.
    """
    report = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": f"python benchmarks/{line}",
        "versions": more.pop("versions", None) or versions(),
        **more,
        "results": results,
    }
    output.write_text(json.dumps(report, indent=1) + "\n")


def run_parts(
    script: str,
    parts: Mapping[str, Mapping[str, str]],
    output: pathlib.Path,
    commit: str,
) -> None:
    """Runs `script PART` for each part and collects what they emit.

    Each part is a process, because JAX and torch do not share a GPU's memory well, and some flags
    apply to a whole process.

    Args:
      script: path of the benchmark.
      parts: environment variables of each part.
      output: JSON file, which is rewritten after each part, so that an interrupted run leaves
        results. Results of other parts in it ("of_part") are kept.
      commit: name of the commit, for the report.
    """
    results, versions = [], {}
    if output.exists():
        old = json.loads(output.read_text()).get("results", [])
        results = [r for r in old if r.get("of_part", "") not in ("", *parts)]
    today = {"date": datetime.date.today().isoformat(), "commit": commit}
    for part, environment in parts.items():
        preallocate = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(
            [sys.executable, script, part],
            env={**os.environ, **preallocate, **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        for line in done.stdout.splitlines():
            if line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
                versions |= result.pop("versions")
                results.append(result | (today if "of_part" in result else {}))
        if done.returncode:
            print(f"part {part} ended with code {done.returncode}", file=sys.stderr)
        ceiling = {"ceiling_bytes_per_second": COPY_BYTES_PER_SECOND}
        line = f"{pathlib.Path(script).name} run"
        write_report(output, line, commit, results, versions=versions, **ceiling)


def peak_host_bytes() -> int:
    """The most host memory that this process has had (VmHWM)."""
    status = pathlib.Path("/proc/self/status").read_text()
    (peak,) = (line.split()[1] for line in status.splitlines() if "VmHWM" in line)
    return int(peak) * 1024


@contextlib.contextmanager
def reported(*names: str) -> Iterator[None]:
    """While this context is open, the failure of a peer is printed, and the benchmark
    continues.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001
        line = str(error).strip().splitlines()[:1]
        print(f"{' '.join(names)}: {type(error).__name__} {line}", file=sys.stderr)


def origin(report: Mapping) -> str:
    """A line with the versions of libraries, the date and the commit of a report."""
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    commit = f", commit {report['commit']}" if "commit" in report else ""
    return f"{versions}; {report['date']}{commit}."


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def print_results(report: Mapping) -> None:
    """Prints a table with a row for each result, and a column for each value that is not a list or
    dict.
    """
    results = report["results"]
    plain = str, int, float, type(None)
    names = {n: 0 for r in results for n, v in r.items() if isinstance(v, plain)}
    rows = [[_text(r.get(name)) for name in names] for r in results]
    write_section("results", [origin(report), "", *table(list(names), rows)])


def print_means(report: Mapping, *names: str) -> None:
    """Prints means over the results that have equal values of some names."""
    rows: list[list[object]] = []
    keys = [n for n in names if any(n in r for r in report["results"])]
    flat = [(r, _numbers(r)) for r in report["results"]]
    columns = list(
        dict.fromkeys(n for _, found in flat for n in found if n not in keys)
    )
    columns = [n for n in columns if n != "seed"]
    for key, some in grouped((r | found for r, found in flat), *keys):
        values = ([r[n] for r in some if n in r] for n in columns)
        cells = [mean(v) if v else "-" for v in values]
        if len(columns) <= _COLUMNS:
            rows.append([*key, len(some), *cells])
        else:
            pairs = zip(columns, cells, strict=True)
            rows += [[*key, len(some), *each] for each in pairs if each[1] != "-"]
    heads = columns if len(columns) <= _COLUMNS else ["number", "mean"]
    lines = table([*keys, "results", *heads], rows)
    write_section("means", [origin(report), "", *lines])


def _numbers(result: Mapping) -> dict[str, float]:
    """The numbers in a result, including those in short lists."""
    found: dict[str, float] = {}
    for name, value in result.items():
        if isinstance(value, list) and len(value) <= 5:
            found |= _numbers({f"{name} {i}": v for i, v in enumerate(value)})
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found


def _text(value: object) -> object:
    """Converts a value to a table cell: floats have five digits."""
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else value


def write_section(name: str, lines: Sequence[str]) -> None:
    """Prints lines below the name of their section."""
    print(f"## {name}\n", *lines, sep="\n")
