"""A restarted engine begins with the expert map and loads of the one before. The host's part alone."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.engine.jobs.experts import read_state, write_state
from sharding.experts.eplb import balancedness, rebalance_experts
from tests.dsv3.engine.test_balance import EXPERTS, drive, make_balancer

FIRST = rebalance_experts(np.ones((4, 16)), 24, 1, 1, 8)
LOAD = (100 * np.random.default_rng(0).lognormal(sigma=1.5, size=(4, 16))).astype(np.int64)
SUITED = rebalance_experts(LOAD, 24, 1, 1, 8)
LIFE = 12  # steps in which an engine decides, and moves its experts


@pytest.fixture
def file(tmp_path) -> Path:
    write_state(tmp_path / "experts", SUITED, [LOAD, LOAD])
    return tmp_path / "experts"


def test_the_next_engine_moves_its_experts_to_where_they_were(tmp_path) -> None:
    file = str(tmp_path / "experts")
    before, cfg = make_balancer(eplb_state=file)
    drive(before, cfg, 12)
    before._thread.shutdown()
    after, cfg = make_balancer(eplb_state=file, eplb_threshold=0.01)
    np.testing.assert_array_equal(after.load, before.load)
    assert (after.expert_map.phy2log != before.expert_map.phy2log).any()
    moves = [[int(move.layer) for move in command.moves] for command in drive(after, cfg, 5) if command.moves]
    assert moves == [[0, 1, 2], [3]]
    np.testing.assert_array_equal(after.expert_map.phy2log, before.expert_map.phy2log)


def live(file: Path, steps: int) -> np.ndarray:
    """An engine's life, without the results of its last step. Returns the expert map that it had reached."""
    balancer, cfg = make_balancer(eplb_state=str(file))
    drive(balancer, cfg, steps)
    balancer._thread.shutdown()
    return balancer.expert_map.phy2log


@settings(max_examples=12, deadline=None)
@given(lives=st.lists(st.integers(0, LIFE), max_size=3))
def test_an_engine_that_ends_at_any_step_leaves_the_map_before_or_after_a_move(tmp_path_factory, lives) -> None:
    """Three of four layers move in one step and the last one in the next, again in every second engine."""
    folder = tmp_path_factory.mktemp("lives")
    file, maps = folder / "experts", [FIRST.phy2log.tolist(), live(folder / "undisturbed", LIFE).tolist()]
    assert maps[0] != maps[1]
    for steps in lives:
        live(file, steps)
        found = read_state(file, EXPERTS, FIRST)
        assert found[0].phy2log.tolist() in maps if found else not file.exists()
    assert live(file, LIFE).tolist() == read_state(file, EXPERTS, FIRST)[0].phy2log.tolist() == maps[1]


@pytest.mark.parametrize("name", ["write_bytes", "replace"])
def test_a_process_that_dies_as_it_writes_leaves_what_was_there(file, monkeypatch, name) -> None:
    """It dies in the middle of the content, or before the rename. Nothing else is left."""

    class Death(BaseException):
        """An exception that no handler catches."""

    def dies(path: Path, content: bytes | Path) -> None:
        if isinstance(content, bytes):
            with path.open("wb") as part:
                part.write(content[: len(content) // 2])
        raise Death

    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(Path, name, dies)
        write_state(file, FIRST, [])
    kept, loads = read_state(file, EXPERTS, FIRST)
    assert (kept.phy2log == SUITED.phy2log).all() and len(loads) == 2
    write_state(file, FIRST, [])
    assert (read_state(file, EXPERTS, FIRST)[0].phy2log == FIRST.phy2log).all()
    assert not list(file.parent.glob(".*"))


def test_an_engine_that_never_moves_experts_saves_nothing(tmp_path) -> None:
    balancer, cfg = make_balancer(eplb_state=str(tmp_path / "experts"), eplb_interval=0)
    drive(balancer, cfg, 300)
    balancer._thread.shutdown()
    assert not (tmp_path / "experts").exists()


@pytest.mark.parametrize(("replicas", "devices"), [(20, 4), (18, 6), (32, 8)])
def test_other_devices_get_a_map_that_suits_the_load(file, replicas, devices) -> None:
    machine = dataclasses.replace(EXPERTS.machine, gpus=devices)
    experts = dataclasses.replace(EXPERTS, num_replicas=replicas, machine=machine)
    first = rebalance_experts(np.ones((4, 16)), replicas, 1, 1, devices)
    wanted, loads = read_state(file, experts, first)
    assert wanted.phy2log.shape == (4, replicas) and wanted.logcnt.min() >= 1
    even = balancedness(LOAD, wanted, devices)
    assert (even >= balancedness(LOAD, rebalance_experts(LOAD, replicas, 1, 1, devices), devices) - 1e-9).all()
    assert even.mean() > balancedness(LOAD, first, devices).mean()
    assert len(loads) == 2


def test_without_a_load_the_first_map_stays(tmp_path) -> None:
    write_state(tmp_path / "experts", SUITED, [])
    experts = dataclasses.replace(EXPERTS, num_replicas=32)
    first = rebalance_experts(np.ones((4, 16)), 32, 1, 1, 8)
    wanted, loads = read_state(tmp_path / "experts", experts, first)
    assert wanted is first and not loads


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"x"), "damaged"),
        (lambda file: file.write_bytes(b""), "damaged"),
        (
            lambda file: write_state(file, rebalance_experts(np.ones((3, 16)), 24, 1, 1, 8), []),
            "3 layers of 16 experts",
        ),
        (lambda file: write_state(file, SUITED._replace(phy2log=np.zeros((4, 24), np.int64)), []), "every expert"),
        (lambda file: (file.unlink(), file.mkdir()), "directory"),
    ],
    ids=["changed", "empty", "another model's", "experts missing", "a directory"],
)
def test_an_unusable_file_is_logged(file, caplog, spoil, words) -> None:
    spoil(file)
    assert read_state(file, EXPERTS, FIRST) is None
    assert words in caplog.text


def test_an_unwritable_file_is_logged(tmp_path, caplog) -> None:
    write_state(tmp_path / "nowhere" / "experts", SUITED, [LOAD])
    assert "is not saved in" in caplog.text
