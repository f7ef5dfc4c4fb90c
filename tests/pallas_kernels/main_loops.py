"""Compares the main loops of kernels that tests compile with the figures in `docs/performance/machine_code.md`."""

import dataclasses

import pytest

from tools.sass import disassembly, kernels
from tools.sass.reading import interpret


def assert_no_longer(kernel, compiled, *, instructions, cycles):
    """Fails if an iteration takes more instructions or, in the model, more cycles than recorded.

    Args:
      kernel: of `tools.sass.kernels`.
      compiled: resources of the program's kernels.
      instructions: of a warp of each kind of computing warpgroup, summed.
      cycles: modelled, round robin and first come first served, at 40 bytes per cycle from the L2 cache.
    """
    try:
        reading = interpret(dataclasses.replace(kernel, links=(kernels.SHARED,)), compiled)
    except disassembly.ToolMissingError as error:
        pytest.skip(f"machine code is not looked at: {error}")
    found = sum(map(len, reading.paths))
    modelled = tuple(round(run.cycles) for run in reading.cycles[kernels.SHARED])
    if found > instructions or any(now > before * 1.01 for now, before in zip(modelled, cycles, strict=True)):
        pytest.fail(
            f"{kernel.name}: {found} instructions and {modelled} modelled cycles, where there were {instructions} and "
            f"{cycles}. If that is meant, or ptxas is another, correct this test and record the table anew"
        )
