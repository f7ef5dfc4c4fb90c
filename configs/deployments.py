"""Devices and deployments by name: DeepSeek's two published ones, single nodes, and those of DeepSeek-V4.

Memory is what the driver reports: 79.1 GiB of an H100 or H800 ("80 GB"), 139.8 GiB of an H200 ("141 GB"). Peak rates
are from data sheets. Link rates of an H800 are DeepEP's limits (160 GB/s NVLink one way, 50 GB/s per NIC, one NIC per
GPU); NVLink of an H100 or H200 is scaled by the ratio of the data sheets (900 to 400 GB/s).
"""

import dataclasses
from typing import Any

from dsv3.config.device_rates import PEAKS
from tools.plan.deployment import Deployment, Device


def _device(name: str, memory_bytes: int, node_link: float) -> Device:
    peaks = PEAKS[name]
    return Device(name, memory_bytes, peaks.hbm, peaks.fp8, peaks.bf16, node_link, cross_link=50e9)


H800 = _device("H800", 84_900_000_000, node_link=160e9)
H200 = _device("H200", 150_100_000_000, node_link=360e9)
H100 = dataclasses.replace(H800, name="H100", node_link=H200.node_link)
DEVICES = {device.name: device for device in (H800, H100, H200)}

PREFILL_EP32 = Deployment(
    name="prefill_ep32", device=H800, nodes=4, redundant_experts=32, prefill_tokens=16384, context_length=4096
)
"""DeepSeek's prefill unit: 32 GPUs, 9 routed experts each; 16K tokens per GPU in prompts of 4K (its profile data)."""

DECODE_EP144 = Deployment(
    name="decode_ep144",
    device=H800,
    nodes=18,
    redundant_experts=32,
    decode_requests=128,
    context_length=4989,
    max_num_batched_tokens=512,
)
"""DeepSeek's decode unit: 144 GPUs, 2 routed experts each; 4,989 tokens per request is its fleet's published mean.

It computes partial pages of prompts in chunks of 512 tokens per GPU: from 1,024 on prefill overlaps its transfers, and
all programs of the instance would reserve 24 multiprocessors in place of 8."""

NODE_8XH200 = Deployment(
    name="node_8xh200", device=H200, nodes=1, prefill_tokens=4096, decode_requests=48, context_length=4989
)
"""One node for prefill and decode, 32 routed experts per GPU."""

NODE_8XH800 = Deployment(name="node_8xh800", device=H800, nodes=1, decode_requests=128, context_length=4989)
"""One node of 80 GB GPUs, too small for the 671B model."""

V4_CONTEXT = 8704
"""Mean tokens of a request with a prompt of 8,192 and an answer of 1,024, those of SGLang's figures of DeepSeek-V4."""


def _v4(name: str, device: Device, gpus: int, requests: int, **changes: Any) -> Deployment:
    """Returns a deployment of DeepSeek-V4 on one node, each GPU a data-parallel rank of its own."""
    given: dict[str, Any] = {"prefill_tokens": 4096, "nodes": 1, "kv_cache_dtype": "fp8"} | changes
    sizes: dict[str, Any] = {"context_length": V4_CONTEXT, "prompt_per_answer": 8.0}
    return Deployment(name=name, device=device, gpus_per_node=gpus, decode_requests=requests, **sizes, **given)


V4_FLASH_2XH200 = _v4("v4_flash_2xh200", H200, 2, 64)
"""The fewest GPUs for DeepSeek-V4-Flash: FP4 experts."""
V4_FLASH_4XH200 = _v4("v4_flash_4xh200", H200, 4, 64)
V4_FLASH_4XH200_TP4 = _v4("v4_flash_4xh200_tp4", H200, 4, 16, tensor_parallel=4)
"""For few requests: all GPUs share the heads of each, and read a fourth of the weights."""
V4_FLASH_8XH100 = _v4("v4_flash_8xh100", H100, 8, 64)
V4_PRO_8XH200 = _v4("v4_pro_8xh200", H200, 8, 8, tensor_parallel=8)
"""One node holds DeepSeek-V4-Pro only where all GPUs share its heads."""
V4_PRO_16XH200 = _v4("v4_pro_16xh200", H200, 8, 64, nodes=2)
V4_PRO_16XH200_TP8 = _v4("v4_pro_16xh200_tp8", H200, 8, 64, nodes=2, tensor_parallel=8)
"""Two ranks of a node each: room for FP8 experts of DeepSeek-V4-Pro."""
V4_FLASH_DECODE_EP32 = _v4(
    "v4_flash_decode_ep32", H200, 8, 128, nodes=4, prefill_tokens=0, redundant_experts=32, max_num_batched_tokens=512
)
"""A decode unit of 32 GPUs, 9 routed experts each; others compute the prompts."""

V4_DEPLOYMENTS = (
    V4_FLASH_2XH200,
    V4_FLASH_4XH200,
    V4_FLASH_4XH200_TP4,
    V4_FLASH_8XH100,
    V4_PRO_8XH200,
    V4_PRO_16XH200,
    V4_PRO_16XH200_TP8,
    V4_FLASH_DECODE_EP32,
)
DEPLOYMENTS = {d.name: d for d in (PREFILL_EP32, DECODE_EP144, NODE_8XH200, NODE_8XH800, *V4_DEPLOYMENTS)}
