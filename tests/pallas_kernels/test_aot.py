"""Compiling for an H200 without one."""

import ctypes
import os
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot, gpus

pytestmark = pytest.mark.aot


def double(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def doubled(x):
    return plgpu.kernel(double, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_a_program_of_16_gpus_on_two_hosts():
    mesh = aot.gpu_mesh({"node": 2, "gpu": 8})
    assert {device.device_kind for device in mesh.devices.flat} == {"NVIDIA H200"}
    assert {device.process_index for device in mesh.devices[1]} == {1}

    @jax.shard_map(mesh=mesh, in_specs=P(("node", "gpu")), out_specs=P(("node", "gpu")))
    def total(x):
        return lax.all_gather(doubled(x), ("node", "gpu"), tiled=True).sum(0, keepdims=True)

    x = jax.ShapeDtypeStruct((16 * 128, 128), jnp.float32, sharding=NamedSharding(mesh, P(("node", "gpu"))))
    compiled = aot.compile_for(total, x, mesh=mesh)
    assert compiled.memory_analysis().argument_size_in_bytes == 128 * 128 * 4
    assert "all-gather" in compiled.as_text()
    assert "mosaic_gpu" in compiled.as_text()


def test_resources_are_reported_again_for_a_kernel_already_compiled():
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    jitted = jax.jit(doubled)
    aot.compile_for(jitted, x)
    for fn in (jitted, doubled):
        (kernel,) = aot.kernel_resources(fn, x)
        assert kernel.name == "double"
        assert 0 < kernel.registers <= 255
        assert kernel.spill_bytes == kernel.stack_bytes == 0


@pytest.mark.parametrize("name", aot.TARGETS)
def test_a_target_has_its_gpu_kind(name):
    """XLA compiles for it, with the instructions and the shared memory of its capability."""
    target = aot.TARGETS[name]
    mesh = aot.gpu_mesh({"device": 1}, target=target)
    kind = gpus.kind_of(mesh.devices.flat[0])
    assert kind is not None and kind.capability == target.compute_capability
    assert f"shared_memory_per_block_optin: {kind.shared_memory}\n" in target.text_proto()
    compiled = aot.compile_for(jnp.tanh, jax.ShapeDtypeStruct((128,), jnp.float32), mesh=mesh)
    assert compiled.memory_analysis().output_size_in_bytes == 512


def test_the_plugin_exports_the_symbols_of_host_code():
    symbols = aot.host_symbols(doubled, jax.ShapeDtypeStruct((128, 128), jnp.float32))
    assert symbols and not any(name.startswith("llvm.") for name in symbols)
    library = ctypes.CDLL(os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"])
    assert all(hasattr(library, name) for name in symbols), symbols


def test_stripped_kernels_keep_their_calls():
    """XLA sees the same calls, with one body for all of them; a program without kernels stays as it is."""
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    lowered = aot.lower_for(lambda x: (doubled(x), doubled(x[:64])), x)
    bodies = [re.findall(r'kernel_hash = ("[^"]*")', lowered.as_text())]
    aot.strip_kernel_bodies(lowered)
    bodies.append(re.findall(r'kernel_hash = ("[^"]*")', lowered.as_text()))
    assert [(len(each), len(set(each))) for each in bodies] == [(2, 2), (2, 1)]
    compiled = lowered.compile()
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 2
    assert compiled.memory_analysis().output_size_in_bytes >= (128 + 64) * 128 * 4
    plain = aot.lower_for(jnp.tanh, x)
    before = plain.as_text()
    aot.strip_kernel_bodies(plain)
    assert plain.as_text() == before


def test_no_kernel_no_report():
    assert aot.kernel_resources(jnp.tanh, jax.ShapeDtypeStruct((8,), jnp.float32)) == ()


def test_donated_memory_is_aliased():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    compiled = aot.compile_for(lambda x: x.at[0].set(0), x, donate_argnums=(0,))
    assert compiled.memory_analysis().alias_size_in_bytes == 4 << 20


def test_devices_must_fill_hosts():
    with pytest.raises(ValueError, match="12 GPUs do not fill hosts of 8"):
        aot.gpu_devices(12)


def test_the_error_of_a_missing_plugin_names_what_to_install(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(aot.AotUnavailableError, match="'aot' extra"):
        aot.compile_for(jnp.tanh, jnp.zeros(8))


def test_an_error_of_the_program_is_not_converted():
    with pytest.raises(TypeError):
        aot.compile_for(lambda x: x @ "y", jnp.zeros(8))
