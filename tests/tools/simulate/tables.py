"""Step times for tests: linear in tokens and keys, so that sums can be done by hand."""

from dsv3.config.options import Role
from tools.simulate.times import KEYS, InstanceTimes

HOST = 1e-3


def prefill_s(bucket: int, keys: float) -> float:
    """Returns the time of a prefill step by hand."""
    return HOST + 1e-4 * bucket + 1e-7 * bucket * keys


def decode_s(bucket: int, keys: float) -> float:
    """Returns the time of a decode step by hand."""
    return HOST + 1e-2 + 1e-4 * bucket + 1e-7 * bucket * keys


def table(role: Role = "both", *, ranks: int = 1, seqs: int = 4, batched: int = 64, pages: int = 64) -> InstanceTimes:
    """Returns an instance with few batch slots and pages."""
    decode = [size for size in (1, 4, 16, 64) if size < seqs] + [seqs]
    prefill = [size for size in (64, 256, 1024) if size < batched] + [batched]
    return InstanceTimes(
        name=f"small_{role}",
        digest="",
        role=role,
        nodes=2,
        gpus_per_node=8,
        num_ranks=ranks,
        num_pages=pages,
        page_bytes=2**20,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        max_model_len=1024,
        keys=3000.0,
        link=2.0**30,
        host=HOST,
        prefill={size: tuple(prefill_s(size, keys) for keys in KEYS) for size in prefill},
        decode={} if role == "prefill" else {size: tuple(decode_s(size, keys) for keys in KEYS) for size in decode},
    )
