"""Prometheus metrics, under vLLM's names where the meaning is vLLM's, so that its dashboards work.

Gauges and counters of the engine come with each step's frame; latencies are measured here, where clients feel them.
"""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)

# field of the engine's stats -> (name of the metric, help)
_GAUGES = {
    "running": ("vllm:num_requests_running", "Requests with a slot in the engine."),
    "waiting": ("vllm:num_requests_waiting", "Requests in the queue."),
    "cache_usage": ("vllm:kv_cache_usage_perc", "Pages of the latent cache in use by requests; 1 is all."),
    "pages_in_use": ("dsv3:pages_in_use", "Pages of the latent cache held by requests."),
}
_COUNTERS = {
    "prefix_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("vllm:prefix_cache_hits", "Of these, tokens found."),
    "preemptions": ("vllm:num_preemptions", "Requests put back into the queue for want of pages."),
    "recompilations": ("dsv3:recompilations", "Programs compiled after warm-up; stays 0."),
    "steps": ("dsv3:engine_steps", "Steps the engine has run."),
    "host_time_sum": ("dsv3:engine_host_seconds", "The host's time in steps, its waits for the device left out."),
}
# The same for experts spread over devices, which not every server has.
_EXPERT_GAUGES = {
    "experts_balancedness": ("dsv3:expert_balancedness", "Mean over maximum of the devices' expert load; 1 is even."),
    "experts_balancedness_min": ("dsv3:expert_balancedness_min", "The same of the most uneven layer."),
}
_EXPERT_COUNTERS = {
    "experts_rebalances": ("dsv3:expert_rebalances", "Times that experts were moved to even the load."),
    "experts_moved": ("dsv3:experts_moved", "Slots that got another expert."),
    "experts_checksum_failures": ("dsv3:expert_checksum_failures", "Layers not moved: they were damaged on the way."),
    "experts_extra_rounds": ("dsv3:dispatch_extra_rounds", "Rounds of dispatch beyond the first, of all layers."),
    "experts_in_node_bytes": ("dsv3:dispatch_in_node_bytes", "Sent within nodes by dispatch and combine."),
    "experts_cross_node_bytes": ("dsv3:dispatch_cross_node_bytes", "Sent between nodes by dispatch and combine."),
}
_HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds", "From the request's arrival to its first token."),
    "itl": ("vllm:inter_token_latency_seconds", "Between two outputs of one sequence, per token."),
    "e2e": ("vllm:e2e_request_latency_seconds", "From the request's arrival to its last token."),
    "queue": ("vllm:request_queue_time_seconds", "From the engine's taking the request to its first slot."),
}


class Metrics:
    """All metrics of one server, labelled with the model's name."""

    def __init__(self, model_name: str):
        disable_created_metrics()  # a second series for each, which nobody reads
        self.registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._seen: dict[str, float] = {}
        self._add(_GAUGES, _COUNTERS)
        self._times = {key: self._make(Histogram, *spec, buckets=_SECONDS) for key, spec in _HISTOGRAMS.items()}
        self.prompt_tokens = self._make(Counter, "vllm:prompt_tokens", "Prompt tokens of requests that were taken.")
        self.generation_tokens = self._make(Counter, "vllm:generation_tokens", "Tokens sampled for clients.")
        self._success = self._counter_by("vllm:request_success", "Finished sequences.", "finished_reason")
        self._rejections = self._counter_by("vllm:admission_rejections", "Requests refused with 503.", "reason")
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(**self._label, finished_reason=reason)

    def update(self, stats: Mapping[str, float]) -> None:
        """Takes the engine's numbers; those without a metric are ignored."""
        if "experts_balancedness" in stats and "experts_balancedness" not in self._gauges:
            self._add(_EXPERT_GAUGES, _EXPERT_COUNTERS)
        for key, gauge in self._gauges.items():
            if key in stats:
                gauge.set(stats[key])
        for key, counter in self._counters.items():
            new = stats.get(key, 0.0)
            if new > self._seen[key]:
                counter.inc(new - self._seen[key])
                self._seen[key] = new

    def _add(self, gauges: Mapping[str, tuple[str, str]], counters: Mapping[str, tuple[str, str]]) -> None:
        self._gauges |= {key: self._make(Gauge, *spec) for key, spec in gauges.items()}
        self._counters |= {key: self._make(Counter, *spec) for key, spec in counters.items()}
        self._seen |= dict.fromkeys(counters, 0.0)

    def observe(self, what: str, seconds: float) -> None:
        """Adds a latency; `what` is "ttft", "itl", "e2e" or "queue"."""
        self._times[what].observe(seconds)

    def finished(self, reason: str) -> None:
        self._success.labels(**self._label, finished_reason=reason).inc()

    def rejected(self, reason: str) -> None:
        self._rejections.labels(**self._label, reason=reason).inc()

    def text(self) -> bytes:
        """The exposition in Prometheus's text format."""
        return generate_latest(self.registry)

    def _make(self, kind, name: str, text: str, **options):
        return kind(name, text, list(self._label), registry=self.registry, **options).labels(**self._label)

    def _counter_by(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, [*self._label, label], registry=self.registry)
