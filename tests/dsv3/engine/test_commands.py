"""A follower's part of a command has the data of its ranks, and no more."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.config.engine import EngineConfig
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.wire import MAX_MESSAGE_BYTES
from dsv3.engine.device.sampling import bitmask_words
from dsv3.engine.device.state import NUM_FIELDS
from dsv3.engine.job import StepCommand
from dsv3.engine.jobs import JOB_KINDS
from dsv3.engine.jobs.decode import DecodeCommand
from dsv3.engine.jobs.prefill import PrefillCommand
from dsv3.engine.jobs.sample import Adjustment, RowMasks, SampleCommand
from dsv3.scheduler.structured_output import MAX_PROCESS_BYTES

LIMITS = {"max_model_len": 256, "num_pages": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
CFG = EngineConfig(**LIMITS, num_ranks=6, num_processes=3)


WINDOWED = EngineConfig(**LIMITS, num_ranks=6, num_processes=3, window_size=20, num_window_pages=100)


@st.composite
def prefills(draw: st.DrawFn, has_window: bool = False) -> PrefillCommand:
    """Chunks of at most 64 tokens per rank, four at most, in the order of the ranks."""
    header, tokens, pages = [], [], []
    for rank in range(CFG.num_ranks):
        for slot in range(draw(st.integers(0, 4))):
            count, num_pages = draw(st.integers(1, 16)), draw(st.integers(1, CFG.pages_per_seq))
            header.append([rank, num_pages, slot, count, draw(st.integers(0, 100)), 1, *range(NUM_FIELDS)])
            tokens += draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
            pages += draw(st.lists(st.integers(0, 3), min_size=num_pages, max_size=num_pages))
    columns = np.array(header, np.int32).reshape(len(header), 6 + NUM_FIELDS)
    windows = np.arange(len(pages), dtype=np.int32) if has_window else None
    return PrefillCommand(64, columns, np.array(tokens, np.int32), np.array(pages, np.int32), True, windows=windows)


@settings(max_examples=50, deadline=None)
@given(st.one_of(prefills(), prefills(has_window=True)))
def test_a_part_of_a_prefill_makes_the_arrays_of_its_ranks(command: PrefillCommand) -> None:
    cfg = CFG if command.windows is None else WINDOWED
    whole = command.arrays(cfg.num_ranks, cfg)
    for process in range(cfg.num_processes):
        ranks = cfg.ranks_of(process)
        body = messages.encode(messages.step_of(StepCommand(1, (("prefill", command.part(ranks)),))))
        [[_, part]] = messages.command_of(messages.decode_for_follower(body), JOB_KINDS).jobs
        for mine, every in zip(part.arrays(len(ranks), cfg), whole, strict=True):
            np.testing.assert_array_equal(mine, every[ranks.start : ranks.stop])


def test_a_part_of_a_decode_holds_the_rows_of_its_ranks() -> None:
    rows = np.arange(6 * 4 * 3, dtype=np.int32).reshape(6, 4, 3)
    np.testing.assert_array_equal(DecodeCommand(rows, 1).part(range(2, 4)).rows, rows[2:4])


def test_adjustments_go_to_their_rank_alone_and_every_process_launches_as_often() -> None:
    arrays = dict.fromkeys(("tokens", "bias_ids", "forbidden_ids"), np.array([1, 2], np.int32))
    adjustments = [
        Adjustment(rank=rank, slot=slot, prompt_length=1, bias=np.ones(2, np.float32), **arrays)
        for rank, slot in ((0, 1), (3, 0), (3, 2))
    ]
    command = SampleCommand(2, False, adjustments, 2)
    parts = [command.part(CFG.ranks_of(process)) for process in range(3)]
    assert [[(a.rank, a.slot) for a in part.adjustments] for part in parts] == [[(0, 1)], [(1, 0), (1, 2)], []]
    assert {part.adjust_launches for part in parts} == {2}


@pytest.mark.parametrize("ranks", [32, 144])
def test_a_request_that_changes_its_logits_costs_its_own_tokens(ranks: int) -> None:
    """Such a request once took ranks x max_model_len x 5 bytes, 118 MB at 144 ranks: more than a frame holds."""
    tokens = np.zeros(163_840, np.int32)
    few = np.zeros(3, np.int32)
    one = Adjustment(0, 0, 1, tokens, few, few.astype(np.float32), few)
    command = StepCommand(1, (("prefill", SampleCommand(2, False, [one], 1)),))
    sizes = [len(messages.encode(messages.step_of(command.part(range(r, r + 8))))) for r in range(0, ranks, 8)]
    assert tokens.nbytes < sizes[0] < tokens.nbytes + 500
    assert max(sizes[1:]) < 200


def test_bitmasks_of_the_largest_process_fit_a_message() -> None:
    """Eight ranks of 256 rows of a token and three drafts, all constrained, over DeepSeek's vocabulary."""
    words = bitmask_words(129_280)
    one = SampleCommand(2, masks=RowMasks(np.zeros((1, 2), np.int32), np.zeros((1, 4, words), np.uint32)))
    decode = 8 * 256 * len(messages.encode(messages.step_of(StepCommand(1, (("decode", one),)))))
    assert decode > 64 * 2**20 and decode < MAX_PROCESS_BYTES
    assert 2 * MAX_PROCESS_BYTES + 64 * 2**20 < MAX_MESSAGE_BYTES


def test_a_long_context_costs_only_the_pages_in_use() -> None:
    """16 chunks of 4,096 tokens on 144 ranks of 18 hosts, with max_model_len 163,840."""
    header = np.array([[9 * i, 64, 0, 4096, 0, 1, *range(NUM_FIELDS)] for i in range(16)], np.int32)
    tokens, pages = np.full(16 * 4096, 100_000, np.int32), np.zeros(16 * 64, np.int32)
    command = PrefillCommand(4096, header, tokens, pages, True)
    sizes = [len(msgspec.msgpack.encode(messages.step_of(_step(command, host)))) for host in range(18)]
    assert max(sizes) < 100_000


def _step(command: PrefillCommand, host: int) -> StepCommand:
    return StepCommand(1, (("prefill", command.part(range(8 * host, 8 * host + 8))),))
