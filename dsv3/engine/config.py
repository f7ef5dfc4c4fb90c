"""What an engine is given besides a model: limits and memory, under the names vLLM's users know."""

import dataclasses

from dsv3.cache.page import pages_for

_MIN_PREFILL_TOKENS = 64
_MAX_PREFILL_ROWS = 16
MAX_TOKENS_PER_ROW = 8


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine; all counts are per data-parallel rank but `max_num_queued_reqs`.

    `max_model_len` bounds prompt and answer together, in tokens. `max_num_seqs` requests run at once.
    `max_num_batched_tokens` bounds the prompt tokens of one step. `num_pages` is the pool of 64-token pages; it must
    hold at least one request of `max_model_len`. Above `max_num_queued_reqs` waiting requests (those that a free slot
    awaits are not counted) the engine refuses new ones. `num_nodes` says over how many hosts the ranks are
    spread, equally and in order; a rank is `tensor_parallel_size` devices of one host. A decode step gives each
    row 1 to `tokens_per_row` tokens, all but the last of them drafts that proved right. `model_id`, `cache_dtype` and
    `tokenizer_id` enter the keys of the prefix cache. `seed` starts the random numbers of requests that bring no seed
    of their own. At least `eplb_interval` steps apart (0: never) experts are moved between devices where
    the load is so uneven that its mean is less than `eplb_threshold` of the busiest device's.

    Raises ValueError for a value out of range.
    """

    max_model_len: int
    num_pages: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_num_queued_reqs: int = 1024
    num_ranks: int = 1
    num_nodes: int = 1
    tensor_parallel_size: int = 1
    tokens_per_row: int = 1
    enable_prefix_caching: bool = True
    model_id: str = ""
    cache_dtype: str = "float32"
    tokenizer_id: str = ""
    seed: int = 0
    eplb_interval: int = 0
    eplb_threshold: float = 0.9

    def __post_init__(self) -> None:
        counts = ("max_model_len", "num_pages", "max_num_seqs", "max_num_batched_tokens", "num_ranks")
        for name in (*counts, "tensor_parallel_size", "tokens_per_row"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not at least 1")
        if self.tokens_per_row > MAX_TOKENS_PER_ROW:
            raise ValueError(f"tokens_per_row: {self.tokens_per_row} is more than {MAX_TOKENS_PER_ROW}")
        if self.max_num_queued_reqs < 0:
            raise ValueError(f"max_num_queued_reqs: {self.max_num_queued_reqs} is negative")
        if self.eplb_interval < 0:
            raise ValueError(f"eplb_interval: {self.eplb_interval} is negative")
        if not 0 < self.eplb_threshold <= 1:
            raise ValueError(f"eplb_threshold: {self.eplb_threshold} is not above 0 and at most 1")
        if self.num_pages < self.pages_per_seq:
            raise ValueError(
                f"num_pages: {self.num_pages} pages of 64 tokens cannot hold one request of max_model_len "
                f"{self.max_model_len}; lower max_model_len or give the cache more memory"
            )

    @property
    def num_devices(self) -> int:
        """Devices of all ranks."""
        return self.num_ranks * self.tensor_parallel_size

    def ranks_of(self, process_id: int) -> range:
        """Returns the ranks whose devices belong to a process of the instance."""
        each = self.num_ranks // self.num_nodes
        return range(process_id * each, (process_id + 1) * each)

    @property
    def pages_per_seq(self) -> int:
        """Width of a page table: a step may write drafts behind a request's last token."""
        return pages_for(self.max_model_len + self.tokens_per_row - 1)

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Batch sizes decode is compiled for: 1, 4, 16, ... and `max_num_seqs`."""
        return _powers_of_four(1, self.max_num_seqs)

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Token counts prefill is compiled for: 64, 256, 1024, ... and `max_num_batched_tokens`."""
        return _powers_of_four(_MIN_PREFILL_TOKENS, self.max_num_batched_tokens)

    @property
    def forward_programs(self) -> tuple[tuple[str, int], ...]:
        """The model's programs, by kind and bucket."""
        prefill = (("prefill", size) for size in self.prefill_buckets)
        return (*prefill, *(("decode", size) for size in self.decode_buckets))

    def prefill_rows(self, tokens: int) -> int:
        """Requests that share a prefill batch of the bucket `tokens`; one of the decode buckets, for the sampler."""
        wanted = min(tokens, _MAX_PREFILL_ROWS)
        return max(b for b in self.decode_buckets if b <= wanted)


def bucket(sizes: tuple[int, ...], needed: int) -> int:
    """The smallest of the ascending `sizes` that holds `needed`."""
    return next(size for size in sizes if size >= needed)


def _powers_of_four(start: int, stop: int) -> tuple[int, ...]:
    sizes = []
    while start < stop:
        sizes.append(start)
        start *= 4
    return (*sizes, stop)
