"""Quality on Gowalla with the defaults of `sparsejax train`, for several seeds.

    python benchmarks/quality.py run --data FOLDER [--seeds N] [--commit NAME]
    python benchmarks/quality.py table

FOLDER holds `train.txt.xz` and `test.txt.xz` of Gowalla in the split of the LightGCN paper.
With each seed a model is trained on all of `train`. It is measured on `test` once after 20
epochs and once after 50: all items are ranked, except those that a user has in `train`.
Nothing is chosen on `test`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import sys

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import RESULTS, origin, table, write_section

_RESULTS = RESULTS / "quality.json"
_EPOCHS = (20, 50)
_METRICS = ("recall@20", "ndcg@20")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--data", type=pathlib.Path, help="folder of the files")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=pathlib.Path, default=_RESULTS)
    arguments = parser.parse_args()
    if arguments.action == "table":
        _write_table(json.loads(_RESULTS.read_text()))
        return
    if arguments.data is None:
        parser.error("run needs --data FOLDER")
    report = _run(arguments.data, arguments.seeds)
    report["commit"] = arguments.commit
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def _run(folder: pathlib.Path, seeds: int) -> dict:
    import jax

    import sparsejax as sj

    train = sj.read(folder / "train.txt.xz")
    test = sj.read(folder / "test.txt.xz", features=train)
    results = []
    for seed in range(seeds):
        config = sj.NetworkConfig.autoencoder()
        model, optimizer = sj.build(config, train, seed=seed)
        result: dict[str, float] = {"seed": seed}

        def measure(step, entry, *, result=result, model=model, optimizer=optimizer):
            if entry["epoch"] in _EPOCHS:
                measured = sj.evaluate(model, train, test, k=20, optimizer=optimizer)
                for metric in _METRICS:
                    result[f"{metric}, {entry['epoch']} epochs"] = measured[metric]

        sj.fit(model, optimizer, train, num_epochs=max(_EPOCHS), seed=seed, log=measure)
        results.append(result)
        print(json.dumps(result), flush=True)
    return {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/quality.py run",
        "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
        "results": results,
    }


def _write_table(report: dict) -> None:
    """Mean and sample standard deviation over the seeds."""
    results = report["results"]
    rows = []
    for epochs in _EPOCHS:
        columns: list[object] = [epochs]
        for metric in _METRICS:
            values = [result[f"{metric}, {epochs} epochs"] for result in results]
            mean, spread = statistics.mean(values), statistics.stdev(values)
            columns.append(f"{mean:.4f} ± {spread:.4f}")
        rows.append(columns)
    lines = table(["epochs", "recall@20", "nDCG@20"], rows)
    seeds = f"{len(results)} seeds: mean ± standard deviation. "
    write_section("quality", [*lines, "", seeds + origin(report)])


if __name__ == "__main__":
    main()
