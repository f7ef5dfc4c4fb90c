"""Compressed attention, in jax.numpy and in Triton's interpreter, against float64: NaN wherever nothing may be read."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compressed, gpus
from pallas_kernels.backend import Backend
from pallas_kernels.compressed import RowList, attend_compressed, attend_part
from pallas_kernels.entries import decode_rows, encode_rows
from pallas_kernels.mosaic import interpret_params, reset_interpreter

pytestmark = pytest.mark.usefixtures("interpreted")
REFERENCE, TRITON = Backend.REFERENCE, Backend.TRITON
BF16, F16 = jnp.bfloat16, jnp.float16
WINDOW, ENTRIES, PAGES, ROTATED = 20, 70, 6, 64
NOWHERE = np.iinfo(np.int32)
_encode_rows = jax.jit(encode_rows, static_argnums=(1, 2))
_decode_rows = jax.jit(decode_rows, static_argnums=(1, 2, 3))
COUNTS = ((0, 0), (1, 0), (20, 0), (20, 70), (7, 33), (16, 12), (20, 1), (0, 5))


@dataclasses.dataclass(frozen=True)
class Lists:
    """Queries, one per pair of counts, and float64 rows of each list, in its order."""

    q: jax.Array
    sink: jax.Array
    own: jax.Array
    window: RowList
    entries: RowList
    values: list[np.ndarray]

    def attend(self, backend: Backend, queries: slice = slice(None), with_entries: bool = True) -> np.ndarray:
        window, entries = (RowList(r.array, r.numbers[queries], r.counts[queries]) for r in (self.window, self.entries))
        how = {"scale": 0.1, "plain": self.q.shape[-1] - ROTATED, "layer": 1, "backend": backend}
        q = self.q[queries]
        attend = jax.jit(functools.partial(attend_compressed, **how))
        return np.asarray(attend(q, self.sink, self.own, window, entries if with_entries else None), np.float32)

    def expected(self) -> np.ndarray:
        q, sink = np.asarray(self.q, np.float64), np.asarray(self.sink[1], np.float64)
        outs = []
        for query, rows in zip(q, self.values, strict=True):
            weights = np.exp(0.1 * query @ rows.T)
            outs.append(weights @ rows / (weights.sum(1) + np.exp(sink))[:, None])
        return np.stack(outs)


def lists(counts=COUNTS, *, heads: int = 3, d: int = 128, fp8: bool = False, dtype=jnp.bfloat16) -> Lists:
    """Window rows lie in rings of 24 rows, or are the step's own; entries lie in pages of 16, some listed twice."""
    rng, plain = np.random.default_rng(heads + d), d - ROTATED
    arrays = {"window": (PAGES, 24), "entries": (PAGES, 16), "own": (1, 12)}
    kept, decoded = {}, {}
    for name, (pages, rows) in arrays.items():
        values = jnp.asarray(rng.standard_normal((pages * rows, d)), dtype)
        kept[name] = _encode_rows(values, plain, jnp.uint8 if fp8 else dtype)
        decoded[name] = np.asarray(_decode_rows(kept[name], plain, d, jnp.float32), np.float64)
    numbers = {
        "window": rng.choice([NOWHERE.min, NOWHERE.max], (len(counts), WINDOW)),
        "entries": rng.choice([NOWHERE.min, NOWHERE.max], (len(counts), ENTRIES)),
    }
    used = {name: set() for name in arrays}
    values = []
    for query, (window, entries) in enumerate(counts):
        own = min(window, query)
        numbers["window"][query, :window] = np.concatenate(
            [rng.choice(PAGES * 24, window - own, replace=False), -1 - rng.choice(9, own, replace=False)]
        )
        numbers["entries"][query, :entries] = rng.integers(0, PAGES * 16 - 20, entries)
        listed = []
        for name, count in (("window", window), ("entries", entries)):
            for number in numbers[name][query, :count]:
                source, row = ("own", -1 - number) if number < 0 else (name, number)
                used[source].add(int(row))
                listed.append(decoded[source][row])
        values.append(np.array(listed).reshape(-1, d))
    for name, rows in kept.items():
        unread = np.ones(len(rows), bool)
        unread[sorted(used[name])] = False
        kept[name] = np.where(unread[:, None], np.asarray(255 if fp8 else np.nan, rows.dtype), np.asarray(rows))
        assert unread.any()
    q = rng.standard_normal((len(counts), heads, d))
    q[3 % len(counts)] = 0  # all scores are equal
    made = [
        RowList(
            jnp.asarray(kept[name].reshape(*arrays[name], -1)),
            jnp.asarray(numbers[name], jnp.int32),
            jnp.asarray([count[i] for count in counts], jnp.int32),
        )
        for i, name in enumerate(("window", "entries"))
    ]
    return Lists(
        jnp.asarray(q, dtype),
        jnp.asarray([[np.nan] * heads, rng.normal(size=heads)], jnp.float32),
        jnp.asarray(kept["own"]),
        *made,
        values,
    )


@pytest.mark.parametrize(
    ("backend", "dtype"), [(REFERENCE, jnp.float32), (TRITON, jnp.bfloat16), (TRITON, jnp.float16)]
)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("share", [32, 1280])
def test_every_list_has_the_result_of_float64(backend, dtype, fp8, share, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "SHARE", share)
    case = lists(fp8=fp8, dtype=dtype)
    found = case.attend(backend)
    np.testing.assert_allclose(found, case.expected(), atol=1e-5 if backend is REFERENCE else 0.02)
    assert not found[0].any(), "a query without rows sees the sink alone"


@pytest.mark.parametrize("backend", [REFERENCE, TRITON])
@pytest.mark.parametrize("share", [32, 1280])
def test_a_part_has_no_sink_and_its_log_sum_exp(backend, share, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "SHARE", share)
    case = lists()
    part = functools.partial(attend_part, scale=0.1, plain=case.q.shape[-1] - ROTATED, backend=backend)
    out, lse = jax.jit(part)(case.q, case.own, case.window, case.entries)
    assert not out[0].any() and np.isposinf(lse[0]).all(), "a query without rows"
    with_sink = np.asarray(out, np.float32) * np.asarray(jax.nn.sigmoid(lse - case.sink[1]))[..., None]
    np.testing.assert_allclose(with_sink, case.expected(), atol=0.02)


@pytest.mark.parametrize("number", [86, 89], ids=["FP8 widened", "FP8 as it is"])
def test_widths_and_heads_of_deepseek_v4(number: int) -> None:
    case = lists(((20, 50),), heads=64, d=512, fp8=True)
    assert case.own.shape[1] == 584
    with gpus.compiling_for(gpus.by_number(number)):
        np.testing.assert_allclose(case.attend(TRITON), case.expected(), atol=0.02)


@pytest.mark.parametrize(
    ("share", "dtype", "fp8"),
    [*itertools.product((64, 128, 1280), (BF16, F16), (False,)), (64, BF16, True), (1280, BF16, True)],
)
def test_listed_rows_on_hopper(share, dtype, fp8, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs Mosaic's kernel in its interpreter, which detects races; the rows are those of an array's second layer."""
    monkeypatch.setattr(compressed, "SHARE", share)
    case = lists(((0, 0), (20, 70), (7, 33), (0, 65)), heads=64, d=512, dtype=dtype, fp8=fp8)

    def second(rows: RowList) -> RowList:
        pages, of_page, _ = rows.array.shape
        both = jnp.concatenate([jnp.full_like(rows.array, 255 if fp8 else jnp.nan), rows.array])
        return dataclasses.replace(rows, array=both, layer=jnp.int32(1), layer_rows=pages * of_page)

    how = {"scale": 0.1, "layer": jnp.int32(1), "interpret": interpret_params()}
    try:
        attend = jax.jit(functools.partial(compressed.attend_mosaic, **how))
        out, lse = attend(case.q, case.sink, case.own, second(case.window), second(case.entries))
    finally:
        reset_interpreter()
    np.testing.assert_allclose(np.asarray(out, np.float32), case.expected(), atol=0.02)
    assert not out[0].any(), "a query without rows sees the sink alone"
    np.testing.assert_allclose(lse[0], case.sink[1], rtol=1e-5)


def test_a_list_is_one_share_where_nothing_joins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for Hopper without jax-triton has no Triton kernel."""
    monkeypatch.setattr(compressed, "uses_triton", lambda _: False)
    monkeypatch.setattr(compressed, "SHARE", 64)
    monkeypatch.delattr(compressed.call, "start")
    case = lists(((20, 70),), heads=64, d=512, dtype=jnp.bfloat16)
    attend = functools.partial(compressed.attend_mosaic, scale=0.1, layer=1)
    out, _ = jax.eval_shape(attend, case.q, case.sink, case.own, case.window, case.entries)
    assert (out.shape, out.dtype) == (case.q.shape, jnp.bfloat16)


def test_a_layer_without_entries() -> None:
    case = lists(((20, 0), (3, 0)))
    np.testing.assert_allclose(case.attend(TRITON, with_entries=False), case.expected(), atol=0.02)


@pytest.mark.parametrize("fp8", [False, True])
def test_bits_do_not_depend_on_other_queries(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "SHARE", 32)
    case = lists(fp8=fp8)
    found = case.attend(TRITON)
    for query in (1, 3, 4):
        np.testing.assert_array_equal(case.attend(TRITON, slice(query, query + 1))[0], found[query])


def test_a_row_of_the_step_has_the_bits_of_a_cached_one() -> None:
    """A chunk that is cut elsewhere finds in the cache what was the step's own."""
    case = lists(((20, 30),))
    numbers = np.asarray(case.window.numbers)
    own = jnp.asarray(case.window.array.reshape(-1, case.own.shape[1])[numbers[0, -5:]])
    moved = numbers.copy()
    moved[0, -5:] = -1 - np.arange(5)
    window = dataclasses.replace(case.window, numbers=jnp.asarray(moved))
    other = dataclasses.replace(case, own=own, window=window)
    np.testing.assert_array_equal(other.attend(TRITON), case.attend(TRITON))


@pytest.mark.parametrize(
    ("q", "row", "plain", "message"),
    [
        (((64, 512), jnp.bfloat16), (512, jnp.bfloat16), 448, None),
        (((128, 512), jnp.bfloat16), (584, jnp.uint8), 448, None),
        (((4, 96), jnp.bfloat16), (96, jnp.bfloat16), 64, "rows of 96 values"),
        (((4, 32), jnp.float32), (32, jnp.float32), 24, "neither bfloat16 nor float16"),
        (((4, 16), jnp.bfloat16), (16, jnp.bfloat16), 8, "no power of two from 32 to 512"),
        (((4, 64), jnp.bfloat16), (64, jnp.float16), 32, "not of the queries' type"),
        (((4, 64), jnp.bfloat16), (104, jnp.uint8), 32, "no whole groups of 64"),
    ],
)
def test_what_the_kernel_supports(q, row, plain, message) -> None:
    arrays = jax.ShapeDtypeStruct((2, *q[0]), q[1]), jax.ShapeDtypeStruct((4, 8, row[0]), row[1])
    why = compressed.unsupported(*arrays, plain)
    assert why is None if message is None else message in why


def test_shapes_that_do_not_fit() -> None:
    case = lists(((20, 30),))
    with pytest.raises(ValueError, match="the array of entries must be"):
        dataclasses.replace(case, entries=dataclasses.replace(case.entries, array=case.entries.array[0])).attend(
            REFERENCE
        )
    with pytest.raises(ValueError, match="sink"):
        dataclasses.replace(case, sink=case.sink[1]).attend(REFERENCE)
    with pytest.raises(ValueError, match="of 1 queries"):
        dataclasses.replace(case, window=dataclasses.replace(case.window, counts=jnp.zeros(2, jnp.int32))).attend(
            REFERENCE
        )
