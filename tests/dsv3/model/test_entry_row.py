"""FP8 rows of DeepSeek-V4's entries: their width, what rounding costs, and that it happens once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.config.model import entry_row
from pallas_kernels import entries

# One program each: their operations would be compiled one by one.
encode_rows = jax.jit(entries.encode_rows, static_argnums=(1, 2))
decode_rows = jax.jit(entries.decode_rows, static_argnums=(1, 2, 3))


@pytest.mark.parametrize(("plain", "rotated"), [(448, 64), (24, 8), (512, 64), (576, 2)])
def test_rows_have_the_declared_width_and_are_rounded_once(plain: int, rotated: int) -> None:
    rng = np.random.default_rng(plain)
    rows = rng.normal(size=(5, plain + rotated)) * 10.0 ** rng.integers(-3, 4, (5, 1))
    rows = rows.astype(np.float32)
    rows[0] = 0
    packed = encode_rows(rows, plain, jnp.uint8)
    assert packed.shape == (5, entry_row("fp8", plain, rotated)[0])
    back = np.asarray(decode_rows(packed, plain, plain + rotated, jnp.float32))
    assert not back[0].any()
    groups = [a[:, :plain] for a in (rows, back)]
    for first in range(0, plain, 64):
        one, two = (a[:, first : first + 64] for a in groups)
        highest = np.abs(one).max(1, keepdims=True)
        assert (np.abs(one - two) <= np.maximum(np.abs(one) / 16, highest / 448 / 2**8)).all()
    np.testing.assert_array_equal(back[:, plain:], rows[:, plain:].astype(jnp.bfloat16))
    again = decode_rows(encode_rows(back, plain, jnp.uint8), plain, plain + rotated, jnp.float32)
    np.testing.assert_array_equal(again, back)


def test_a_scale_is_the_power_of_two_at_or_above_its_groups_magnitude() -> None:
    for highest, byte in ((448.0, 127), (449.0, 128), (224.0, 126), (3.5, 120), (0.0, 105)):
        row = np.zeros((1, 64), np.float32)
        row[0, 3] = highest
        packed = np.asarray(encode_rows(row, 64, jnp.uint8))
        assert packed[0, 64:].tolist() == [byte, 0, 0, 0, 0, 0, 0, 0]


def test_float_rows_are_values() -> None:
    rows = jnp.linspace(-3, 3, 32).reshape(1, 32)
    assert encode_rows(rows, 24, jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(decode_rows(encode_rows(rows, 24, jnp.float32), 24, 32, jnp.float32), rows)
