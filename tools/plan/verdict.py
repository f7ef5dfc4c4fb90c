"""Whether a deployment fits its devices, and what to change where it does not."""

import dataclasses
import math

from tools.plan.deployment import Deployment
from tools.plan.memory import EXPERTS, MODULE_EXPERTS, Memory

_MOST_NODES = 64
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The answer, the numbers behind it in a sentence, and what would change it."""

    fits: bool
    why: str
    changes: tuple[str, ...]


def judge(memory: Memory, deployment: Deployment, num_experts: int) -> Verdict:
    """Judges a plan's memory; `num_experts` is the model's number of routed experts."""
    device = deployment.device
    account = memory.account
    limit = f"{account.pool / GB:.1f} GB ({deployment.memory_utilization:g} of {device.memory_bytes / GB:g} GB)"
    parts = f"weights {account.weights / GB:.1f}, cache {memory.cache / GB:.1f}"
    working = f"{account.working / GB:.1f}" if memory.compiled else "unknown (not compiled)"
    parts += f", state {account.state / GB:.1f}, working memory {working}"
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
    """Advises fewer or shorter requests, where the weights leave room for at least one."""
    request = memory.cache_tokens // max(1, deployment.decode_requests)
    if not deployment.decode_requests or memory.tokens_left < request:
        return None
    requests, page_size = memory.tokens_left // request, memory.account.page_size
    context = memory.tokens_left // deployment.decode_requests // page_size * page_size
    return f"lower decode_requests to {requests} or context_length to {context}"


def nodes_that_fit(memory: Memory, deployment: Deployment, num_experts: int) -> tuple[int, int] | None:
    """Finds the fewest nodes, with the fewest redundant experts that divide over them, that hold everything."""
    routed = memory.weights[EXPERTS] + memory.weights.get(MODULE_EXPERTS, 0)
    replica = routed * deployment.devices // (num_experts + deployment.redundant_experts)
    rest = memory.needed - routed
    for nodes in range(1, _MOST_NODES + 1):
        per_device = -(-num_experts // (nodes * deployment.gpus_per_node))
        if rest + per_device * replica <= memory.account.pool:
            return nodes, per_device * nodes * deployment.gpus_per_node - num_experts
    return None
