"""Backend selection by device; an impossible request is a typed error."""

import logging
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import backend, native
from pallas_kernels.backend import Backend, BackendUnavailableError, resolve_backend


def gpu(kind="NVIDIA H200", capability="9.0"):
    device = SimpleNamespace(platform="gpu", device_kind=kind)
    if capability is not None:
        device.compute_capability = capability
    return device


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (gpu(), Backend.MOSAIC),
        (gpu("NVIDIA H100 80GB HBM3", None), Backend.MOSAIC),
        (gpu("NVIDIA GH200 480GB", None), Backend.MOSAIC),
        (gpu("NVIDIA A100-SXM4-80GB", "8.0"), Backend.TRITON),
        (gpu("NVIDIA A100-SXM4-80GB", None), Backend.TRITON),
        (gpu("NVIDIA GeForce RTX 3090", "8.6"), Backend.TRITON),
        (gpu("NVIDIA L40S", "8.9"), Backend.TRITON),
        (gpu("NVIDIA B200", "10.0"), Backend.TRITON),
        (gpu("NVIDIA GeForce RTX 5090", "12.0"), Backend.TRITON),
        (gpu("Tesla T4", "7.5"), Backend.REFERENCE),
        (gpu("NVIDIA B300", "10.3"), Backend.REFERENCE),
        (gpu("Tesla T4", None), Backend.REFERENCE),
    ],
)
def test_device_decides(device, expected):
    assert resolve_backend(device) is expected


def test_default_device_is_this_process_own():
    on_cpu = Backend.NATIVE if native.library().targets else Backend.REFERENCE
    expected = Backend.MOSAIC if backend.is_hopper(jax.devices()[0]) else on_cpu
    assert resolve_backend() is expected


def test_impossible_request_is_typed():
    with pytest.raises(BackendUnavailableError, match="A100"):
        resolve_backend(gpu("NVIDIA A100", "8.0"), Backend.MOSAIC)
    with pytest.raises(BackendUnavailableError, match=r"T4.*is no GPU of compute capability 8.0, .*Backend.REFERENCE"):
        resolve_backend(gpu("Tesla T4", "7.5"), Backend.TRITON)
    with pytest.raises(TypeError, match="'mosaic'"):
        resolve_backend(None, "mosaic")


def test_request_without_device_is_for_another_machine():
    assert resolve_backend(None, Backend.MOSAIC) is Backend.MOSAIC
    assert resolve_backend(gpu(), Backend.REFERENCE) is Backend.REFERENCE
    assert resolve_backend(gpu(), Backend.TRITON) is Backend.TRITON  # Hopper supports them, though not by default


def test_without_jax_triton_the_log_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setattr(backend, "has_jax_triton", lambda: False)
    with caplog.at_level(logging.INFO, logger="pallas_kernels.backend"):
        assert resolve_backend(gpu("NVIDIA A30 without", "8.0")) is Backend.REFERENCE
    assert "install the 'triton' extra" in caplog.text


def test_reason_is_logged_once(caplog):
    device = gpu("NVIDIA L40S test_reason", "8.9")
    with caplog.at_level(logging.INFO, logger="pallas_kernels.backend"):
        resolve_backend(device)
        resolve_backend(device)
    assert [r.getMessage() for r in caplog.records if "L40S" in r.getMessage()] == [
        "kernels: triton, because 'NVIDIA L40S test_reason' (gpu, sm 8.9) is a GPU of sm_89"
    ]
