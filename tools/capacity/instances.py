"""What one prefill and one decode instance of a fleet can do: published figures, or a plan that `launch.plan` wrote.

Nothing is compiled here. A prefill instance's rate counts the tokens that it computes: what a cache has costs nothing.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

Kind = Literal["prefill", "decode"]
KINDS: tuple[Kind, ...] = ("prefill", "decode")


class InstanceError(ValueError):
    """A plan of an instance that cannot be read, or that does not suit the traffic; the text says what to change."""


@dataclasses.dataclass(frozen=True)
class Instance:
    """One instance of a fleet: `nodes` of `gpus_per_node`, each of which reaches `tokens_per_node` per second.

    `batch` are, per GPU, the tokens of a prefill step or the requests of a decode step; `context` is the mean context
    that the rate was found with. `source` says where the rate comes from. A plan says what `room` for tokens a GPU's
    cache has, and the bytes of a token in it.
    """

    kind: Kind
    nodes: int
    gpus_per_node: int
    tokens_per_node: float
    batch: float
    context: float
    source: str
    room: int | None = None
    token_bytes: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole instance."""
        return self.nodes * self.tokens_per_node

    @property
    def per_batch(self) -> float:
        """Tokens per second and unit of the batch.

        The reciprocal is a prefill step's time; in decode it is the speed that one request sees.
        """
        return self.tokens_per_node / self.gpus_per_node / self.batch


def published(kind: Kind, name: str) -> Instance:
    """Returns what DeepSeek published of an instance on H800s: `fleet`, means of a day, or `profile`, its profiles."""
    return _PUBLISHED[name, kind]


_COMPUTED = 73_700 * 266 / 608
"""73.7k tokens per second and prefill node, hits included, of which 266 of 608 billion were computed."""
_SPEED = 21
"""Tokens per second of one request: 20 to 22 are published."""

_PUBLISHED: dict[tuple[str, Kind], Instance] = {
    ("fleet", "prefill"): Instance(
        "prefill", 4, 8, _COMPUTED, 16_384, 4383, "published: 73.7k tokens/s per node, 266 of 608 B computed"
    ),
    ("fleet", "decode"): Instance(
        "decode", 18, 8, 14_800, 14_800 / 8 / _SPEED, 4989, "published: 14.8k tokens/s per node, 20 to 22 per request"
    ),
    ("profile", "prefill"): Instance(
        "prefill", 4, 8, 62_700, 16_384, 4096, "DeepSeek's profile: EP32, prompts of 4K, no hits, experts balanced"
    ),
    ("profile", "decode"): Instance("decode", 16, 8, 18_600, 128, 4096, "DeepSeek's profile: EP128, experts balanced"),
}
PUBLISHED = tuple(dict.fromkeys(name for name, _ in _PUBLISHED))


def from_plan(kind: Kind, path: Path, model: str) -> Instance:
    """Reads an instance from what `python -m launch.plan DEPLOYMENT --json=FILE` wrote of it.

    Raises InstanceError where the file is none, has no step of this kind, does not fit its devices, or is of another
    model.
    """
    try:
        plan = json.loads(path.read_text("utf-8"))
        return _read(kind, plan, path.name, model)
    except InstanceError as error:
        raise InstanceError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InstanceError(f"{path}: cannot be read: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InstanceError(f"{path}: not what launch.plan --json writes: {type(error).__name__} {error}") from None


def _read(kind: Kind, plan: dict[str, Any], name: str, model: str) -> Instance:
    if plan["model"] != model:
        raise InstanceError(f"is a plan of {plan['model']}, not of --model {model}")
    deployment, memory = plan["deployment"], plan["memory"]
    left, token = memory["tokens_left"], memory["token"]
    [*steps] = (step for step in plan["steps"] if step["phase"] == kind)
    field = "prefill_tokens" if kind == "prefill" else "decode_requests"
    if not plan["verdict"]["fits"]:
        raise InstanceError(f"does not fit: {plan['verdict']['why']}")
    if not steps:
        raise InstanceError(f"has no {kind} step: its deployment needs {field}")
    per_rank = deployment[field]
    split = deployment["tensor_parallel"]
    nodes, gpus = deployment["nodes"], deployment["gpus_per_node"]
    numbers = [nodes, gpus, split, per_rank, steps[0]["tokens_per_node"], deployment["context_length"], left, token]
    if not all(isinstance(n, int | float) and 0 < n < math.inf for n in numbers):
        raise InstanceError(f"has numbers that cannot be: {numbers}")
    return Instance(
        kind,
        nodes,
        gpus,
        tokens_per_node=steps[0]["tokens_per_node"],
        batch=per_rank / split,
        context=deployment["context_length"],
        source=f"plan {name}, an estimate: {deployment['name']}",
        room=int(left / split),
        token_bytes=token,
    )


def check(instance: Instance, context: float) -> Sequence[str]:
    """Returns what must be said of a rate that was found with another mean context than `context`.

    Raises InstanceError where the batch does not fit the cache at this context.
    """
    if instance.kind == "decode" and instance.room is not None and instance.batch * context > instance.room:
        most = int(instance.room / context)
        raise InstanceError(
            f"{instance.source}: {instance.batch:,.0f} requests of {context:,.0f} tokens per GPU need more than the "
            f"{instance.room:,} tokens of cache that fit: plan it with decode_requests {most} and context_length "
            f"{context:.0f}"
        )
    if abs(context / instance.context - 1) <= 0.1:
        return ()
    what = "mean prompt" if instance.kind == "prefill" else "mean context"
    return (
        f"{instance.kind}: the rate is for a {what} of {instance.context:,.0f} tokens, the traffic's is "
        f"{context:,.0f}; a plan of your own says what that changes (--{instance.kind}_plan)",
    )
