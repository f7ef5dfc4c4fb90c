"""Bad input is a ValueError that names the offending shapes, before anything is traced."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.mla import (
    merge_attention,
    mla_decode,
    mla_prefill,
    mla_prefill_context,
    write_pages,
)

WIDTHS = {"pages_per_layer": 4, "value_width": 32}


def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def decode_args(**changes):
    args = {
        "q": array((2, 1, 8, 48)),
        "pages": array((8, 64, 48)),
        "page_table": array((2, 5), jnp.int32),
        "lengths": array((2,), jnp.int32),
    }
    return {**args, **changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"q": array((2, 8, 48))}, r"\(2, 8, 48\)"),
        ({"q": array((2, 1, 8, 40))}, r"\(8, 64, 48\).*\(2, 1, 8, 40\)"),
        ({"q": array((2, 1, 8, 48), jnp.int32)}, "int32"),
        ({"pages": array((8, 32, 48))}, r"\(8, 32, 48\)"),
        ({"pages": array((7, 64, 48))}, "pages_per_layer 4 must divide the 7"),
        ({"pages": array((8, 64, 48), jnp.int8)}, "int8"),
        ({"pages": array((8, 64, 48), jnp.uint8)}, "68 bytes"),
        ({"page_table": array((3, 5), jnp.int32)}, r"\(3, 5\)"),
        ({"page_table": array((2, 5), jnp.uint32)}, "uint32"),
        ({"page_table": array((2,), jnp.int32)}, r"\(2,\)"),
        ({"lengths": array((3,), jnp.int32)}, r"\(3,\)"),
        ({"lengths": array((2,), jnp.float32)}, "float32"),
    ],
)
def test_decode(changes, named):
    with pytest.raises(ValueError, match=named):
        mla_decode(**decode_args(**changes), scale=1.0, **WIDTHS)


@pytest.mark.parametrize("value_width", [0, 48, 64])
def test_value_width_must_leave_a_rope_part(value_width):
    with pytest.raises(ValueError, match=f"value_width {value_width}"):
        mla_decode(**decode_args(), scale=1.0, pages_per_layer=4, value_width=value_width)


def test_prefill():
    q, cu = array((10, 2, 24)), array((3,), jnp.int32)
    for args, named in (
        ((q, array((10, 1, 24)), array((10, 2, 16)), cu), r"\(10, 1, 24\)"),
        ((q, q, array((9, 2, 16)), cu), r"\(9, 2, 16\)"),
        ((q, q, array((10, 2, 16), jnp.float32), cu), "float32"),
        ((q, q, array((10, 2, 16)), array((1,), jnp.int32)), "cu_lengths"),
        ((q, q, array((10, 2, 16)), array((3,), jnp.uint32)), "cu_lengths"),
    ):
        with pytest.raises(ValueError, match=named):
            mla_prefill(*args, scale=1.0)
    k, v = array((10, 2, 16)), array((10, 2, 16))
    for shared, named in (((10, 9), r"\(10, 9\)"), ((9, 8), r"\(9, 8\)"), ((10, 2, 8), r"\[T, P\]")):
        with pytest.raises(ValueError, match=named):
            mla_prefill(q, k, v, cu, scale=1.0, shared_key=array(shared))


def test_context_needs_one_table_row_and_length_for_each_segment():
    q, pages, cu = array((10, 2, 48)), array((8, 64, 48)), array((3,), jnp.int32)
    for rows, lengths, named in ((3, 2, r"\(3, 5\)"), (2, 3, r"\(3,\)")):
        with pytest.raises(ValueError, match=named):
            mla_prefill_context(
                q, pages, array((rows, 5), jnp.int32), array((lengths,), jnp.int32), cu, scale=1.0, **WIDTHS
            )


def test_write():
    pages, latents, ids = array((8, 64, 48)), array((5, 48)), array((5,), jnp.int32)
    for args, named in (
        ((pages, array((5, 40)), ids, ids), r"\(5, 40\)"),
        ((pages, array((5, 48), jnp.int32), ids, ids), "int32"),
        ((pages, latents, array((4,), jnp.int32), ids), "page_ids"),
        ((pages, latents, ids, array((5,), jnp.float32)), "offsets"),
    ):
        with pytest.raises(ValueError, match=named):
            write_pages(*args, **WIDTHS)


def test_merge():
    out, lse = array((3, 2, 8)), array((3, 2), jnp.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        merge_attention(out, lse, array((3, 2, 9)), lse)
    with pytest.raises(ValueError, match="lse_b"):
        merge_attention(out, lse, out, array((2, 3), jnp.float32))
