"""Devices and deployments by name: DeepSeek's two published ones, and single nodes.

Memory is what the driver reports: 79.1 GiB of an H100 or H800 ("80 GB"), 139.8 GiB of an H200 ("141 GB"). Peak rates
are from data sheets. Link rates of an H800 are DeepEP's limits (160 GB/s NVLink one way, 50 GB/s per NIC, one NIC per
GPU); an H200's NVLink is scaled by the ratio of the data sheets (900 to 400 GB/s).
"""

from dsv3.config.device_rates import PEAKS
from tools.plan.deployment import Deployment, Device

H800 = Device(
    name="H800",
    memory_bytes=84_900_000_000,
    hbm_bytes_per_second=PEAKS["H800"].hbm,
    fp8_flops=PEAKS["H800"].fp8,
    bf16_flops=PEAKS["H800"].bf16,
    node_link=160e9,
    cross_link=50e9,
)
H200 = Device(
    name="H200",
    memory_bytes=150_100_000_000,
    hbm_bytes_per_second=PEAKS["H200"].hbm,
    fp8_flops=PEAKS["H200"].fp8,
    bf16_flops=PEAKS["H200"].bf16,
    node_link=360e9,
    cross_link=50e9,
)
DEVICES = {device.name: device for device in (H800, H200)}

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

DEPLOYMENTS = {d.name: d for d in (PREFILL_EP32, DECODE_EP144, NODE_8XH200, NODE_8XH800)}
