"""The limits and memory of an engine, under vLLM's names."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from dsv3.config.declaration import check, option
from dsv3.config.identity import fingerprint
from dsv3.config.model import PAGE_SIZE
from dsv3.config.options import RunOptions

_MIN_PREFILL_TOKENS = 64
_LONG_PREFILL_TOKENS = 1024
"""From so many tokens on, saved padding justifies more programs, by the plan's estimates."""
_MAX_PREFILL_ROWS = 16
_FINE = 64  # above so many rows of a decode batch sizes are denser, because padding costs time


class ForwardProgram(NamedTuple):
    """A program that runs layers of the model: the main model's, or with `of_module` those that make its drafts.

    `kind` and `size` are those of its `Key`. One rank runs `tokens` tokens, padding included.
    """

    kind: str
    size: int
    tokens: int
    of_module: bool = False


@dataclasses.dataclass(frozen=True)
class EngineConfig(RunOptions):
    """Limits of one engine, with the options that it reads; counts are per data-parallel rank, except the queue's.

    The ranks are spread equally and in order over `num_processes` processes, and over `num_nodes` nodes of the mesh,
    each with the devices of one host. `identity` is the prefix of the keys of the prefix cache. Raises ValueError for a
    value out of range.
    """

    # Free memory differs between processes: the leader broadcasts the minimum.
    max_model_len: int = option(help="Limit prompt and answer together to this many tokens.", low=1, agree=False)
    num_pages: int = option(help="Hold this many pages, enough for a request of max_model_len.", low=1, agree=False)
    max_num_seqs: int = option(64, "Run at most this many sequences at once.", low=1)
    max_num_batched_tokens: int = option(1024, "Compute at most this many prompt tokens per step.", low=1)
    num_ranks: int = option(1, "Serve with this many data-parallel ranks.", low=1)
    num_processes: int = option(1, "Spread the ranks over this many processes.", low=1)
    num_nodes: int = option(1, "Spread the ranks over this many nodes of the mesh.", low=1)
    tokens_per_row: int = option(
        1, "Give each row of a decode step up to this many tokens, all but the last from drafts.", low=1, high=8
    )
    page_size: int = option(PAGE_SIZE, "Cover this many tokens with a page; the model says how many.", low=1)
    window_size: int = option(0, "Read this many tokens from window pages; the model says how many.", low=0)
    num_window_pages: int = option(0, "Hold this many window pages, for a model with a window.", low=0, agree=False)
    draft_block: int = option(0, "Draft in blocks of this many tokens; the model says how many.", low=0)
    cache_dtype: str = option("float32", "Store latents in this type, a name of `dsv3.kv_cache.layout`.")
    identity: str = option("", "Identify what pages depend on besides tokens (`dsv3.config.identity`).", programs=False)
    transfer_addresses: tuple[str, ...] = option(
        (), "Give each process of an instance of several its own transfer_address.", agree=False, programs=False
    )
    eplb_interval: int = option(0, "Let this many steps pass between moves; 0: never move.", low=0, programs=False)

    def __post_init__(self) -> None:
        check(self)
        if self.num_pages < self.pages_per_seq:
            raise ValueError(
                f"num_pages: {self.num_pages} pages of {self.page_size} tokens cannot hold one request of "
                f"max_model_len {self.max_model_len}; lower max_model_len or give the cache more memory"
            )
        if self.num_window_pages < self.least_window_pages:
            raise ValueError(
                f"num_window_pages: {self.num_window_pages} pages of the window are fewer than the "
                f"{self.least_window_pages} that max_num_seqs {self.max_num_seqs} requests may need; lower "
                "max_num_seqs or give the cache more memory"
            )

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.identity)

    @property
    def num_devices(self) -> int:
        return self.num_ranks * self.tensor_parallel_size

    def ranks_of(self, process_id: int) -> range:
        """Returns the ranks whose devices belong to a process of the instance."""
        each = self.num_ranks // self.num_processes
        return range(process_id * each, (process_id + 1) * each)

    def transfer_address_of(self, process_id: int) -> str | None:
        """Returns the address at which a process of the instance serves pages to others, if any."""
        return self.transfer_addresses[process_id] if self.transfer_addresses else self.transfer_address

    @property
    def pages_per_seq(self) -> int:
        """Width of a page table, including drafts after a request's last token."""
        return self.pages_for(self.max_model_len + self.tokens_ahead)

    def pages_for(self, tokens: int) -> int:
        return pages_for(tokens, self.page_size)

    @property
    def has_window(self) -> bool:
        """Whether layers read the last tokens from pages of a window."""
        return self.window_size > 0

    @property
    def least_window_pages(self) -> int:
        """The window pages without which running requests might wait for each other."""
        return least_window_pages(self.max_num_seqs, self.page_size, self.window_size)

    def first_window_page(self, tokens: int) -> int:
        """Returns the first window page that a request of so many `tokens` keeps.

        A step reads the last `window_size` tokens. Another request can continue the prefix behind the last page that
        is full, or, where there is no token behind it, the one before.
        """
        return max(0, min((tokens - self.window_size) // self.page_size, (tokens - 1) // self.page_size - 1))

    @property
    def tokens_ahead(self) -> int:
        """Positions after a request's last token that a step may write."""
        return tokens_ahead(self.tokens_per_row)

    def width(self, size: int) -> int:
        """Returns the tokens per row of a decode step of the bucket `size`."""
        return self.tokens_per_row if self.speculative is None else 1 + self.speculative.drafts(size)

    @functools.cached_property
    def decode_buckets(self) -> tuple[int, ...]:
        """Batch sizes decode is compiled for: 1, `decode_batch_sizes`, and `max_num_seqs`.

        Without that option they are 1, 4, 16, 64, 96, 128, 192, ... and `max_num_seqs`.
        """
        given = {1, *self.decode_sizes}
        return _up_to(self.max_num_seqs, given) if self.decode_sizes else _decode_sizes(self.max_num_seqs)

    @functools.cached_property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Token counts prefill is compiled for: `prefill_batch_sizes`, and `max_num_batched_tokens`.

        Without that option they are 64, 256, 1024, 2048, 4096, ... and `max_num_batched_tokens`.
        """
        if self.prefill_sizes:
            return _up_to(self.max_num_batched_tokens, self.prefill_sizes)
        return _sizes(_MIN_PREFILL_TOKENS, self.max_num_batched_tokens, doubling_from=_LONG_PREFILL_TOKENS)

    @functools.cached_property
    def forward_programs(self) -> tuple[ForwardProgram, ...]:
        """The programs that run layers of the model, in the order of their numbers."""
        prefill = [ForwardProgram("prefill", size, size) for size in self.prefill_buckets]
        decode = [ForwardProgram("decode", size, size * self.width(size)) for size in self.decode_buckets]
        if self.speculative is None or self.speculative.method == "ngram":
            return (*prefill, *decode)
        if self.speculative.method == "dspark":
            rows = {p: self.prefill_rows(p.size) if p.kind == "prefill" else p.size for p in (*prefill, *decode)}
            blocks = [ForwardProgram(f"dspark {p.kind}", p.size, n * self.draft_block, True) for p, n in rows.items()]
            return (*prefill, *decode, *blocks)
        after = [main._replace(kind=f"mtp {main.kind}", of_module=True) for main in (*prefill, *decode)]
        chain = [ForwardProgram("mtp chain", size, size, of_module=True) for size in self.decode_buckets]
        return (*prefill, *decode, *after, *chain)

    def program_number(self, kind: str, size: int) -> int:
        """Returns the index of a program in `forward_programs`, which is the index of its counts."""
        return next(i for i, each in enumerate(self.forward_programs) if (each.kind, each.size) == (kind, size))

    def prefill_rows(self, tokens: int) -> int:
        """Returns how many requests share a prefill batch of the bucket `tokens`.

        One of the decode buckets, for the sampler.
        """
        return self._prefill_rows[tokens]

    @functools.cached_property
    def _prefill_rows(self) -> dict[int, int]:
        most = {tokens: min(tokens, _MAX_PREFILL_ROWS) for tokens in self.prefill_buckets}
        return {tokens: max(b for b in self.decode_buckets if b <= rows) for tokens, rows in most.items()}


def pages_for(tokens: int, page_size: int) -> int:
    """Returns how many pages of `page_size` tokens hold `tokens` tokens."""
    return -(-tokens // page_size)


_MORE_WINDOW_PAGES = 8


def least_window_pages(slots: int, page_size: int, window_size: int) -> int:
    """Returns the fewest window pages with which each of `slots` running requests can always have its next page.

    A request keeps those of its last tokens and of the page before (`EngineConfig.first_window_page`), and gets one
    ahead. A chunk of a prompt has new ones before it gives back the old ones.
    """
    if not window_size:
        return 0
    return slots * (max(2, pages_for(window_size, page_size) + 1) + 2) + _MORE_WINDOW_PAGES


def tokens_ahead(tokens_per_row: int) -> int:
    """Returns the positions after a request's last token that a step may write.

    Verifying k drafts writes k positions. Proposing the next k, each from the previous one, writes k - 1 more.
    """
    drafts = tokens_per_row - 1
    return max(drafts, 2 * drafts - 1)


def bucket(sizes: tuple[int, ...], needed: int) -> int:
    """Returns the smallest of the ascending `sizes` that holds `needed`."""
    return next(size for size in sizes if size >= needed)


def _up_to(stop: int, sizes: Iterable[int]) -> tuple[int, ...]:
    return (*sorted(size for size in sizes if size < stop), stop)


def _decode_sizes(stop: int) -> tuple[int, ...]:
    """Returns powers of four up to 64, then sizes that grow by a half or a third.

    DeepSeek's unit of 144 GPUs takes 82.6 ms for 88 requests of each in a batch of 128, and 69.3 ms in one of 96
    (estimates of `launch.plan`). A size close to `stop` is omitted.
    """
    sizes, size = list(_sizes(1, min(stop, _FINE))), _FINE
    while size < stop:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
        if size * 8 < stop * 7:
            sizes.append(size)
    return (*sizes, stop) if stop > _FINE else tuple(sizes)


def _sizes(start: int, stop: int, *, doubling_from: float = math.inf) -> tuple[int, ...]:
    """Returns sizes that grow by 4, from `doubling_from` on by 2, and finally `stop`."""
    sizes = []
    while start < stop:
        sizes.append(start)
        start *= 2 if start >= doubling_from else 4
    return (*sizes, stop)
