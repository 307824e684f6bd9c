"""A model that is trained, exported and served; and a shop that asks it.

Run: python examples/10_serve.py (needs pip install 'sparsejax[serve]')
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

from flax import nnx

import sparsejax as sj


def export(path: str, num_epochs: int) -> None:
    """Trains on the bundled data, and writes what the service needs."""
    data = sj.datasets.msweb().train
    config = sj.NetworkConfig.autoencoder(hidden=(64,))
    size = data.num_features
    model = sj.FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
    sj.fit(model, optimizer, data, num_epochs=num_epochs)
    sj.export_predictor(model, path, k=20, names=data, batch_size=64)


def ask(address: str, names: list[str], k: int) -> list[str]:
    """The names of the best items for somebody who has looked at some."""
    items = {
        "name": "items",
        "datatype": "BYTES",
        "shape": [len(names)],
        "data": names,
    }
    request = json.dumps({"inputs": [items], "parameters": {"k": k}}).encode()
    url = f"{address}/v2/models/model/infer"
    with urllib.request.urlopen(url, request, timeout=10) as answer:
        outputs = json.load(answer)["outputs"]
    return next(output["data"] for output in outputs if output["name"] == "items")


def is_ready(address: str) -> bool:
    """Whether the service has compiled its programs."""
    try:
        with urllib.request.urlopen(f"{address}/v2/health/ready", timeout=10):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def main(num_epochs: int = 10, port: int = 8000) -> None:
    export("model.predictor", num_epochs)
    # In a shell: sparsejax serve model.predictor --port 8000
    command = [sys.executable, "-m", "sparsejax", "serve", "model.predictor"]
    service = subprocess.Popen([*command, "--port", str(port)])
    address = f"http://127.0.0.1:{port}"
    try:
        while not is_ready(address):
            if service.poll() is not None:
                raise SystemExit("the service has ended; it says why above")
            time.sleep(0.1)
        print("recommended:", ask(address, ["/products", "/support"], k=3))
        print("to somebody new:", ask(address, [], k=3))
    finally:
        service.terminate()  # SIGTERM: it finishes what it has begun
        service.wait()


if __name__ == "__main__":
    main()
