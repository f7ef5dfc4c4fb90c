"""A deployment: its devices, the rates that kernels reach on them, and the batches that it runs.

`configs.deployments` names the published ones; `read_deployment` reads a user's own from a JSON or TOML file.
"""

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from dsv3.config import device_rates
from dsv3.config.model import ModelConfig
from dsv3.config.options import Combine
from dsv3.config.speculative import SpeculativeConfig, acceptance_by_place

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
CACHE_DTYPES = ("bfloat16", "fp8")
"""Cache dtypes that the kernels read with bfloat16 queries."""
FP4_MODES = ("keep", "fp8")
"""What becomes of FP4 experts of a checkpoint."""
NCCL_EP = "nccl_ep"
"""The transport that is NVIDIA's expert-parallel library (`tools.plan.nccl_ep`)."""


class DeploymentError(ValueError):
    """An invalid deployment or deployment file; the message names the field."""


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU: memory in bytes, peak rates per second, and one-way link rates in bytes per second.

    `node_link` is the sum over all other GPUs of the node, `cross_link` the rate to other nodes. Only GPUs of compute
    capability 9.0 can be planned for. Most have 132 `multiprocessors`, an H20 has 78.
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

    - `prefill_tokens`: prompt tokens per rank in a prefill step. `decode_requests`: requests per rank in a decode step.
      An instance has one of the two, or both. A decode instance still computes the partial last pages of prompts, at
      most `max_num_batched_tokens` at once.
    - `context_length`: mean tokens of a request in the cache (in prefill: of a prompt). `prompt_per_answer`: prompt
      tokens per token of answers; the default is DeepSeek's published day. `prefix_hit_rate`: share of prompt tokens
      found in the cache. `max_model_len` None: the model's own limit.
    - `expert_parallel`: spread the routed experts over all devices, with `redundant_experts` more replicas.
    - `decode_context_parallel` of the `tensor_parallel` devices of a rank divide the tokens of its pages.
    - `memory_utilization`: share of a device's memory for weights, cache and working memory, the server's
      `gpu_memory_utilization`. The rest is for CUDA, NCCL's buffers and fragmentation.
    - `acceptance` of the drafts of `speculative_config`: a number is the chance of each draft if all before it are
      accepted; a tuple has for each position the share of rows in which all drafts up to it are accepted.
    - `fp4`: "keep" FP4 experts as they are in the checkpoint, or make them "fp8": nothing is lost, in twice the memory.
    - `expert_transport` "nccl_ep" plans with the published figures of NVIDIA's library (`tools.plan.nccl_ep`).
    - `expert_transport`, `expert_combine`, `kv_cache_dtype` (bfloat16 or fp8), `speculative_config` and
      `reserved_multiprocessors` (of each device, for transfers in overlapped steps) are options of `launch.serve`.

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
    decode_context_parallel: int = 1
    memory_utilization: float = 0.9
    kv_cache_dtype: str = "bfloat16"
    fp4: str = "keep"
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
        if self.expert_combine == "int8" and self.expert_transport == NCCL_EP:
            raise DeploymentError(f"{self.name}: expert_combine 'int8': {NCCL_EP} returns sums in bfloat16; use 'auto'")
        if self.kv_cache_dtype not in CACHE_DTYPES:
            raise DeploymentError(
                f"{self.name}: kv_cache_dtype {self.kv_cache_dtype!r} is not one of {', '.join(CACHE_DTYPES)}"
            )
        if self.fp4 not in FP4_MODES:
            raise DeploymentError(f"{self.name}: fp4 {self.fp4!r} is not one of {', '.join(FP4_MODES)}")
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
        if self.decode_context_parallel < 1 or self.tensor_parallel % self.decode_context_parallel:
            raise DeploymentError(
                f"{self.name}: decode_context_parallel {self.decode_context_parallel} must divide tensor_parallel "
                f"{self.tensor_parallel}"
            )
        self._check_drafts()

    def _check_drafts(self) -> None:
        try:
            speculative, _ = self.speculative, self.accepted
        except ValueError as error:
            raise DeploymentError(f"{self.name}: {error}") from None
        if speculative is not None and (speculative.method == "ngram" or speculative.synthetic_rates):
            raise DeploymentError(f"{self.name}: speculative_config: only 'mtp' and 'dspark' can be planned")
        if self.drafts and self.acceptance is None:
            raise DeploymentError(f"{self.name}: acceptance is missing: tokens per step depend on it; try 0.8")
        if self.acceptance is not None and not self.drafts:
            raise DeploymentError(f"{self.name}: acceptance {self.acceptance} without drafts: give speculative_config")

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The drafting method; None without drafts."""
        return None if self.speculative_config is None else SpeculativeConfig.from_json(self.speculative_config)

    @property
    def drafts(self) -> int:
        """Draft tokens of each request in a decode step."""
        speculative = self.speculative
        return speculative.drafts(self.decode_requests) if speculative and self.decode_requests else 0

    @property
    def accepted(self) -> tuple[float, ...]:
        """Shares of rows in which all drafts up to each position are accepted; empty without drafts."""
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
    """Reads a deployment from a JSON or TOML file (by suffix) with the fields of `Deployment`.

    `device` is a name from `devices`, or an object with the fields of `Device`. Raises DeploymentError with the names
    of file and field.
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
        raise DeploymentError("the file's name must end in .json or .toml")
    try:
        values = readers[path.suffix](path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise DeploymentError(f"cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise DeploymentError(f"contains a {type(values).__name__}; must be an object")
    return values


def _build(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """Builds a dataclass from untyped values; raises DeploymentError for unknown, missing and mistyped fields."""
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


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates per second that kernels reach on a device: bytes for memory and links, operations for products."""

    dense_bandwidth: float
    dense_flops: float
    grouped_bandwidth: float
    grouped_flops: float
    prefill_flops: float
    decode_core_flops: float
    prefill_core_flops: float
    bf16_flops: float
    """The peak."""
    fp8_core_flops: float
    """Attention's products in e4m3: index scores of FP8 keys."""
    listed_core_flops: float
    listed_fp8_core_flops: float
    """Attention of all heads to the rows of a list, which are bfloat16 or FP8."""
    selection: float
    """Index scores per second from which one multiprocessor selects the top-k."""
    multiprocessors: int
    """Multiprocessors of the kernels."""
    hbm: float
    node_link: float
    dispatch_link: float
    combine_link: float


def kernel_rates(device: Device, model: ModelConfig, kernel_share: float | None = None) -> Rates:
    """Returns the rates of published kernels, scaled to `device`; products are bf16 unless the model is FP8.

    Arithmetic is proportional to `kernel_share`, the share of the multiprocessors that kernels run on; None: the share
    at which the rates were measured. Memory rates are assumed to need at most four fifths of the multiprocessors.
    """
    decoding, prefilling = (
        (1.0, 1.0) if kernel_share is None else (kernel_share, kernel_share / device_rates.PREFILL_MULTIPROCESSORS)
    )
    product = device.fp8_flops if model.fp8 else device.bf16_flops
    hbm = device.hbm_bytes_per_second
    return Rates(
        dense_bandwidth=hbm * device_rates.DENSE_BANDWIDTH,
        dense_flops=product * device_rates.DENSE_FLOPS * decoding,
        grouped_bandwidth=hbm * device_rates.GROUPED_BANDWIDTH,
        grouped_flops=product * device_rates.GROUPED_FLOPS * decoding,
        prefill_flops=product * device_rates.PREFILL_FLOPS * prefilling,
        decode_core_flops=device.bf16_flops * device_rates.DECODE_CORE_FLOPS * decoding,
        prefill_core_flops=device.bf16_flops * device_rates.PREFILL_CORE_FLOPS * prefilling,
        bf16_flops=device.bf16_flops,
        fp8_core_flops=device.fp8_flops * device_rates.DECODE_CORE_FLOPS * decoding,
        listed_core_flops=device.bf16_flops * device_rates.LISTED_CORE_FLOPS * decoding,
        listed_fp8_core_flops=device.bf16_flops * device_rates.LISTED_FP8_CORE_FLOPS * decoding,
        selection=device_rates.SELECTION,
        multiprocessors=round(device.multiprocessors * decoding),
        hbm=hbm,
        node_link=device.node_link * device_rates.LINK,
        dispatch_link=device.cross_link * device_rates.DISPATCH_NIC,
        combine_link=device.cross_link * device_rates.COMBINE_NIC,
    )


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """One micro-batch of a rank: `tokens`, their mean number of `keys`, and the `experts` on each device.

    - `width` tokens of each request read its cache together.
    - `split` devices share the heads of these tokens, the widths of their MLPs, and their routed experts' rows.
    - `context_split` of them divide the tokens of pages: each attends to its share with the heads of all.
    - The first token of a prompt sees `min_keys` keys, and the number grows linearly; None: equal for all, none cached.
    - `kv_capacity`: tokens for which masked sparse prefill materializes keys and values; 0: it copies the top-k rows.
    """

    tokens: int
    keys: float
    experts: int
    split: int = 1
    cache_dtype: str = "bfloat16"
    width: int = 1
    min_keys: float | None = None
    kv_capacity: int = 0
    context_split: int = 1

    @property
    def max_keys(self) -> float:
        """Keys that the last token attends to."""
        return self.keys if self.min_keys is None else 2 * self.keys - self.min_keys
