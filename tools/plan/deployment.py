"""What a deployment is: devices and the rates that kernels reach on them, how many of them, the batches they shall run.

`configs.deployments` names the published ones; `read_deployment` reads a person's own from a JSON or TOML file.
"""

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from dsv3.config import device_rates as shares
from dsv3.config.model import ModelConfig
from dsv3.config.options import Combine
from dsv3.config.speculative import SpeculativeConfig, acceptance_by_place

CACHE_DTYPES = ("bfloat16", "fp8")
"""Types of pages that the kernels read with bfloat16 queries."""


class DeploymentError(ValueError):
    """A deployment that cannot be, or a file that does not describe one; the text names the field."""


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU: memory in bytes, peak rates per second, and one-way link rates in bytes per second that DeepEP-like
    transfers reach: `node_link` to each other GPU of its node together, `cross_link` to other nodes.

    Only GPUs of compute capability 9.0 can be planned for. Most have 132 `multiprocessors`, an H20 78.
    """

    name: str
    memory_bytes: int
    hbm_bytes_per_second: float
    fp8_flops: float
    bf16_flops: float
    node_link: float
    cross_link: float
    multiprocessors: int = 132

    def __post_init__(self) -> None:
        _check_positive(self, "memory_bytes", "hbm_bytes_per_second", "fp8_flops", "bf16_flops")
        _check_positive(self, "node_link", "cross_link", "multiprocessors")


@dataclasses.dataclass(frozen=True)
class Deployment:
    """One instance: `nodes` of `gpus_per_node` devices, and what each data-parallel rank runs.

    `prefill_tokens` are the prompt tokens per rank in a prefill step, `decode_requests` the requests per rank in a
    decode step: at least one of the two, both for an instance that does both. One that only decodes still computes
    the ends of prompts, at most `max_num_batched_tokens` at once. `context_length` is the mean number of tokens
    that a request has in the cache (of a prompt, in prefill); `prompt_per_answer` are the prompt tokens per token
    of answers, 608 to 168 billion on DeepSeek's published day. `prefix_hit_rate` is the share of prompt tokens
    found in the cache. `max_model_len` None: what the model was made for. `expert_parallel` spreads the routed
    experts over all devices, with `redundant_experts` replicas more than there are experts, which load balancing
    moves; `expert_transport` and `expert_combine` are as in `launch.serve`. `kv_cache_dtype` is the type of the
    pages: bfloat16, as activations are, or fp8. `memory_utilization` is the share of a device's memory that
    weights, cache and working memory may take, the server's `gpu_memory_utilization`; the rest is for CUDA, NCCL's
    buffers and fragmentation. `speculative_config` asks for drafts as in `launch.serve`; `acceptance` says how many
    are right: a number is each draft's chance once those before it are, a tuple has the share of rows in which all
    drafts up to each place are.

    `reserved_multiprocessors` of each device are left to transfers in overlapped steps, as in `launch.serve`.

    Raises DeploymentError for values that contradict each other.
    """

    name: str
    device: Device
    nodes: int
    gpus_per_node: int = 8
    prefill_tokens: int = 0
    decode_requests: int = 0
    context_length: int = 4096
    prompt_per_answer: float = 608 / 168
    prefix_hit_rate: float = 0.0
    max_model_len: int | None = None
    max_num_batched_tokens: int = 64
    expert_parallel: bool = True
    redundant_experts: int = 0
    expert_transport: str = "auto"
    expert_combine: str = "auto"
    tensor_parallel: int = 1
    memory_utilization: float = 0.9
    kv_cache_dtype: str = "bfloat16"
    reserved_multiprocessors: int | None = None
    speculative_config: dict[str, Any] | None = None
    acceptance: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "nodes", "gpus_per_node", "context_length", "tensor_parallel", "prompt_per_answer")
        _check_positive(self, "max_num_batched_tokens")
        if self.prefill_tokens < 0 or self.decode_requests < 0 or not (self.prefill_tokens or self.decode_requests):
            raise DeploymentError(
                f"{self.name}: prefill_tokens {self.prefill_tokens} and decode_requests {self.decode_requests}: "
                "at least one must be above 0, and none below"
            )
        if not 0 < self.memory_utilization <= 1 or not 0 <= self.prefix_hit_rate < 1:
            raise DeploymentError(
                f"{self.name}: memory_utilization {self.memory_utilization} must be above 0 and at most 1, "
                f"prefix_hit_rate {self.prefix_hit_rate} at least 0 and below 1"
            )
        if self.redundant_experts < 0 or (self.redundant_experts and not self.expert_parallel):
            raise DeploymentError(
                f"{self.name}: redundant_experts {self.redundant_experts} must be at least 0, and needs expert_parallel"
            )
        if self.expert_combine not in get_args(Combine):
            raise DeploymentError(
                f"{self.name}: expert_combine {self.expert_combine!r} is not one of {', '.join(get_args(Combine))}"
            )
        if self.kv_cache_dtype not in CACHE_DTYPES:
            raise DeploymentError(
                f"{self.name}: kv_cache_dtype {self.kv_cache_dtype!r} is not one of {', '.join(CACHE_DTYPES)}"
            )
        if not 0 <= (self.reserved_multiprocessors or 0) < self.device.multiprocessors:
            raise DeploymentError(
                f"{self.name}: reserved_multiprocessors {self.reserved_multiprocessors} must be at least 0 and below "
                f"the device's {self.device.multiprocessors}"
            )
        if self.gpus_per_node % self.tensor_parallel or (self.tensor_parallel > 1 and not self.expert_parallel):
            raise DeploymentError(
                f"{self.name}: tensor_parallel {self.tensor_parallel} must divide gpus_per_node {self.gpus_per_node}, "
                "and needs expert_parallel"
            )
        self._check_drafts()

    def _check_drafts(self) -> None:
        try:
            speculative, _ = self.speculative, self.accepted
        except ValueError as error:
            raise DeploymentError(f"{self.name}: {error}") from None
        if speculative is not None and (speculative.method != "mtp" or speculative.synthetic_rates):
            raise DeploymentError(f"{self.name}: speculative_config: a plan knows drafts of the method 'mtp' alone")
        if self.drafts and self.acceptance is None:
            raise DeploymentError(f"{self.name}: acceptance is missing: tokens per step depend on it; try 0.8")
        if self.acceptance is not None and not self.drafts:
            raise DeploymentError(f"{self.name}: acceptance {self.acceptance} without drafts: give speculative_config")

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """How drafts are made; None where none are."""
        return None if self.speculative_config is None else SpeculativeConfig.from_json(self.speculative_config)

    @property
    def drafts(self) -> int:
        """Drafts of each request in a decode step."""
        speculative = self.speculative
        return speculative.drafts(self.decode_requests) if speculative and self.decode_requests else 0

    @property
    def accepted(self) -> tuple[float, ...]:
        """Shares of rows in which all drafts up to each place are accepted; empty without drafts."""
        return acceptance_by_place("acceptance", self.acceptance, self.drafts) if self.acceptance is not None else ()

    @property
    def devices(self) -> int:
        """Devices of the instance."""
        return self.nodes * self.gpus_per_node

    @property
    def ranks(self) -> int:
        """Data-parallel ranks: groups of `tensor_parallel` devices."""
        return self.devices // self.tensor_parallel


def read_deployment(path: Path, devices: Mapping[str, Device]) -> Deployment:
    """Reads the deployment in a JSON or TOML file (by suffix) with the fields of `Deployment`.

    `device` is a name from `devices`, or an object with the fields of `Device`. Raises DeploymentError naming file and
    field.
    """
    try:
        values = _parse(path)
        device = values.get("device")
        if isinstance(device, str):
            if device not in devices:
                raise DeploymentError(f"device {device!r} is not one of {', '.join(devices)}")
            values = values | {"device": devices[device]}
        elif isinstance(device, dict):
            values = values | {"device": _build(Device, device, "device.")}
        return _build(Deployment, {"name": path.stem} | values, "")
    except DeploymentError as error:
        raise DeploymentError(f"{path}: {error}") from None


def _parse(path: Path) -> dict[str, Any]:
    readers = {".json": json.loads, ".toml": tomllib.loads}
    if path.suffix not in readers:
        raise DeploymentError("the name must end in .json or .toml")
    try:
        values = readers[path.suffix](path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise DeploymentError(f"cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise DeploymentError(f"holds a {type(values).__name__}, not an object")
    return values


def _build(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """Builds a dataclass from untyped values.

    Every field must be known, present unless it has a default, and of its type.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - fields.keys()):
        raise DeploymentError(f"{where}{unknown[0]} is not a field; fields are {', '.join(fields)}")
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise DeploymentError(f"{where}{name} is missing")
    return kind(**{name: _typed(fields[name].type, value, where + name) for name, value in values.items()})


def _typed(wanted: Any, value: Any, name: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is float and is_number and math.isfinite(value):
        return float(value)
    if value is None and wanted in (int | None, dict[str, Any] | None, float | tuple[float, ...] | None):
        return None
    if wanted in (int, int | None) and is_number and value == int(value):
        return int(value)
    if wanted == dict[str, Any] | None and isinstance(value, dict):
        return value
    if wanted == float | tuple[float, ...] | None and (is_number or isinstance(value, list)):
        return tuple(value) if isinstance(value, list) else float(value)
    if wanted in (str, bool, Device) and isinstance(value, wanted):
        return value
    raise DeploymentError(f"{name} is {value!r}, but must be {getattr(wanted, '__name__', wanted)}")


def _check_positive(record: Any, *names: str) -> None:
    for name in names:
        if not getattr(record, name) > 0:
            raise DeploymentError(f"{record.name}: {name} {getattr(record, name)} must be above 0")


# Shares of the links that DeepEP reaches on an H800 (160 and 50 GB/s).
_DISPATCH_LINK = 45 / 50
_COMBINE_LINK = 40.5 / 50
_NODE_LINK = 153 / 160
_CLOCK = 1.83e9  # at which the data sheet's peaks hold: 989e12 = 132 x 4,096 x 1.83e9

SELECT_CYCLES = 1.35
"""Cycles of a multiprocessor per score: of 16 warps on 4 schedulers each has 4 x 170 and 695 instructions for 4,096."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates per second that a device reaches: bytes for memory and links, operations for products."""

    dense_bandwidth: float
    dense_flops: float
    grouped_bandwidth: float
    grouped_flops: float
    prefill_flops: float
    decode_core_flops: float
    prefill_core_flops: float
    fp8_core_flops: float
    """Attention's products in e4m3: index scores of FP8 keys."""
    selection: float
    """Scores that one multiprocessor chooses from."""
    multiprocessors: int
    """Those that kernels take."""
    hbm: float
    node_link: float
    dispatch_link: float
    combine_link: float


def rates_of(device: Device, model: ModelConfig, taken: float | None = None) -> Rates:
    """Returns what published kernels would reach on `device`; products are bf16 where the model is not FP8.

    `taken` is the share of the device's multiprocessors that kernels take, with which arithmetic goes; None: as where
    the rates were measured. Rates of memory are taken to need no more than some four fifths of them.
    """
    decoding, prefilling = (1.0, 1.0) if taken is None else (taken, taken / shares.PREFILL_MULTIPROCESSORS)
    product = device.fp8_flops if model.fp8 else device.bf16_flops
    hbm = device.hbm_bytes_per_second
    return Rates(
        dense_bandwidth=hbm * shares.DENSE_BANDWIDTH,
        dense_flops=product * shares.DENSE_FLOPS * decoding,
        grouped_bandwidth=hbm * shares.GROUPED_BANDWIDTH,
        grouped_flops=product * shares.GROUPED_FLOPS * decoding,
        prefill_flops=product * shares.PREFILL_FLOPS * prefilling,
        decode_core_flops=device.bf16_flops * shares.DECODE_CORE_FLOPS * decoding,
        prefill_core_flops=device.bf16_flops * shares.PREFILL_CORE_FLOPS * prefilling,
        fp8_core_flops=device.fp8_flops * shares.DECODE_CORE_FLOPS * decoding,
        selection=_CLOCK / SELECT_CYCLES,
        multiprocessors=round(device.multiprocessors * decoding),
        hbm=hbm,
        node_link=device.node_link * _NODE_LINK,
        dispatch_link=device.cross_link * _DISPATCH_LINK,
        combine_link=device.cross_link * _COMBINE_LINK,
    )


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """One micro-batch of a rank: `tokens`, their mean number of `keys`, and the `experts` on each device.

    `width` tokens of each request read its cache together. `split` devices share the heads of these tokens, the widths
    of their MLPs, and their routed experts' rows. The first token of a prompt sees the `fewest` keys, and the next ones
    evenly more; None: all tokens see as many, and none is cached. Ranks queries choose in prefill, masked attention has
    `room` for so many tokens; 0: chosen rows are copied.
    """

    tokens: int
    keys: float
    experts: int
    split: int = 1
    cache_dtype: str = "bfloat16"
    width: int = 1
    fewest: float | None = None
    room: int = 0

    @property
    def most(self) -> float:
        """Keys that the last token sees."""
        return self.keys if self.fewest is None else 2 * self.keys - self.fewest
