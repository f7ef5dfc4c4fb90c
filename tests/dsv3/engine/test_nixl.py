"""One engine computes a prompt, another reads its pages by NIXL: the same text, even if the first dies meanwhile."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dsv3.engine.engine import Engine
from dsv3.kv_cache.tiers import tiers
from dsv3.kv_cache.transfer import nixl
from tests.dsv3.engine import toy
from tests.dsv3.engine.driving import request, run
from tests.dsv3.engine.test_disaggregation import FULL, PROMPT, free_address
from tests.dsv3.kv_cache.transfer.fake_agent import FakeAgent

MakeEngine = Callable[..., Engine]
PAGE_BYTES = 512  # of the toy model


def test_pages_are_read_and_a_death_in_the_middle_costs_no_answer(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tiers, "FETCH_S", 300.0)
    monkeypatch.setattr(tiers, "is_loading_faster", lambda *_: True)
    monkeypatch.setattr(nixl, "_MAX_ROWS", 1)
    agents: list[FakeAgent] = []
    monkeypatch.setattr(nixl, "open_agent", lambda progresses: agents.append(FakeAgent()) or agents[-1])
    key = tmp_path / "transfer.key"
    key.write_text("k" * 40)
    key.chmod(0o600)
    options = {
        "kv_offloading_size": 1e-3,
        "identity": '{"weights": "w"}',
        "transfer_key_file": str(key),
        "transfer_carrier": "nixl",
    }
    prefill = make_engine(**options, role="prefill", transfer_address=free_address())
    decode = make_engine(**options, role="decode")
    theirs, mine = agents

    def answered(name: str, prompt: list[int]) -> int:
        """Computes and answers a prompt, checks the text; returns how many tokens came with pages."""
        run(prefill, request(f"{name} first", prompt, max_tokens=1, ignore_eos=True))
        item = msgspec.structs.replace(request(name, prompt, max_tokens=8), pages_from=prefill.cfg.transfer_address)
        gathered = run(decode, item)[name]
        assert gathered.tokens == toy.expected_tokens(prompt, 8, (toy.EOS,))
        return gathered.outputs[0].num_cached_tokens

    def carried() -> tuple[list[int], list[int]]:
        peer = decode.stats().jobs["pages"].tiers["peer"]
        return [size // PAGE_BYTES for size in peer.carried_bytes], peer.carrier_failures

    assert answered("read", PROMPT) == FULL
    assert carried() == ([0, 3], [0, 0])
    reads = iter(range(10))

    def dies() -> None:
        if next(reads):
            theirs.is_dead = True
            prefill.planners["pages"].server._agent = b""

    mine.begins = dies
    assert answered("dies", PROMPT[::-1]) == FULL
    assert carried() == ([2, 4], [0, 1]), "sockets have brought the others"
