"""Compiling for NVIDIA GPUs on a machine without one: programs, memory, collectives, registers and spills.

XLA:GPU compiles for a described device (jax.experimental.topologies), so tests and planning need only the CUDA plugin
and ptxas (the `aot` extra), with JAX_PLATFORMS=cpu set before jax starts. Nothing is autotuned: assert on memory,
collectives and kernels' resources, not on the tiles of XLA's own products.

    mesh = gpu_mesh({"data": 8})
    compiled = compile_for(step, weights, tokens, mesh=mesh)      # ShapeDtypeStructs, with shardings or replicated
    compiled.memory_analysis().temp_size_in_bytes
    for kernel in kernel_resources(step, weights, tokens, mesh=mesh):
        assert kernel.spill_bytes == 0
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import io
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import gpus

_MOSAIC_CALL = "mosaic_gpu_v2"
# Read by jaxlib's C++ at each kernel compilation; there is no argument for them. MOSAIC_GPU_DUMP_TO writes report and
# PTX to files, and 200 MB of compiler passes beside them.
_REPORT_VARIABLES = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_PTX")
_HOST_VARIABLES = ("MOSAIC_GPU_DUMP_HOST_LLVM",)
_fresh = itertools.count()
_UNTUNED = {"xla_gpu_autotune_level": 0}


class AotUnavailableError(RuntimeError):
    """The CUDA plugin or ptxas is missing, so nothing can be compiled for a GPU here."""


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """Facts about a GPU that its compiler needs. Sizes in bytes; data sheet and CUDA occupancy tables."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory: int
    memory_bytes_per_second: int
    l2_cache: int
    clock_ghz: float
    nvlinks: int
    cuda_version: tuple[int, int] = (13, 0)
    cudnn_version: tuple[int, int] = (9, 10)

    def text_proto(self) -> str:
        """Writes the text form of XLA's GpuTargetConfigProto."""
        major, minor = self.compute_capability
        accelerated = major >= 9
        block = gpus.by_number(10 * major + minor).shared_memory
        threads = 2048 if minor == 0 and major < 12 else 1536
        cuda, cudnn = (".".join(map(str, (*version, 0))) for version in (self.cuda_version, self.cudnn_version))
        return f"""
gpu_device_info {{
  name: "{self.name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}{"a" * accelerated}"
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {"ACCELERATED_FEATURES" if accelerated else "NONE"}
  }}
  core_count: {self.multiprocessors}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory}
  memory_bandwidth: {self.memory_bytes_per_second}
  l2_cache_size: {self.l2_cache}
  ecc_enabled: true
  device_address_bits: 64
  pcie_bandwidth: {32 << 30}
  device_interconnect_info {{ active_links: {self.nvlinks} }}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {threads}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  fpus_per_core: 128
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: {block + 1024}
  shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {block}
  driver_version: "{cuda}"
  runtime_version: "{cuda}"
  compile_time_toolkit_version: "{cuda}"
  dnn_version: "{cudnn}"
}}
platform_name: "CUDA"
device_description_str: "{self.name}"
runtime_version {{ major: {self.cuda_version[0]} minor: {self.cuda_version[1]} patch: 0 }}
dnn_version_info {{ major: {self.cudnn_version[0]} minor: {self.cudnn_version[1]} patch: 0 }}
"""


H200 = GpuTarget("NVIDIA H200", (9, 0), 132, 141 << 30, 4_800_000_000_000, 50 << 20, 1.98, 18)

TARGETS = {
    "H100": GpuTarget("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 << 30, 3_350_000_000_000, 50 << 20, 1.98, 18),
    "H200": H200,
    "A100": GpuTarget("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 << 30, 2_039_000_000_000, 40 << 20, 1.41, 12),
    "L40S": GpuTarget("NVIDIA L40S", (8, 9), 142, 48 << 30, 864_000_000_000, 96 << 20, 2.52, 0),
    "B200": GpuTarget("NVIDIA B200", (10, 0), 148, 180 << 30, 8_000_000_000_000, 126 << 20, 1.965, 18),
}
"""Compilation targets by name; figures from data sheets."""


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel of a program, as ptxas and Mosaic report them."""

    name: str
    registers: int
    """Registers per thread at launch; `set_max_registers` moves them between warpgroups afterwards."""
    spill_bytes: int
    """Stored and loaded."""
    stack_bytes: int
    ptx: str = dataclasses.field(repr=False)
    """The module that ptxas assembled."""


def gpu_devices(count: int = 1, *, per_host: int = 8, target: GpuTarget = H200) -> list[jax.Device]:
    """Returns the compile-only devices: `count` GPUs in hosts of `per_host`.

    Raises:
      ValueError: `count` is no multiple of `per_host` and above it.
      AotUnavailableError: the CUDA plugin is missing.
    """
    per_host = min(count, per_host)
    if count < 1 or count % per_host:
        raise ValueError(f"{count} GPUs do not fill hosts of {per_host}")
    topology = f"{count // per_host}x1x{per_host}"
    with explained():
        description = topologies.get_topology_desc(
            platform="cuda", target_config=target.text_proto(), topology=topology
        )
    return description.devices


def gpu_mesh(axes: Mapping[str, int], *, per_host: int = 8, target: GpuTarget = H200) -> Mesh:
    """Returns a mesh of compile-only GPUs with the named axis sizes, outermost first. Raises as `gpu_devices`."""
    shape = tuple(axes.values())
    devices = gpu_devices(int(np.prod(shape)), per_host=per_host, target=target)
    return Mesh(np.array(devices).reshape(shape), tuple(axes))


def lower_for(
    fn: Callable, *args, mesh: Mesh | None = None, donate_argnums: tuple[int, ...] = (), **kwargs
) -> jax.stages.Lowered:
    """Traces and lowers `fn` for the mesh (one H200 by default). See `compile_for`."""
    mesh = gpu_mesh({"device": 1}) if mesh is None else mesh
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return x
        sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or replicated)

    args, kwargs = jax.tree.map(place, (args, kwargs))
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn, donate_argnums=donate_argnums)
    return jitted.lower(*args, **kwargs)


def compile_for(
    fn: Callable, *args, mesh: Mesh | None = None, donate_argnums: tuple[int, ...] = (), **kwargs
) -> jax.stages.Compiled:
    """Compiles `fn` for GPUs that are not attached.

    Args:
      fn: a function, jitted or not. It must request kernels explicitly (`backend=Backend.MOSAIC`): the default device
        of this process is a CPU.
      args, kwargs: pytrees of arrays or ShapeDtypeStructs, of which only shape, dtype and a ShapeDtypeStruct's
        sharding count. Without a sharding an argument is replicated over the mesh.
      mesh: from `gpu_mesh`; one H200 by default.
      donate_argnums: as in jax.jit, for an `fn` that is not jitted yet.

    Raises:
      AotUnavailableError: the CUDA plugin or ptxas is missing.
    """
    with explained():
        return lower_for(fn, *args, mesh=mesh, donate_argnums=donate_argnums, **kwargs).compile()


def kernel_resources(
    fn: Callable, *args, mesh: Mesh | None = None, donate_argnums: tuple[int, ...] = (), **kwargs
) -> tuple[KernelResources, ...]:
    """Reports registers, spills and stack of every Mosaic GPU kernel in the program, sorted by name.

    Arguments and errors as in `compile_for`.
    """
    return compile_with_resources(fn, *args, mesh=mesh, donate_argnums=donate_argnums, **kwargs)[1]


def compile_with_resources(
    fn: Callable, *args, mesh: Mesh | None = None, donate_argnums: tuple[int, ...] = (), **kwargs
) -> tuple[jax.stages.Compiled, tuple[KernelResources, ...]]:
    """Returns what `compile_for` and `kernel_resources` return, from one compilation.

    Arguments and errors as in `compile_for`, except that a jitted `fn` does not donate: use `donate_argnums`.
    """

    compiled, output = _compile_and_report(_REPORT_VARIABLES, fn, args, kwargs, mesh, donate_argnums)
    return compiled, parse_reports(output)


def host_symbols(fn: Callable, *args, mesh: Mesh | None = None, **kwargs) -> set[str]:
    """Returns the symbols that the host code of the program's Mosaic kernels is linked with.

    It is linked when the program is compiled, and again when an executable is loaded from a file. Arguments and errors
    as in `compile_for`.
    """
    _, output = _compile_and_report(_HOST_VARIABLES, fn, args, kwargs, mesh)
    called = set(re.findall(r"\bcall\b[^@\n]*@([\w.]+)\(", output))
    return {name for name in re.findall(r"^declare\b[^@\n]*@([\w.]+)\(", output, flags=re.MULTILINE) if name in called}


def _compile_and_report(
    variables: tuple[str, ...],
    fn: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    mesh: Mesh | None,
    donate_argnums: tuple[int, ...] = (),
) -> tuple[jax.stages.Compiled, str]:
    """Recompiles a program's kernels; returns executable, and jaxlib's output with `variables` in the environment."""

    def fresh(*args, **kwargs):  # a new function: jax caches modules and executables per function
        return fn(*args, **kwargs)

    with explained():
        lowered = lower_for(fresh, *args, mesh=mesh, donate_argnums=donate_argnums, **kwargs)
        _forget_compiled_kernels(lowered)
        with _captured_stdout() as output, _set(variables):
            compiled = lowered.compile()
    return compiled, output.getvalue()


def parse_reports(output: str) -> tuple[KernelResources, ...]:
    """Parses the reports of `ptxas -v` in `output`, sorted by kernel name."""
    reports = re.findall(r"Compiling entry function.*?Used \d+ registers", output, flags=re.DOTALL)
    modules = _ptx_modules(output)
    kernels = (_parse_report(report, modules) for report in reports)
    return tuple(sorted(kernels, key=lambda kernel: kernel.name))


def _ptx_modules(output: str) -> dict[str, str]:
    """Returns the PTX modules in jaxlib's output, by kernel name."""
    modules = re.findall(r"^\.version .*?(?=^//\n// Generated by|^ptxas |\Z)", output, flags=re.DOTALL | re.MULTILINE)
    return {entry[1]: module for module in modules if (entry := re.search(r"\.entry (\w+)", module))}


def _parse_report(report: str, modules: Mapping[str, str]) -> KernelResources:
    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        if found is None:
            raise RuntimeError(f"ptxas reported in a form this version does not know, without {pattern!r}:\n{report}")
        return int(found[1])

    name = re.search(r"entry function '((\w+?)(?:_mosaic_gpu_kernel)?)'", report)
    return KernelResources(
        name=name[2] if name else "",
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        ptx=modules.get(name[1], "") if name else "",
    )


def _forget_compiled_kernels(lowered: jax.stages.Lowered) -> None:
    """Gives every Mosaic kernel of the module a new hash.

    jaxlib caches compiled kernels by hash for the life of the process, and reports nothing about a cached one.
    """

    def fresh(config: dict[str, Any]) -> dict[str, Any]:
        digest = hashlib.sha256(f"{os.getpid()} {next(_fresh)}".encode()).digest()
        return config | {"kernel_hash": mlir.ir.StringAttr.get(digest)}

    _change_kernels(lowered, fresh)


def compile_to_read(lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    """Compiles a program for analysis only: its order, memory and collectives.

    It omits the bodies of our kernels and XLA's autotuning of its own products, which takes another third of the time.
    `options` are XLA's. Raises as `compile_for` does.
    """
    strip_kernel_bodies(lowered)
    with explained():
        return lowered.compile({**(options or {}), **_UNTUNED})


def strip_kernel_bodies(lowered: jax.stages.Lowered) -> None:
    """Replaces the body of every Mosaic kernel of the module by the shortest one, to analyse the program around them.

    Calls keep their operands, results and aliases. Compilation takes half as long; the executable must not run.
    """
    found: list[dict[str, Any]] = []

    def note(config: dict[str, Any]) -> dict[str, Any]:
        found.append({name: config[name] for name in ("kernel_hash", "module")})
        return config

    _change_kernels(lowered, note)
    shortest = min(found, key=lambda body: len(body["module"].value_bytes), default={})
    _change_kernels(lowered, lambda config: config | shortest)


def _change_kernels(lowered: jax.stages.Lowered, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replaces the configuration of every Mosaic kernel of the module by what `change` returns for it."""
    module: Any = lowered.compiler_ir("stablehlo")
    ir = mlir.ir

    def visit(op):
        if op.name == "stablehlo.custom_call" and _MOSAIC_CALL in str(op.attributes["call_target_name"]):
            config = op.attributes["mhlo.backend_config"]
            entries = {entry.name: entry.attr for entry in config}
            op.attributes["mhlo.backend_config"] = ir.DictAttr.get(change(entries))
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)


@contextlib.contextmanager
def _set(variables: tuple[str, ...]) -> Iterator[None]:
    """Sets environment variables to 1 within the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(dict.fromkeys(variables, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _captured_stdout() -> Iterator[io.StringIO]:
    """Captures the process's standard output, C++ included; readable after the block."""
    flush, text = ctypes.CDLL(None).fflush, io.StringIO()
    with tempfile.TemporaryFile() as file:
        flush(None)
        sys.stdout.flush()
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield text
        finally:
            flush(None)
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            text.write(file.read().decode(errors="replace"))


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Converts the errors of a missing plugin or ptxas to AotUnavailableError, which names what to install."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, AotUnavailableError) or not _is_about_installation(text):
            raise
        raise AotUnavailableError(
            "compiling for a GPU needs the CUDA plugin and ptxas: install the 'aot' extra (or CUDA 13) and set "
            f"JAX_PLATFORMS=cpu before jax starts. The compiler said: {text[:300]}"
        ) from error


def _is_about_installation(text: str) -> bool:
    signs = ("topology not implemented", "PTX compilation provider", "Unable to load cuDNN", "libdevice")
    return any(sign in text for sign in signs)
