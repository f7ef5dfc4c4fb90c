"""Bytes per device, by the server's own account: from shapes, and working memory from the compiler."""

import dataclasses
from typing import Any

import jax

from dsv3.checkpoint.layout import leaf_path
from dsv3.engine.device.pool import SLACK
from dsv3.engine.memory import DeviceMemory, MemoryAccount, local_bytes
from dsv3.engine.sizing import account_of
from tools.plan.programs import LaidOut, cache_tokens

EXPERTS, MODULE_EXPERTS = "routed experts", "MTP module, routed experts"
_MODULE = "MTP module, all else"
_GROUPS = {
    EXPERTS: ("moe.moe.gate_up", "moe.moe.down"),
    "shared experts": ("moe.moe.shared",),
    "dense layers": ("dense.mlp",),
    "attention": ("dense.attention", "moe.attention"),
    "embedding and head": ("embed", "head"),
    MODULE_EXPERTS: ("mtp.layers.moe.gate_up", "mtp.layers.moe.down"),
    _MODULE: ("mtp.",),
}
_REST = "router, norms, expert map"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device: its `account`, and the tokens of cache that the deployment's requests need.

    `weights` are the account's by group; an MTP module has groups of its own, and a cache layer in `token`. What
    programs take is known after compiling them: `compiled` says whether it is in the account.
    """

    account: MemoryAccount
    weights: dict[str, int]
    cache_tokens: int
    compiled: bool

    @property
    def token(self) -> int:
        """Bytes of a token of cache: its share of a page, rounded up."""
        return -(-self.account.page // self.account.page_size)

    @property
    def cache(self) -> int:
        """Bytes of the cache that the deployment's requests need."""
        return self.token * self.cache_tokens

    @property
    def needed(self) -> int:
        """Everything."""
        return self.account.weights + self.account.state + self.account.working + self.cache

    @property
    def tokens_left(self) -> int:
        """Tokens of cache that fit beside everything else, those of the deployment's requests included."""
        return self.account.tokens

    @property
    def fits(self) -> bool:
        """Whether the requests' cache and everything else stay within the engine's share of the device."""
        return self.cache_tokens <= self.account.tokens


def memory_of(planned: LaidOut, working: int | None = None) -> Memory:
    """Returns the memory of one device, whose programs take `working`: None before they are compiled."""
    deployment, total = planned.deployment, planned.deployment.device.memory_bytes
    memory = DeviceMemory(total, int(total * (deployment.memory_utilization + SLACK)))
    found = account_of(planned.layout, memory, deployment.memory_utilization, working or 0)
    return Memory(
        found, weight_groups(planned.params), cache_tokens(deployment, planned.model.page_size), working is not None
    )


def weight_groups(params: Any) -> dict[str, int]:
    """Returns the bytes of parameters on one device, by group; the scales of FP8 weights belong to their group."""
    groups = dict.fromkeys((*_GROUPS, _REST), 0)
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    for keys, leaf in flat:
        path = leaf_path(keys).removeprefix("params.")
        name = next((n for n, prefixes in _GROUPS.items() if path.startswith(prefixes)), _REST)
        groups[name] += local_bytes(leaf)
    return {name: size for name, size in groups.items() if size or name not in (MODULE_EXPERTS, _MODULE)}
