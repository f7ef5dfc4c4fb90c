"""Memory of one device, computed by the server's own accounting: whether a deployment fits, and what to change if not.

Weights and cache follow from shapes; working memory is the compiler's.
"""

import dataclasses
import math
from typing import Any

import jax

from dsv3.checkpoint.layout import leaf_path
from dsv3.engine.build import account_for
from dsv3.engine.device.pool import SLACK
from dsv3.engine.memory import OUTSIDE, DeviceMemory, MemoryAccount, local_bytes
from tools.plan import nccl_ep
from tools.plan.deployment import Deployment
from tools.plan.programs import PlannedModel, cache_tokens

EXPERTS, MODULE_EXPERTS = "routed experts", "draft layers, routed experts"
_MOST_NODES = 64
GB = 1e9
_MODULE = "draft layers, all else"
_MIXING = "mixing of streams"
_GROUPS = {
    EXPERTS: ("moe.moe.gate_up", "moe.moe.down"),
    "shared experts": ("moe.moe.shared",),
    "dense layers": ("dense.mlp",),
    "attention": ("dense.attention", "moe.attention"),
    "embedding and head": ("embed", "head"),
    MODULE_EXPERTS: ("mtp.layers.moe.gate_up", "mtp.layers.moe.down"),
    _MODULE: ("mtp.",),
    _MIXING: ("moe.attention_mixing", "moe.moe_mixing", "head_mixing"),
}
_REST = "router, norms, expert map"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device: its `account`, and the tokens of cache that the deployment's requests need.

    `weights` splits the account's by group; layers that make drafts have their own groups, and cache layers in `token`.
    The account includes the programs' working memory only if they are `compiled`, or else an assumption. `beside` are
    NCCL EP's buffers, for which jax's pool must leave place.
    """

    account: MemoryAccount
    weights: dict[str, int]
    cache_tokens: int
    compiled: bool
    beside: int = 0

    @property
    def token(self) -> int:
        """Bytes of one token in the cache: its share of a page, rounded up."""
        return -(-self.account.page // self.account.page_size)

    @property
    def cache(self) -> int:
        """Bytes of the cache that the deployment's requests need."""
        return self.token * self.cache_tokens

    @property
    def needed(self) -> int:
        """Bytes of weights, state, working memory and the requests' cache."""
        return self.account.weights + self.account.state + self.account.working + self.cache

    @property
    def tokens_left(self) -> int:
        """Tokens of cache that fit beside everything else, including those of the deployment's requests."""
        return self.account.tokens

    @property
    def fits(self) -> bool:
        """Whether `needed` is within the engine's share of the device."""
        return self.cache_tokens <= self.account.tokens


def memory_of(planned: PlannedModel, working: int | None = None) -> Memory:
    """Returns the memory of one device; `working` are the bytes of its programs, None before they are compiled."""
    deployment, total = planned.deployment, planned.deployment.device.memory_bytes
    beside = nccl_ep.buffer_bytes(planned.model, deployment, planned.engine.forward_programs)
    pool = min(total * (deployment.memory_utilization + SLACK), total * (1 - OUTSIDE) - beside)
    memory = DeviceMemory(total, int(pool))
    found = account_for(planned.layout, memory, deployment.memory_utilization, working or 0)
    needed = cache_tokens(deployment, planned.model.page_size)
    return Memory(found, weight_groups(planned.params), needed, working is not None, beside)


def weight_groups(params: Any) -> dict[str, int]:
    """Returns the bytes of parameters on one device, by group; scales of FP8 weights count in the weights' group."""
    groups = dict.fromkeys((*_GROUPS, _REST), 0)
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    for keys, leaf in flat:
        path = leaf_path(keys).removeprefix("params.")
        name = next((n for n, prefixes in _GROUPS.items() if path.startswith(prefixes)), _REST)
        groups[name] += local_bytes(leaf)
    return {name: size for name, size in groups.items() if size or name not in (MODULE_EXPERTS, _MODULE, _MIXING)}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a deployment fits, a sentence with the numbers, and changes that would make it fit."""

    fits: bool
    why: str
    changes: tuple[str, ...]


def judge(memory: Memory, deployment: Deployment, num_experts: int) -> Verdict:
    """Returns whether a plan fits; `num_experts` is the model's number of routed experts."""
    device = deployment.device
    account = memory.account
    limit = f"{account.pool / GB:.1f} GB ({deployment.memory_utilization:g} of {device.memory_bytes / GB:g} GB)"
    parts = f"weights {account.weights / GB:.1f}, cache {memory.cache / GB:.1f}"
    working = f"{account.working / GB:.1f}" if account.working else "unknown"
    working += "" if memory.compiled else " (assumed)" if account.working else " (not compiled)"
    parts += f", state {account.state / GB:.1f}, working memory {working}"
    parts += f", beside NCCL EP's buffers of {memory.beside / GB:.1f}" if memory.beside else ""
    why = f"needs {memory.needed / GB:.1f} GB of {limit}: {parts}"
    if memory.fits:
        return Verdict(True, f"{why}; {memory.tokens_left:,} tokens of cache fit", ())
    return Verdict(False, why, tuple(_changes(memory, deployment, num_experts)))


def _changes(memory: Memory, deployment: Deployment, num_experts: int) -> list[str]:
    changes = []
    smaller = _smaller_batch(memory, deployment)
    if smaller:
        changes.append(smaller)
    if deployment.expert_parallel and (spread := nodes_that_fit(memory, deployment, num_experts)):
        nodes, redundant = spread
        changes.append(
            f"spread the experts over at least {nodes} nodes ({nodes * deployment.gpus_per_node} devices) with "
            f"redundant_experts {redundant}"
        )
    if not deployment.expert_parallel:
        changes.append("set expert_parallel, which spreads the routed experts over the devices")
    memory_needed = memory.needed / deployment.memory_utilization / GB
    changes.append(f"use devices of at least {math.ceil(memory_needed)} GB")
    return changes


def _smaller_batch(memory: Memory, deployment: Deployment) -> str | None:
    """Returns the advice to use fewer or shorter requests; None unless at least one request fits."""
    request = memory.cache_tokens // max(1, deployment.decode_requests)
    if not deployment.decode_requests or memory.tokens_left < request:
        return None
    requests, page_size = memory.tokens_left // request, memory.account.page_size
    context = memory.tokens_left // deployment.decode_requests // page_size * page_size
    return f"lower decode_requests to {requests} or context_length to {context}"


def nodes_that_fit(memory: Memory, deployment: Deployment, num_experts: int) -> tuple[int, int] | None:
    """Returns the fewest nodes on which everything fits, and their fewest redundant experts; None if none fits."""
    routed = memory.weights[EXPERTS] + memory.weights.get(MODULE_EXPERTS, 0)
    replica = routed * deployment.devices // (num_experts + deployment.redundant_experts)
    rest = memory.needed - routed
    for nodes in range(1, _MOST_NODES + 1):
        per_device = -(-num_experts // (nodes * deployment.gpus_per_node))
        if rest + per_device * replica <= memory.account.pool:
            return nodes, per_device * nodes * deployment.gpus_per_node - num_experts
    return None
