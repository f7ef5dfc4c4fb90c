"""Prometheus metrics, under vLLM's names where the meaning is vLLM's, so that its dashboards work.

The engine sends its numbers with its outputs to every API server process. Requests and latencies are counted by the API
servers and summed over all of them on a scrape: each has a row of an unnamed temporary file that all inherit and map.
So the counts of a process outlive it, and nothing is left when all have ended.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from dsv3.kv_cache.tiers.counts import CARRIERS, LOAD_BOUNDS
from dsv3.scheduler.request import HOST_TIME_BOUNDS, STEP_TOKENS_BOUNDS
from dsv3.server.config import ServerConfig
from dsv3.server.engine.messages import EngineInfo, Stats, number_in
from dsv3.server.tenants import MAX_TENANTS, Tenant, Tenants


class SharedNumbers:
    """`rows`: `size` float64 counters for each of `api_servers` processes; `mine` is that of number `api_server`.

    `descriptor` is the file that another API server process has made for the same shape; None makes a new one.
    """

    def __init__(self, size: int, api_servers: int = 1, api_server: int = 0, descriptor: int | None = None):
        num_bytes = max(1, api_servers * size) * 8
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(num_bytes)
                self.descriptor = os.dup(file.fileno())
        else:
            self.descriptor = descriptor
        self.rows = np.frombuffer(mmap.mmap(self.descriptor, num_bytes), np.float64).reshape(api_servers, size)
        self.mine = self.rows[api_server]


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
"""Upper bounds of the latency buckets, in seconds; the last bucket has none."""
TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)
"""Upper bounds of the buckets for lengths of prompts and answers, in tokens."""

# Field of the engine's stats -> (name of the metric, help).
_GAUGES = {
    "running": ("vllm:num_requests_running", "Requests with a slot in the engine."),
    "waiting": ("vllm:num_requests_waiting", "Requests in the queue."),
    "cache_usage": ("vllm:kv_cache_usage_perc", "Pages of the latent cache in use by requests; 1 is all."),
    "pages_in_use": ("dsv3:pages_in_use", "Pages of the latent cache held by requests."),
}
_COUNTERS = {
    "prefix_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("vllm:prefix_cache_hits", "Of these, tokens found."),
    "preemptions": ("vllm:num_preemptions", "Requests put back into the queue because pages ran out."),
    "recompilations": ("dsv3:recompilations", "Programs compiled after warm-up; stays 0."),
    "steps": ("dsv3:engine_steps", "Steps the engine has run."),
    "host_time_sum": ("dsv3:engine_host_seconds", "The host's time in steps, its waits for the device left out."),
}
_STEP_TOKENS = ("vllm:iteration_tokens_total", "Tokens of prompts and answers that a step gave.")
_CACHE_CONFIG = ("vllm:cache_config_info", "What the cache is, in its labels; a block is a page.")
_ENGINE_UP = ("dsv3:engine_up", "1: this one of several engines is ready.")
_FALLBACKS = ("dsv3:kernel_fallback", "1 for an operation whose kernel has failed its check, and what runs instead.")
_WEIGHTS = ("dsv3:weight_version_info", "What the weights are called, in its label.")
_HOST_TIME = ("dsv3:engine_step_host_seconds", "The host's time per step, its wait for the device left out.")
# The same for experts spread over devices, where they are.
_EXPERT_GAUGES = {
    "experts_balancedness": ("dsv3:expert_balancedness", "Mean over maximum of the devices' expert load; 1 is even."),
    "experts_balancedness_min": ("dsv3:expert_balancedness_min", "The same of the most uneven layer."),
}
_EXPERT_LAYERS = ("dsv3:expert_layer_balancedness", "The same by MoE layer, from 0; an MTP module's is the last.")
_EXPERT_COUNTERS = {
    "experts_rebalances": ("dsv3:expert_rebalances", "Times that experts were moved to even the load."),
    "experts_moved": ("dsv3:experts_moved", "Replicas that hold another expert since."),
    "experts_checksum_failures": ("dsv3:expert_checksum_failures", "Layers not moved: they were damaged on the way."),
    "experts_repeats": ("dsv3:dispatch_repeats", "Forward passes computed again: a buffer was too small."),
    "experts_in_node_bytes": ("dsv3:dispatch_in_node_bytes", "Sent within nodes by dispatch and combine."),
    "experts_cross_node_bytes": ("dsv3:dispatch_cross_node_bytes", "Sent between nodes by dispatch and combine."),
}
# The same for ranks, where there are several: the largest load over the mean.
_RANK_GAUGES = {
    "prefill_token_imbalance": ("dsv3:prefill_token_imbalance", "Most input tokens of a rank over the mean, lately."),
    "prefill_cost_imbalance": ("dsv3:prefill_cost_imbalance", "The same of tokens and core attention together."),
    "decode_cache_imbalance": ("dsv3:decode_cache_imbalance", "Most tokens held by a rank's requests over the mean."),
    "decode_request_imbalance": ("dsv3:decode_request_imbalance", "Most running requests of a rank over the mean."),
}
# The same for speculative decoding.
_DRAFT_COUNTERS = {
    "draft_num_drafts": ("vllm:spec_decode_num_drafts", "Rows of decode steps that brought drafts."),
    "draft_num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Their drafts."),
    "draft_num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Of these, tokens that were right."),
}
_DRAFT_POSITIONS = ("vllm:spec_decode_num_accepted_tokens_per_pos", "The same by their place in the row, from 0.")
# The same for constrained decoding.
_GRAMMAR_GAUGES = {"grammars_num_kept": ("dsv3:grammars_kept", "Compiled grammars that the engine keeps.")}
_GRAMMAR_COUNTERS = {
    "grammars_num_compiled": ("dsv3:grammars_compiled", "Grammars that the engine has compiled."),
    "grammars_num_found": ("dsv3:grammars_found", "Times that a grammar was kept and not compiled again."),
    "mask_num_rows": ("dsv3:masked_rows", "Rows of steps that a grammar constrained."),
    "mask_num_failed": ("dsv3:mask_failures", "Requests that ended because their grammar took too much work."),
}
_MASK_TIME = ("dsv3:mask_step_seconds", "The host's time for the token masks of a step.")
# The same where KV events are published.
_EVENT_COUNTERS = {
    "kv_events_dropped": (
        "dsv3:kv_events_dropped_batches",
        "Batches of KV events dropped because the buffer was full.",
    ),
}
# The same for each KV offload tier.
TIERS = ("host", "store", "peer")
_TIER_GAUGES = {"bytes_held": ("dsv3:kv_tier_bytes", "Bytes of pages that a tier holds.")}
_TIER_COUNTERS = {
    "queries": ("dsv3:kv_tier_queries", "Prompt tokens looked for in a tier."),
    "hits": ("dsv3:kv_tier_hits", "Of these, tokens loaded from it."),
    "loaded_bytes": ("dsv3:kv_tier_loaded_bytes", "Bytes of pages loaded from a tier."),
    "stored_bytes": ("dsv3:kv_tier_stored_bytes", "Bytes of pages written to a tier."),
    "store_seconds": ("dsv3:kv_tier_store_seconds", "Time that writing them took."),
    "dropped": ("dsv3:kv_tier_dropped_pages", "Pages that a tier could not keep."),
    "damaged": ("dsv3:kv_tier_damaged_pages", "Pages that did not verify; they were computed again."),
    "failures": ("dsv3:kv_tier_failures", "Failed operations of a tier."),
    "evictions": ("dsv3:kv_tier_evictions", "Pages that made room for others."),
}
_TIER_LOADS = ("dsv3:kv_tier_load_seconds", "From requesting a batch of pages of a tier to having them.")
# The same for each transport of KV pages between instances.
_CARRIER_COUNTERS = {
    "carried_bytes": ("dsv3:kv_transfer_bytes", "Bytes of other instances' pages, by transport."),
    "carried_seconds": ("dsv3:kv_transfer_seconds", "Time that transferring and verifying them took."),
    "carrier_failures": ("dsv3:kv_transfer_failures", "Transfers that failed."),
}
_HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds", "From handing the request to the engine to its first token.", SECONDS),
    "itl": ("vllm:inter_token_latency_seconds", "Between two tokens of a sequence, per token.", SECONDS),
    "e2e": ("vllm:e2e_request_latency_seconds", "From handing the request to the engine to its last token.", SECONDS),
    "queue": ("vllm:request_queue_time_seconds", "From the engine's taking the request to its first slot.", SECONDS),
    "prefill": ("vllm:request_prefill_time_seconds", "From the request's first slot to its first token.", SECONDS),
    "decode": ("vllm:request_decode_time_seconds", "From a sequence's first token to its last.", SECONDS),
    "prompt_length": ("vllm:request_prompt_tokens", "Tokens of the prompt of a sequence that has ended.", TOKENS),
    "answer_length": ("vllm:request_generation_tokens", "Tokens of a sequence that has ended.", TOKENS),
    "update": ("dsv3:weight_update_seconds", "From an update's request until its weights are served.", SECONDS),
}
_TOTALS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of requests that were taken."),
    "generation_tokens": ("vllm:generation_tokens", "Tokens sampled for clients."),
    "resumed": ("dsv3:resumed", "Choices that went on with an answer begun elsewhere."),
    "continued": ("dsv3:continued", "Sequences continued by another engine after theirs died."),
    "given_up": ("dsv3:given_up", "Requests given up because engines died with them."),
    "engine_restarts": ("dsv3:engine_restarts", "Restarts of the engine."),
    "grammars_refused": ("dsv3:grammars_refused", "Constraints that cannot be compiled: their requests got 400."),
    "dropped_calls": ("dsv3:tool_calls_dropped", "Tool calls without a name, or that the client does not take."),
}
# (name, help, label) -> the label's values
_LABELLED = {
    ("vllm:request_success", "Finished sequences.", "finished_reason"): ("stop", "length", "abort", "error"),
    ("vllm:admission_rejections", "Requests refused with 503.", "reason"): (
        *("queue_full", "starting", "draining", "failed", "connections"),
    ),
}
# Numbers of each tenant, in the order of `Metrics.charge`; only names in the key file become labels.
_BY_TENANT = {
    "dsv3:tenant_requests": "Requests of an API key that got a token.",
    "dsv3:tenant_prompt_tokens": "Their prompt tokens, as in their usage.",
    "dsv3:tenant_generation_tokens": "Their generated tokens.",
}
_INDEX = {
    key: i
    for i, key in enumerate([*_TOTALS, *((name, value) for (name, *_), all_ in _LABELLED.items() for value in all_)])
}
_SIZES = [len(bounds) + 2 for _, _, bounds in _HISTOGRAMS.values()]  # a count per bucket, and the sum
_HISTOGRAM_INDEX = {key: len(_INDEX) + sum(_SIZES[:i]) for i, key in enumerate(_HISTOGRAMS)}
_TENANT_INDEX = len(_INDEX) + sum(_SIZES)
NUM_NUMBERS = _TENANT_INDEX + len(_BY_TENANT) * MAX_TENANTS
"""The number of counters of one API server process."""

_MAX_PENDING = 4096


class Metrics:
    """All metrics of one server, labelled with the model's name; `numbers` are shared by its API servers.

    Counts reach the other API servers with `flush`. `info` returns what the engine is, None before it is ready; with
    `config` it is described by labels. `engines` returns of each engine whether it is ready and its numbers; several
    have the label `engine`, from 0. `process_*` are of the process that answers the scrape.
    """

    def __init__(
        self,
        model_name: str,
        numbers: SharedNumbers | None = None,
        tenants: Tenants | None = None,
        config: ServerConfig | None = None,
    ):
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self.info: Callable[[], EngineInfo | None] = lambda: None
        self.engines: Callable[[], Sequence[tuple[bool, Stats]]] = list
        self._model_name, self._config = model_name, config
        self._numbers = numbers or SharedNumbers(NUM_NUMBERS)
        self._tenants = tenants or Tenants()
        self.stats: Stats = {}  # the engine's latest
        self._counts = dict.fromkeys(_INDEX, 0)
        self._observed: dict[str, list[float]] = {key: [] for key in _HISTOGRAMS}
        self._gaps = self._observed["itl"]

    def update(self, stats: Stats) -> None:
        """Sets the engine's numbers; those without a metric are ignored."""
        self.stats = stats

    def observe(self, what: str, value: float) -> None:
        """Adds a value to a histogram by name, such as "ttft" or "prompt_length"."""
        pending = self._observed[what]
        pending.append(value)
        if len(pending) >= _MAX_PENDING:
            self.flush()

    def tokens(self, count: int, seconds: float) -> None:
        """Adds `count` tokens of a sequence that arrived together, `seconds` after those before."""
        self._counts["generation_tokens"] += count
        if count > 1:
            self._gaps.extend([seconds / count] * count)
        else:
            self._gaps.append(seconds)
        if len(self._gaps) >= _MAX_PENDING:
            self.flush()

    def add(self, what: str, count: int) -> None:
        """Adds to a total by name, such as "prompt_tokens" or "dropped_calls"."""
        self._counts[what] += count

    def record_finished(self, reason: str) -> None:
        """Counts a finished sequence by reason: "stop", "length", "abort" or "error"."""
        self._counts["vllm:request_success", reason] += 1

    def record_rejected(self, reason: str) -> None:
        """Counts a request refused with 503."""
        self._counts["vllm:admission_rejections", reason] += 1

    def charge(self, tenant: Tenant, prompt_tokens: int, generation_tokens: int) -> None:
        """Adds a finished request to its tenant's counts."""
        start = _TENANT_INDEX + len(_BY_TENANT) * self._tenants.index_of(tenant)
        self._numbers.mine[start : start + len(_BY_TENANT)] += (1, prompt_tokens, generation_tokens)

    def flush(self) -> None:
        """Adds the counts since the last flush to the shared numbers."""
        mine = self._numbers.mine
        for key, place in _INDEX.items():
            if count := self._counts[key]:
                mine[place] += count
                self._counts[key] = 0
        for key, start in _HISTOGRAM_INDEX.items():
            if values := self._observed[key]:
                bounds = _HISTOGRAMS[key][2]
                end = start + len(bounds) + 1
                mine[start:end] += np.bincount(np.searchsorted(bounds, values), minlength=end - start)
                mine[end] += sum(values)
                values.clear()

    def counted(self) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Returns the sums over all API servers: totals, and the bucket counts of histograms.

        Totals are named as for `add`, `record_finished` and `record_rejected`, histograms as for `observe`, and "itl".
        Bucket counts of a latency are `[len(SECONDS) + 1]`.
        """
        self.flush()
        numbers = self._numbers.rows.sum(0)
        totals = {key if isinstance(key, str) else key[1]: float(numbers[place]) for key, place in _INDEX.items()}
        ends = {key: start + len(_HISTOGRAMS[key][2]) + 1 for key, start in _HISTOGRAM_INDEX.items()}
        return totals, {key: numbers[start : ends[key]] for key, start in _HISTOGRAM_INDEX.items()}

    def text(self) -> bytes:
        """Returns the exposition in Prometheus's text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yields every metric; prometheus_client's interface of a collector."""
        if len(engines := self.engines()) < 2:
            yield from self._of_engine(self.stats)
        else:
            yield from _labelled([self._of_engine(stats) for _, stats in engines])
            up: dict[tuple[str, ...], float] = {(str(i),): float(is_ready) for i, (is_ready, _) in enumerate(engines)}
            yield self._family(GaugeMetricFamily, *_ENGINE_UP, up, ["engine"])
        if (info := self.info()) is not None and self._config is not None:
            yield from self._of_info(info, self._config)
        yield from self._counted()

    def _of_info(self, info: EngineInfo, config: ServerConfig) -> Iterator[Metric]:
        """Yields the metrics that describe the engine by their labels."""
        engine = config.engine
        labels = {
            "block_size": str(info.rules.page_size),
            "cache_dtype": engine.kv_cache_dtype,
            "enable_prefix_caching": str(engine.enable_prefix_caching),
            "gpu_memory_utilization": str(engine.gpu_memory_utilization),
            "num_gpu_blocks": str(info.num_pages),
        }
        yield self._family(GaugeMetricFamily, *_CACHE_CONFIG, {tuple(labels.values()): 1.0}, labels)
        if replaced := info.kernel_fallbacks:
            ones: dict[tuple[str, ...], float] = dict.fromkeys(replaced.items(), 1.0)
            yield self._family(GaugeMetricFamily, *_FALLBACKS, ones, ["operation", "backend"])
        if config.options.enable_weight_updates:
            version = (info.state.weight_version,)
            yield self._family(GaugeMetricFamily, *_WEIGHTS, {version: 1.0}, ["weight_version"])

    def _of_engine(self, stats: Stats) -> Iterator[Metric]:
        """Yields the metrics of one engine."""
        spread = "experts_balancedness" in stats
        of_ranks = {key: named for key, named in _RANK_GAUGES.items() if key in stats}
        takes_grammars = "grammars_num_kept" in stats
        gauges = _GAUGES | (_EXPERT_GAUGES if spread else {}) | (_GRAMMAR_GAUGES if takes_grammars else {})
        for key, (name, text) in (gauges | of_ranks).items():
            yield self._family(GaugeMetricFamily, name, text, {(): number_in(stats, key)})
        drafts = _DRAFT_COUNTERS if "draft_num_drafts" in stats else {}
        events = _EVENT_COUNTERS if "kv_events_dropped" in stats else {}
        grammars = _GRAMMAR_COUNTERS if takes_grammars else {}
        for key, (name, text) in (
            _COUNTERS | (_EXPERT_COUNTERS if spread else {}) | drafts | grammars | events
        ).items():
            yield self._family(CounterMetricFamily, name, text, {(): number_in(stats, key)})
        if isinstance(even := stats.get("experts_balancedness_by_layer"), list):
            yield self._family(GaugeMetricFamily, *_EXPERT_LAYERS, _numbered(even), ["layer"])
        if isinstance(accepted := stats.get("draft_num_accepted_tokens_per_pos"), list):
            yield self._family(CounterMetricFamily, *_DRAFT_POSITIONS, _numbered(accepted), ["position"])
        for (name, text), bounds, counts, totals in (
            (_HOST_TIME, HOST_TIME_BOUNDS, stats.get("host_time_counts"), ("host_time_sum",)),
            (_MASK_TIME, HOST_TIME_BOUNDS, stats.get("mask_counts"), ("mask_seconds",)),
            (_STEP_TOKENS, STEP_TOKENS_BOUNDS, stats.get("step_tokens_counts"), ("prompt_tokens", "generated_tokens")),
        ):
            if isinstance(counts, list) and len(counts) == len(bounds) + 1:
                yield self._histogram(name, text, bounds, counts, sum(number_in(stats, total) for total in totals))
        yield from self._of_tiers(stats)

    def _of_tiers(self, stats: Stats) -> Iterator[Metric]:
        """Yields the metrics of the KV offload tiers."""
        tiers = [tier for tier in TIERS if f"pages_tiers_{tier}_hits" in stats]
        if not tiers:
            return
        loading = "dsv3:num_requests_loading", "Requests that wait for pages of a tier."
        yield self._family(GaugeMetricFamily, *loading, {(): number_in(stats, "pages_num_loading")})
        kinds = ((GaugeMetricFamily, _TIER_GAUGES), (CounterMetricFamily, _TIER_COUNTERS))
        for kind, names in kinds:
            for key, (name, text) in names.items():
                values: dict[tuple[str, ...], float] = {
                    (tier,): number_in(stats, f"pages_tiers_{tier}_{key}") for tier in tiers
                }
                yield self._family(kind, name, text, values, ["tier"])
        family = HistogramMetricFamily(*_TIER_LOADS, labels=["model_name", "tier"])
        for tier in tiers:
            counts, total = stats[f"pages_tiers_{tier}_loads"], number_in(stats, f"pages_tiers_{tier}_load_seconds")
            if isinstance(counts, list):
                family.add_metric([self._model_name, tier], _cumulated(LOAD_BOUNDS, counts), total)
        yield family
        for key, (name, text) in _CARRIER_COUNTERS.items():
            if isinstance(by := stats.get(f"pages_tiers_peer_{key}"), list):
                by_carrier: dict[tuple[str, ...], float] = {(name,): n for name, n in zip(CARRIERS, by, strict=True)}
                yield self._family(CounterMetricFamily, name, text, by_carrier, ["carrier"])

    def _counted(self) -> Iterator[Metric]:
        """Yields the sums over all API servers."""
        self.flush()
        numbers = self._numbers.rows.sum(0).tolist()
        for key, (name, text) in _TOTALS.items():
            yield self._family(CounterMetricFamily, name, text, {(): numbers[_INDEX[key]]})
        for (name, text, label), values in _LABELLED.items():
            found: dict[tuple[str, ...], float] = {(value,): numbers[_INDEX[name, value]] for value in values}
            yield self._family(CounterMetricFamily, name, text, found, [label])
        yield from self._by_tenant(numbers)
        for key, (name, text, bounds) in _HISTOGRAMS.items():
            start = _HISTOGRAM_INDEX[key]
            end = start + len(bounds) + 1
            yield self._histogram(name, text, bounds, numbers[start:end], numbers[end])

    def _by_tenant(self, numbers: list[float]) -> Iterator[Metric]:
        names = [tenant.name for tenant in self._tenants.all]
        for i, (name, text) in enumerate(_BY_TENANT.items() if names else ()):
            found = numbers[_TENANT_INDEX + i :: len(_BY_TENANT)]
            values: dict[tuple[str, ...], float] = {(tenant,): found[place] for place, tenant in enumerate(names)}
            yield self._family(CounterMetricFamily, name, text, values, ["tenant"])

    def _family(
        self, kind, name: str, text: str, values: Mapping[tuple[str, ...], float], labels: Iterable[str] = ()
    ) -> Metric:
        family = kind(name, text, labels=["model_name", *labels])
        for label_values, value in values.items():
            family.add_metric([self._model_name, *label_values], value)
        return family

    def _histogram(
        self, name: str, text: str, bounds: Iterable[float], counts: Iterable[float], total: float
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], _cumulated(bounds, counts), total)
        return family


def _labelled(engines: Iterable[Iterable[Metric]]) -> Iterable[Metric]:
    """Returns the metrics of several engines, with the label `engine`; those of one name are one family."""
    families: dict[str, Metric] = {}
    for i, metrics in enumerate(engines):
        for metric in metrics:
            samples = [each._replace(labels={"engine": str(i), **each.labels}) for each in metric.samples]
            metric.samples = []
            families.setdefault(metric.name, metric).samples += samples
    return families.values()


def _cumulated(bounds: Iterable[float], counts: Iterable[float]) -> list[tuple[str, float]]:
    ends = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(ends, np.cumsum(list(counts)).tolist(), strict=True))


def _numbered(values: list[float]) -> dict[tuple[str, ...], float]:
    return {(str(i),): value for i, value in enumerate(values)}
