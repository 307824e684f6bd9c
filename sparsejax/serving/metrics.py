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

        self._requests = Counter(
            "sparsejax_requests",
            "Requests for predictions by protocol and status",
            ["protocol", "code"],
            registry=registry,
        )
        # Counters of the protocols and statuses so far; looking them up by label takes longer.
        self._of_kind: dict[tuple[str, int], Counter] = {}
        self._seconds = histogram("request_seconds", "Of requests, whole", _SECONDS)
        self._queue = histogram("queue_seconds", "Waiting for a batch", _SECONDS)
        self._packing = histogram("packing_seconds", "Packing a batch", _SECONDS)
        self._device = histogram("device_seconds", "A batch on the device", _SECONDS)
        self._rows = histogram("batch_rows", "Rows of a batch", _COUNTS)
        self._entries = histogram("batch_entries", "Entries of a batch", _COUNTS)
        self._unknown = Counter(
            "sparsejax_unknown_names", "Names that the model lacks", registry=registry
        )
        self._strangers = Counter(
            "sparsejax_unknown_users",
            "Users whom the histories do not know",
            registry=registry,
        )
        self._compilations = Counter(
            "sparsejax_compilations", "Programs compiled", registry=registry
        )
        self._whole_passes = Counter(
            "sparsejax_whole_passes",
            "Batches whose answer the items in int8 did not prove",
            registry=registry,
        )
        self._reloads = Counter(
            "sparsejax_reloads",
            "Versions that were loaded, or could not be",
            ["result"],
            registry=registry,
        )
        self._changes = Counter(
            "sparsejax_changes",
            "Looks that took changes of tables, or could not",
            ["result"],
            registry=registry,
        )
        self._change = Gauge(
            "sparsejax_changes_number",
            "Number of the last changes that were taken",
            registry=registry,
        )
        Gauge(
            "sparsejax_log_lines_dropped",
            "Lines of the log for which there was no room, as nobody read those before",
            registry=registry,
        ).set_function(logs.dropped)
        self._model = Gauge(
            "sparsejax_model_version",
            "1 for the version that serves",
            ["model", "version"],
            registry=registry,
        )
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
        """Counts users without saved history."""
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
