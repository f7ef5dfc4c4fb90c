"""The estimate of a training layer compared with the published profile, and its transfers."""

import dataclasses

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import H800
from tools.plan import training
from tools.plan.deployment import kernel_rates
from tools.plan.roofline import TRANSFER_S


def test_errors_against_the_published_pair() -> None:
    """DeepSeek's profile: 31.9 ms per pair of a layer, compute busy for 31.5 and transfers for 28.6."""
    errors = [estimate / measured - 1 for estimate, measured in training.against_profile(DEEPSEEK_V3, H800).values()]
    assert errors == pytest.approx([-0.24, -0.23, -0.48], abs=0.01)


def test_an_exchange_sends_all_lines_to_each_other_device() -> None:
    rates, row = kernel_rates(H800, DEEPSEEK_V3), 2 * DEEPSEEK_V3.hidden_size
    sent, seconds = training.exchange_transfers(DEEPSEEK_V3, rates, lines=100, team=8)
    assert sent == 7 * 100 * (2 * row + 8 * 8)
    assert seconds == pytest.approx(2 * TRANSFER_S + sent / rates.node_link)
    _, seconds = training.exchange_transfers(DEEPSEEK_V3, rates, lines=100, team=64)
    across = 56 * 100 * ((row + 8 * 8) / rates.dispatch_link + row / rates.combine_link)
    assert seconds == pytest.approx(2 * TRANSFER_S + across)
    assert training.exchange_transfers(DEEPSEEK_V3, rates, lines=100, team=1) == (0, 0.0)


def test_a_pair_takes_the_time_of_the_longer_lane() -> None:
    rates = kernel_rates(H800, DEEPSEEK_V3)
    moe = training.layer_times(DEEPSEEK_V3, rates, 4096, 2048.5, wire=1.0, dense=False)
    dense = training.layer_times(DEEPSEEK_V3, rates, 4096, 2048.5, wire=1.0, dense=True)
    assert moe.pair == 2.0
    assert dense.pair == dense.forward + dense.backward > 3 * dense.weight
    assert moe.alone == (moe.forward + 1.0, moe.backward + 1.0, moe.weight)


def test_fp8_products_speed_up_all_but_the_weight_gradient() -> None:
    plain, fp8 = (
        training.layer_times(model, kernel_rates(H800, model), 4096, 2048.5, wire=1.0, dense=False)
        for model in (dataclasses.replace(DEEPSEEK_V3, fp8=None), DEEPSEEK_V3)
    )
    mixed = training.with_fp8_products(plain, fp8)
    assert mixed.forward == fp8.forward < plain.forward
    assert mixed.weight == plain.weight > fp8.weight
    assert fp8.backward < mixed.backward < plain.backward
    assert mixed.backward - mixed.weight == pytest.approx(fp8.backward - fp8.weight)
