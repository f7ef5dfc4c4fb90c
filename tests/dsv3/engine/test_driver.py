"""A machine on which jax does not start its GPU is refused, with jax's reason and what to change."""

import logging

import jax
import pytest

from dsv3 import logs
from dsv3.engine.build import build_engine, bundled_model
from dsv3.engine.device import driver

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC version: 13\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
ANCIENT = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021\n"
PLUGINS = {extra: plugin for extra, plugin, _ in driver._EXTRAS}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine of files, with no JAX_PLATFORMS, whose plugin has logged `reasons`."""
    monkeypatch.setattr(driver, "_ROOT", tmp_path)
    monkeypatch.setattr(logs, "_errors", [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    log, asked = logging.getLogger("jax._src.xla_bridge"), jax.config.jax_platforms
    level = log.level  # another test of this process may have configured logging
    log.setLevel(logging.NOTSET)
    jax.config.update("jax_platforms", None)

    def make(version: str | None, *files: str, extra: str | None = "cuda13") -> None:
        found = {PLUGINS[extra]} if extra else set()
        monkeypatch.setattr(driver.importlib.util, "find_spec", lambda name: object() if name in found else None)
        for name, text in [("proc/driver/nvidia/version", version), *((file, "") for file in files)]:
            if text is not None:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)

    yield make
    log.setLevel(level)
    jax.config.update("jax_platforms", asked)


def refused() -> str:
    with pytest.raises(ValueError) as caught:
        driver.started_devices()
    assert "set JAX_PLATFORMS=cpu" in str(caught.value)
    return str(caught.value)


def test_the_error_has_jaxs_reason_and_the_driver(machine, caplog) -> None:
    machine(OPEN, "dev/nvidia0")
    log = logging.getLogger("jax._src.xla_bridge")
    try:
        raise RuntimeError("Unable to load cuDNN. Is it installed?")
    except RuntimeError:
        for _ in range(2):
            log.exception("Exception when calling %s.initialize()", "jax_plugins.xla_cuda13")
    log.debug("nothing of interest")
    said = refused()
    reason = "Exception when calling jax_plugins.xla_cuda13.initialize(): Unable to load cuDNN. Is it installed?"
    assert said.count(reason) == 1 and "NVIDIA driver 580.82.07" in said and "nothing of interest" not in said
    assert "pip install -e '.[cuda13]'" in said


@pytest.mark.parametrize(
    ("version", "extra", "advice"),
    [
        (OPEN, None, "jax has no plugin for it; install .* '.\\[cuda13\\]'"),
        (CLOSED, None, "jax has no plugin for it; install .* '.\\[cuda12\\]'"),
        (CLOSED, "cuda13", "cuda13 needs driver 580 or newer; update it, or pip install -e '.\\[cuda12\\]'"),
        (CLOSED, "cuda12", "Reinstall the extra cuda12 .* '.\\[cuda12\\]'"),
        (OPEN, "cuda12", "Reinstall the extra cuda12 .* '.\\[cuda12\\]'"),
        (ANCIENT, "cuda12", "Update the driver: 580 or newer for the extra cuda13, 525 for cuda12"),
        ("in a form of the future", "cuda13", "of unknown version.*Reinstall the extra cuda13"),
    ],
)
def test_the_advice_fits_driver_and_installation(machine, version, extra, advice) -> None:
    machine(version, "dev/nvidia3", extra=extra)
    with pytest.raises(ValueError, match=advice):
        driver.started_devices()


def test_a_gpu_that_the_process_may_not_see(machine, monkeypatch) -> None:
    machine(OPEN)
    assert "give the container its GPUs" in refused()
    machine(OPEN, "dev/nvidiactl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ''; unset it" in refused()


def test_the_bundled_model_is_refused_too_unless_the_cpu_is_requested(machine) -> None:
    machine(None, "dev/nvidia0", extra=None)
    with pytest.raises(ValueError, match=r"jax runs on the CPU .* an NVIDIA device.*set JAX_PLATFORMS=cpu"):
        build_engine(bundled_model(), progress=False)
    jax.config.update("jax_platforms", "cpu")
    driver.started_devices()


def test_a_machine_without_a_gpu_serves_from_its_cpu(machine) -> None:
    machine(None, extra=None)
    driver.started_devices()


@pytest.mark.parametrize(
    ("raised", "version", "says"),
    [
        (
            RuntimeError("Unable to initialize backend 'cuda': INTERNAL: no supported devices found"),
            ANCIENT,
            "jax does not start (Unable to initialize backend 'cuda': INTERNAL: no supported devices found). "
            "This machine has NVIDIA driver 470.57.02. Update the driver: 580 or newer",
        ),
        (
            AssertionError(),
            None,
            "jax does not start with JAX_PLATFORMS=cuda (it gives no reason). This machine has",
        ),
    ],
)
def test_an_exception_of_jax_names_driver_and_remedy(machine, monkeypatch, raised, version, says) -> None:
    def raises() -> None:
        raise raised

    machine(version, *(["dev/nvidia0"] if version else []))
    jax.config.update("jax_platforms", None if version else "cuda")
    monkeypatch.setattr(jax, "devices", raises)
    said = refused()
    assert said.startswith(says) and "\n" not in said
