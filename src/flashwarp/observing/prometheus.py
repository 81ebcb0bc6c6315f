"""Counters for Prometheus, by its client library, which is an extra: `prometheus_client`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flashwarp.errors import MissingFileError
from flashwarp.observing.counting import counters

try:
    from prometheus_client.core import REGISTRY, CounterMetricFamily, GaugeMetricFamily
except ImportError as error:
    why = "metrics need prometheus_client: pip install 'flashwarp[prometheus]'"
    raise MissingFileError(why) from error

if TYPE_CHECKING:
    from prometheus_client.core import CollectorRegistry, Metric

_LABELS = ("kind", "route", "device", "disks")
_COUNTERS = {
    "bytes_read": "Bytes from the storage.",
    "bytes_written": "Bytes to the storage.",
    "bytes_used": "Bytes that callers requested.",
    "hits": "Line accesses that found their line in the cache.",
    "misses": "Line accesses that fetched their line, or waited for it.",
    "evictions": "Lines that were evicted from their frame.",
    "write_backs": "Dirty lines written to the storage.",
    "commands": "NVMe commands submitted.",
    "helps": "How often a warp that waited drained completions.",
    "errors": "Commands, flushes and prefetches that failed.",
}


class Collector:
    """Collects what `flashwarp.observing.counters` returns, at each scrape and at no other time.

    Give it to a registry of prometheus_client, or call `register`.
    """

    def describe(self) -> list[Metric]:
        """Return nothing: a registry need not read counters when it gets the collector."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield a counter for each count, and gauges of what is open and pinned."""
        found = counters()
        sums = found["sums"]
        for name, what in _COUNTERS.items():
            counter = CounterMetricFamily(f"flashwarp_{name}", what, labels=_LABELS)
            for each in sums:
                counter.add_metric(_labels(each), each.get(name, 0))
            yield counter
        opened = GaugeMetricFamily("flashwarp_open", "What is open now.", labels=_LABELS)
        for each in sums:
            opened.add_metric(_labels(each), each["open"])
        yield opened
        for each, label, what in (
            ("pinned", "use", "Host memory that is pinned, by use."),
            ("memory", "kind", "Resident host memory; the kernel takes back what is mapped files."),
        ):
            gauge = GaugeMetricFamily(f"flashwarp_{each}_bytes", what, labels=(label,))
            for name, nbytes in found[each].items():
                gauge.add_metric((name,), nbytes)
            yield gauge


def _labels(sums: dict[str, Any]) -> tuple[str, ...]:
    return tuple(sums[name] for name in _LABELS)


def register(registry: CollectorRegistry = REGISTRY) -> Collector:
    """Let a registry of prometheus_client collect the counters of this process.

    Parameters
    ----------
    registry : prometheus_client.CollectorRegistry, optional
        Default: the one that `prometheus_client.start_http_server` serves.

    Returns
    -------
    Collector
        For the registry's `unregister`.
    """
    collector = Collector()
    registry.register(collector)
    return collector
