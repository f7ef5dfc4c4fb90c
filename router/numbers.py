"""What a router counts, as Prometheus metrics."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from router.pool import Pool


class Numbers:
    """Counters, and what the pools say when somebody asks."""

    def __init__(self, pools: tuple[Pool, ...]):
        self._pools = pools
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.requests = self._counter("requests", "Requests by status, 499 where the client had gone.", "status")
        self.sent = self._counter("sent", "Requests sent to an instance, resumed ones among them.", "instance")
        self.broken = self._counter("broken", "Answers that an instance has not told to the end.", "instance")
        self.resumed = self._counter("resumed", "Requests that went on elsewhere, as often as they did.")
        self.computed = self._counter("prefilled", "Prompts that a prefill instance has computed.")

    def forget(self, url: str) -> None:
        """Drops what was counted of an instance that has left, so that changing addresses do not add up."""
        for counter in (self.sent, self.broken):
            counter.remove(url)

    def text(self) -> bytes:
        """Returns the exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the gauges (prometheus_client calls this)."""
        up = GaugeMetricFamily("dsv3:router_instance_up", "1 where an instance is well.", labels=["instance"])
        running = GaugeMetricFamily("dsv3:router_running", "Requests of this router there.", labels=["instance"])
        tells = GaugeMetricFamily("dsv3:router_instance_tells", "1 where its KV events are heard.", labels=["instance"])
        pages = GaugeMetricFamily("dsv3:router_instance_pages", "Pages that it says it holds.", labels=["instance"])
        for instance in (each for pool in self._pools for each in pool.instances):
            up.add_metric([instance.url], float(instance.status == "ok"))
            running.add_metric([instance.url], instance.load.requests)
            tells.add_metric([instance.url], float(instance.tells))
            pages.add_metric([instance.url], len(instance.listener.held) if instance.listener is not None else 0)
        waiting = sum(pool.num_waiting for pool in self._pools)
        yield from (up, running, tells, pages)
        yield GaugeMetricFamily("dsv3:router_waiting", "Requests in the queue.", value=waiting)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"dsv3:router_{name}", meaning, labels, registry=self._registry)
