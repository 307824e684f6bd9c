"""Metrics of a service, in Prometheus' text format."""

from __future__ import annotations

import jax
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sparsejax.serving import logs
from sparsejax.serving.batcher import Batch
from sparsejax.serving.engine import WHOLE_PASS

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_SECONDS = [n * 10.0**e for e in range(-4, 1) for n in (1, 2.5, 5)] + [10.0]
_COUNTS = [4.0**n for n in range(10)]
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Metrics:
    """Counters and histograms of one service."""

    def __init__(self):
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: list[float]) -> Histogram:
            name = f"sparsejax_{name}"
            return Histogram(name, text, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sparsejax_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"sparsejax_{name}", text, labels, registry=registry)

        text = "Requests for predictions by protocol and status"
        self._requests = counter("requests", text, "protocol", "code")
        # Counters by protocol and status: finding one here takes less time than by its labels.
        self._of_kind: dict[tuple[str, int], Counter] = {}
        self._seconds = histogram("request_seconds", "Of requests, whole", _SECONDS)
        self._queue = histogram("queue_seconds", "Waiting for a batch", _SECONDS)
        self._packing = histogram("packing_seconds", "Packing a batch", _SECONDS)
        self._device = histogram("device_seconds", "A batch on the device", _SECONDS)
        self._rows = histogram("batch_rows", "Rows of a batch", _COUNTS)
        self._entries = histogram("batch_entries", "Entries of a batch", _COUNTS)
        self._unknown = counter("unknown_names", "Names that the model lacks")
        text = "Users whom neither the histories nor the columns of users have"
        self._strangers = counter("unknown_users", text)
        self._compilations = counter("compilations", "Programs compiled")
        text = "Batches whose answer the items in int8 did not prove"
        self._whole_passes = counter("whole_passes", text)
        text = "Versions that were loaded, or could not be"
        self._reloads = counter("reloads", text, "result")
        text = "Looks that took changes of tables, or could not"
        self._changes = counter("changes", text, "result")
        text = "Number of the last changes that were taken"
        self._change = gauge("changes_number", text)
        text = (
            "Lines of the log for which there was no room, as nobody read those before"
        )
        gauge("log_lines_dropped", text).set_function(logs.dropped)
        text = "1 for the version that serves"
        self._model = gauge("model_version", text, "model", "version")
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        jax.monitoring.register_event_listener(self._happened)

    def close(self) -> None:
        """Stops counting compilations and full passes, which are events of the whole process."""
        jax.monitoring.unregister_event_duration_listener(self._compiled)
        jax.monitoring.unregister_event_listener(self._happened)

    def _compiled(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            self._compilations.inc()

    def _happened(self, event: str, **_: str | int) -> None:
        if event == WHOLE_PASS:
            self._whole_passes.inc()

    def request(self, protocol: str, code: int, seconds: float) -> None:
        """Counts a request that was answered or refused."""
        count = self._of_kind.get((protocol, code))
        if count is None:
            count = self._of_kind[protocol, code] = self._requests.labels(
                protocol, code
            )
        count.inc()
        self._seconds.observe(seconds)

    def batch(self, batch: Batch) -> None:
        """Counts a batch."""
        for seconds in batch.waited:
            self._queue.observe(seconds)
        self._packing.observe(batch.packing)
        self._device.observe(batch.device)
        self._rows.observe(batch.rows)
        self._entries.observe(batch.entries)

    def unknown(self, names: int) -> None:
        """Counts names that the model does not know."""
        self._unknown.inc(names)

    def strangers(self, users: int) -> None:
        """Counts users whom neither the histories nor the columns of users have."""
        self._strangers.inc(users)

    def reload(self, result: str) -> None:
        """Counts an attempt to load a version, by its result."""
        self._reloads.labels(result).inc()

    def changes(self, result: str) -> None:
        """Counts an attempt to apply changes, by its result."""
        self._changes.labels(result).inc()

    def change(self, number: int) -> None:
        """Sets the number of the last changes that were applied."""
        self._change.set(number)

    def serving(self, model: str, version: str | None) -> None:
        """Sets the version that serves."""
        self._model.clear()
        if version is not None:
            self._model.labels(model, version).set(1)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)
