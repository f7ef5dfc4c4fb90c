"""Checks of every public operation on the device at hand, against the reference on the same device.

    python -m pallas_kernels.checks --list [--backend mosaic]      the operations, or those with kernels of a backend
    python -m pallas_kernels.checks mla_decode [--quick] [--backend mosaic|triton|native|reference]

A line on standard output is a row: `{"case": ..., "passed": ..., "says": ..., "figures": {...}}`. Exit status 0: all
rows passed; 1: some failed, or the device's context is gone; 2: nothing could be checked here; the reason is on
standard error.
"""

from pallas_kernels.checks.case import Case, Row, Tolerance, check
from pallas_kernels.checks.operations import OPERATIONS, CheckedOperation, names

__all__ = ["OPERATIONS", "Case", "CheckedOperation", "Row", "Tolerance", "check", "names"]
