"""All options of an engine and of the processes of an instance, each declared once; imports neither jax nor absl.

Those of a server are in `dsv3.config.server_options`.

From the fields below derive: command-line flags and their help (`launch.cli`), `LLM`'s parameters (`dsv3.llm`), the
message that starts an engine (`dsv3.server.engine.messages`), the options on which the processes of an instance must
agree and the key of stored executables (`dsv3.engine.fingerprint`), and the options of a running engine (`RunOptions`).
A new option is one field here.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

from dsv3.config.declaration import check, option
from dsv3.config.publishing import KvEventsConfig, StepMetricsConfig
from dsv3.config.speculative import SpeculativeConfig
from dsv3.config.store_address import check_address

DType = Literal["auto", "float32", "bfloat16", "float16"]
CacheDType = Literal["auto", "float32", "bfloat16", "float16", "fp8"]
Role = Literal["both", "prefill", "decode"]
TransferCarrier = Literal["sockets", "auto", "nixl"]
Transport = Literal["auto", "ring", "all_to_all", "hierarchical", "ragged", "nccl_ep"]
Combine = Literal["auto", "int8"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

LEADER = 0
"""Id of the process with the scheduler."""

_OF_SPREAD_EXPERTS: dict[str, Any] = {
    "num_redundant_experts": 0,
    "expert_transport": "auto",
    "expert_combine": "auto",
    "expert_overlap": True,
    "reserved_multiprocessors": None,
    "enable_eplb": False,
}
"""Options without effect if each device has all experts, and their values then."""
_STAGING_GIB = 1.0
"""Host memory of a store without host cache: the queue of writes (512 MiB) and as much again for loads."""
_MAX_PROCESSES = 4096
_MAX_GIB = 2**30  # an exbibyte: bytes are counted in 64 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Options that only the start of an engine reads; weights and limits derive from them."""

    dtype: DType = option(
        "auto",
        "Compute and store weights in this type; auto is bfloat16, or float16 for a checkpoint of that type; on a CPU "
        "float32, unless bfloat16 is faster and the model is not small (docs/kernels_cpu.md).",
    )
    kv_cache_dtype: CacheDType = option(
        "auto",
        "Store the latent cache in this type; auto is that of --dtype, fp8 holds 1.76 times the tokens of bfloat16 in "
        "the same memory for DeepSeek-V3, and rounds them.",
        group="model",
    )
    fp8: Literal["keep", "dequantize", "quantize"] = option(
        "keep",
        "Keep FP8 weights in memory as FP8, or convert them to --dtype on loading. quantize keeps them and quantizes "
        "the products of other weights to FP8 too: half the memory of bfloat16.",
        group="model",
    )
    int4: Literal["keep", "fp8", "dequantize"] = option(
        "keep",
        "Keep INT4 experts in memory as INT4, or convert them to FP8 (1.78 times the memory, rounded once more) or "
        "--dtype after loading.",
        group="model",
    )
    fp4: Literal["fp8", "keep"] = option(
        "fp8",
        "Convert FP4 experts to FP8 after loading, with the same values in 1.88 times the memory, or keep them in "
        "memory as FP4. Under --fp8=dequantize they have --dtype.",
        group="model",
    )
    max_model_len: int | None = option(
        None, "Limit prompt and answer together to this many tokens; default: what model and cache allow.", low=1
    )
    max_num_seqs: int | None = option(
        None, "Run at most this many sequences at once per rank; default: 256, on a CPU 64.", low=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Compute at most this many prompt tokens per step and rank; default: 8192, on a CPU 1024.",
        low=1,
        group="scheduling",
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Use at most this fraction of a device's memory for weights, cache and activations; on a CPU the cache gets "
        "1 GiB instead.",
        above=0,
        high=1,
        programs=False,
    )
    data_parallel_size: int | None = option(
        None,
        "Serve with this many ranks of --tensor_parallel_size devices each; default: 1; with several processes, "
        "as many as their devices allow.",
        low=1,
    )
    enable_expert_parallel: bool = option(
        False, "Spread the routed experts over all devices; without it each device holds all of them."
    )
    num_redundant_experts: int = option(
        0,
        "Store this many more replicas than there are experts; the number of all replicas must be a multiple of the "
        "number of devices.",
        low=0,
        group="experts",
    )
    expert_transport: Transport = option(
        "auto",
        "Send tokens to experts with this transport; auto selects by a cost model, but never ragged or nccl_ep, which "
        "need GPUs.",
        group="experts",
    )
    expert_combine: Combine = option(
        "auto",
        "Combine the experts' sums in this format: auto is --dtype; int8 with a scale per 128 channels is half the "
        "bytes and less exact (docs/expert_parallel.md).",
        group="experts",
    )
    enable_eplb: bool = option(
        False,
        "Move experts between devices while serving, to balance the devices' load.",
        programs=False,
        group="experts",
    )
    eplb_interval: int = option(
        3000,
        "Decide at most every this many steps whether to move experts.",
        low=1,
        programs=False,
        group="experts",
    )
    check_kernels: bool = option(
        False,
        "Check each kernel against its reference before the start, in some minutes; one that fails is replaced by a "
        "slower one, as the log, /metrics and /v1/models report.",
        programs=False,
        group="model",
    )
    load_threads: int = option(
        8,
        "Read weights with this many threads in each process, 4 MiB at a time; default: 8, beyond which one local disk "
        "was no faster (docs/checkpoint.md). A parallel or network file system may gain from more.",
        low=1,
        high=512,
        agree=False,
        programs=False,
        group="model",
    )
    compilation_cache_dir: str | None = option(
        None,
        "Keep compiled programs in this directory; default: dsv3/xla in the user's cache directory.",
        agree=False,
        programs=False,
        group="model",
    )
    tuning: str | None = option(
        None,
        "Use the plans of kernels, and for options that are not given the values, that launch.tune has measured and "
        "written to this file; one made for another device, model or version is ignored, as the log says "
        "(docs/tuning.md).",
        agree=False,
        programs=False,
        group="model",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that a running engine reads unchanged; `dsv3.config.engine.EngineConfig` has them, too."""

    max_num_queued_reqs: int = option(
        1024,
        "Queue at most this many sequences; reject others at once.",
        low=0,
        agree=False,
        programs=False,
        group="scheduling",
    )
    tensor_parallel_size: int = option(
        1,
        "Split attention heads and MLP widths over this many devices per rank; more than 1 implies "
        "--enable_expert_parallel.",
        low=1,
    )
    decode_context_parallel_size: int = option(
        1,
        "Divide the tokens of each page of the cache over this many devices of a rank, a divisor of "
        "--tensor_parallel_size, instead of replicating them: so many times the tokens fit (docs/expert_parallel.md).",
        low=1,
    )
    reserved_multiprocessors: int | None = option(
        None,
        "Reserve this many multiprocessors of each GPU for transfers in overlapped steps, and give NCCL as many "
        "channels; default: 24 if prefill steps overlap, 8 if decode steps alone do. 0: all for kernels, NCCL as it "
        "likes.",
        low=0,
        group="experts",
    )
    expert_overlap: bool = option(
        True,
        "Overlap computation with transfers, with several in flight; without it one at a time, and no overlap: slower, "
        "but worth trying if GPUs hang.",
        group="experts",
    )
    eplb_threshold: float = option(
        0.9,
        "Move experts only if the devices' mean load is below this fraction of the highest.",
        above=0,
        high=1,
        programs=False,
        group="experts",
    )
    eplb_state: str | None = option(
        None,
        "Keep the placement and load of experts in this file of process 0, and start from it; default: they outlive "
        "an engine, but not the server.",
        agree=False,
        programs=False,
        group="experts",
    )
    enable_return_routed_experts: bool = option(
        False,
        "Return the experts of tokens to requests with return_routed_experts, for training that replays them "
        "(docs/rl.md).",
        group="experts",
    )
    enable_prefix_caching: bool = option(
        True, "Reuse the cached pages of common prompt prefixes.", programs=False, group="cache"
    )
    kv_offloading_size: float = option(
        0.0,
        "Cache pages also in this many GiB of host memory, which outlives an engine; 0: none, but 1 with --kv_store, "
        "whose pages pass through it. Per process of an instance.",
        low=0,
        high=_MAX_GIB,
        group="cache",
    )
    kv_store: str | None = option(
        None,
        "Cache pages also in this directory, or under this s3:// or gs:// address; several engines may share it.",
        programs=False,
        group="cache",
    )
    kv_store_size: float = option(
        100.0,
        "Use at most this many GiB of the directory --kv_store.",
        above=0,
        high=_MAX_GIB,
        programs=False,
        group="cache",
    )
    kv_events_config: dict[str, Any] | None = option(
        None,
        "Publish events of cached pages over ZMQ for routers; a JSON object such as "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\' (docs/cache.md).',
        agree=False,
        programs=False,
        group="fleet",
    )
    step_metrics_config: dict[str, Any] | None = option(
        None,
        "Publish metrics of each step over ZMQ for planners, as Dynamo's ForwardPassMetrics; a JSON object "
        'such as \'{"endpoint": "tcp://127.0.0.1:20380"}\' (docs/router.md).',
        agree=False,
        programs=False,
        group="monitoring",
    )
    role: Role = option(
        "both",
        "Serve whole requests, or one phase: prefill computes prompts and one token, and serves the pages to others; "
        "decode fetches them (docs/disaggregation.md).",
        group="fleet",
    )
    transfer_address: str | None = option(
        None,
        "Serve pages to other instances at this HOST:PORT, a name of this host that they can resolve. Needs "
        "--kv_offloading_size and --transfer_key_file. Each host of an instance has its own; its other "
        "processes use the following ports.",
        agree=False,
        programs=False,
        group="fleet",
    )
    transfer_key_file: str | None = option(
        None,
        "Read the secret that instances share, of at least 32 bytes, from this file; only its holders get pages.",
        programs=False,
        group="fleet",
    )
    transfer_carrier: TransferCarrier = option(
        "sockets",
        "Transfer pages between instances over encrypted sockets, or over NIXL if both sides have it and neither sets "
        "sockets: unencrypted, for private networks. nixl fails to start without it.",
        programs=False,
        group="fleet",
    )
    speculative_config: dict[str, Any] | None = option(
        None,
        "Propose drafts and verify several tokens per step; a JSON object such as "
        '\'{"method": "mtp", "num_speculative_tokens": 1}\' (docs/speculative.md).',
        group="scheduling",
    )
    decode_batch_sizes: str | None = option(
        None,
        "Compile decode steps for these numbers of requests per rank, such as 1,8,32, and for 1 and --max_num_seqs; "
        "default: 1, 4, 16, 64, and a third or a half more from each to the next.",
        group="scheduling",
    )
    prefill_batch_sizes: str | None = option(
        None,
        "Compile prefill steps for these numbers of tokens per rank, and for --max_num_batched_tokens; default: 64, "
        "256, 1024, 2048 and further doublings.",
        group="scheduling",
    )
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs",
        "Return the log-probabilities of the model's own distribution, or with processed_logprobs those of the "
        "distribution that tokens are drawn from: after penalties, grammars, temperature, min_p, top_k and top_p.",
        group="scheduling",
    )
    enable_return_sampling_mask: bool = option(
        False,
        "Return the tokens that top_k, top_p, min_p and grammars have left to requests with return_sampling_mask "
        "(docs/rl.md).",
        group="scheduling",
    )
    batch_invariant: bool = option(
        False,
        "Compute the same bits for a request whatever else a step computes, however its prompt is cut into chunks, and "
        "with or without cached prefixes and drafts; slower (docs/engine.md).",
        group="model",
    )
    seed: int = option(0, "Use this seed for requests without one.", programs=False, group="model")

    @functools.cached_property
    def speculative(self) -> SpeculativeConfig | None:
        return None if self.speculative_config is None else SpeculativeConfig.from_json(self.speculative_config)

    @functools.cached_property
    def decode_sizes(self) -> tuple[int, ...]:
        """The numbers of `decode_batch_sizes`, ascending; empty if not given."""
        return _sizes("decode_batch_sizes", self.decode_batch_sizes)

    @functools.cached_property
    def prefill_sizes(self) -> tuple[int, ...]:
        """The numbers of `prefill_batch_sizes`, ascending; empty if not given."""
        return _sizes("prefill_batch_sizes", self.prefill_batch_sizes)

    @functools.cached_property
    def kv_events(self) -> KvEventsConfig | None:
        return None if self.kv_events_config is None else KvEventsConfig.from_json(self.kv_events_config)

    @functools.cached_property
    def step_metrics(self) -> StepMetricsConfig | None:
        return None if self.step_metrics_config is None else StepMetricsConfig.from_json(self.step_metrics_config)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Puts the name of an option in front of the text of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(RunOptions, StartOptions):
    """All options of an engine; None is a default that depends on model and device.

    Raises ValueError for invalid values.
    """

    def __post_init__(self) -> None:
        check(self)
        _ = self.decode_sizes, self.prefill_sizes  # raise for what is no list of sizes
        for name, off in _OF_SPREAD_EXPERTS.items():
            if (value := getattr(self, name)) != off and not self.spreads_experts:
                raise ValueError(f"{name}: {value!r} needs enable_expert_parallel")
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            raise ValueError(
                f"decode_context_parallel_size: {self.decode_context_parallel_size} does not divide "
                f"tensor_parallel_size {self.tensor_parallel_size}; use a divisor of it"
            )
        if self.batch_invariant and (self.num_redundant_experts or self.enable_eplb):
            name = "enable_eplb" if self.enable_eplb else "num_redundant_experts"
            raise ValueError(
                f"batch_invariant: {name} changes which devices sum an expert's results, and so the order of sums; "
                f"leave {name} out"
            )
        if self.kv_store is not None:
            self._need_prefix_caching("kv_store")
            with _naming("kv_store"):
                check_address(self.kv_store)
            object.__setattr__(self, "kv_offloading_size", self.kv_offloading_size or _STAGING_GIB)
        self._check_transfer()
        if self.kv_offloading_size:
            self._need_prefix_caching("kv_offloading_size")
        with _naming("kv_events_config"):
            events = self.kv_events
        if events is not None and events.is_on:
            self._need_prefix_caching("kv_events_config")
        with _naming("step_metrics_config"):
            _ = self.step_metrics
        with _naming("speculative_config"):
            speculative = self.speculative
        if speculative is not None and speculative.synthetic_rates:
            raise ValueError(
                f"speculative_config: synthetic_acceptance_rates {list(speculative.synthetic_rates)}: a coin would "
                "make the text; only python -m benchmarks.speculative --synthetic takes them, with random weights"
            )

    def _check_transfer(self) -> None:
        for name, value, needed in (
            ("transfer_address", self.transfer_address, "transfer_key_file"),
            ("transfer_key_file", self.transfer_key_file, "kv_offloading_size"),
            (
                "transfer_carrier",
                None if self.transfer_carrier == "sockets" else self.transfer_carrier,
                "transfer_key_file",
            ),
            ("role", self.role if self.role == "prefill" else None, "transfer_address"),
            ("role", self.role if self.role == "decode" else None, "transfer_key_file"),
        ):
            if value is not None and not getattr(self, needed):
                raise ValueError(f"{name}: {value!r} needs {needed}")
        if self.transfer_address is not None:
            split_address(self.transfer_address, "transfer_address")

    def _need_prefix_caching(self, name: str) -> None:
        if not self.enable_prefix_caching:
            raise ValueError(f"{name}: {getattr(self, name)!r} needs enable_prefix_caching")

    @property
    def spreads_experts(self) -> bool:
        """Whether each device holds a part of the routed experts, not all."""
        return self.enable_expert_parallel or self.tensor_parallel_size > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """One process of an instance of several; all defaults but the key's come from Slurm.

    Processes of a node have consecutive numbers: process `node * processes_per_node + i` is the `i`-th of its node.
    Heartbeats come from a thread, so compiling or loading is not silence. Raises ValueError for invalid values.
    """

    coordinator: str = option(
        help="Meet the other processes at this HOST:PORT of process 0; the next port is used too. Default under Slurm.",
        agree=False,
        programs=False,
        group="hosts",
    )
    num_processes: int = option(
        help="Serve with this many processes, --processes_per_node on each host. Default under Slurm.",
        low=1,
        high=_MAX_PROCESSES,
        group="hosts",
    )
    process_id: int = option(
        help="Be this one of them, from 0, counted host by host; process 0 serves HTTP. Default under Slurm.",
        low=0,
        agree=False,
        programs=False,
        group="hosts",
    )
    processes_per_node: int = option(
        1,
        "Let this many processes of a host share its GPUs, each with as many; they are one node. Default under Slurm.",
        low=1,
        group="hosts",
    )
    cluster_key_file: str = option(
        help="Read the secret that the processes share, of at least 32 bytes, from this file.",
        agree=False,
        programs=False,
        group="hosts",
    )
    cluster_start_timeout: float = option(
        300.0,
        "Wait this many seconds for all processes.",
        above=0,
        agree=False,
        programs=False,
        group="hosts",
    )
    cluster_silence_timeout: float = option(
        5.0,
        "Treat a process as hung after this many seconds of silence, six times as many during the start.",
        above=0,
        programs=False,
        group="hosts",
    )
    cluster_return_timeout: float | None = option(
        None,
        "After a failure, continue without processes that have not returned after this many seconds; default: wait "
        "--cluster_start_timeout for them, and never continue without one.",
        above=0,
        programs=False,
        group="hosts",
    )
    cluster_grow_interval: float = option(
        300.0,
        "Restart with processes that have returned, after the others have served without them for this many seconds.",
        above=0,
        agree=False,
        programs=False,
        group="hosts",
    )
    cluster_spare: bool = option(
        True,
        "Keep a spare process beside each process, with jax imported, for the next failure: a restart needs half the "
        "processor time, and the host some 200 MB per process.",
        agree=False,
        programs=False,
        group="hosts",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.process_id >= self.num_processes:
            raise ValueError(f"process_id: {self.process_id} is not from 0 to {self.num_processes - 1}")
        if self.num_processes % self.processes_per_node:
            raise ValueError(
                f"processes_per_node: {self.processes_per_node} does not divide num_processes {self.num_processes}; "
                "every host must have equally many"
            )
        split_address(self.coordinator, "coordinator")

    @property
    def num_nodes(self) -> int:
        return self.num_processes // self.processes_per_node

    @property
    def local_id(self) -> int:
        """Index of this process on its node, from 0."""
        return self.process_id % self.processes_per_node

    def node_of(self, process_id: int) -> range:
        """Returns the processes of the node that a process is on."""
        first = process_id - process_id % self.processes_per_node
        return range(first, first + self.processes_per_node)

    @property
    def heartbeat_s(self) -> float:
        """Seconds without a message after which a process sends a heartbeat: several fit the silence allowed."""
        return min(1.0, self.cluster_silence_timeout / 5)

    @property
    def starting_silence_s(self) -> float:
        """Seconds of silence allowed until all processes are ready.

        Tracing and lowering a program can hold Python's lock: 1.1 s for a model of 1 MB on a machine with 8 busy
        processes per core.
        """
        return 6 * self.cluster_silence_timeout

    @property
    def is_leader(self) -> bool:
        """Whether this process schedules and serves HTTP."""
        return self.process_id == LEADER

    @property
    def control_address(self) -> tuple[str, int]:
        """Host and port where the leader listens for followers: the port after that of jax's coordinator."""
        host, port = split_address(self.coordinator, "coordinator")
        return host, port + 1


def _sizes(name: str, text: str | None) -> tuple[int, ...]:
    words = [] if text is None else text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and 1 <= int(word) < 2**31 for word in words):
        raise ValueError(f"{name}: {text!r} is not a list of numbers from 1 on, such as 1,8,32")
    return tuple(sorted({int(word) for word in words}))


def split_address(text: str, name: str) -> tuple[str, int]:
    """Splits "host:port" ("[::1]:port" for IPv6); the next port must exist too. Raises ValueError otherwise."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65534:
        raise ValueError(f"{name}: {text!r} is not HOST:PORT with a port from 1 to 65534")
    return host, int(port)
