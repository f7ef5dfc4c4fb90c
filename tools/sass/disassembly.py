"""Machine code of a kernel as instructions: PTX through ptxas, the result through nvdisasm, control words decoded.

nvdisasm prints an instruction's text and its 128 bits. The upper ones say what the hardware's scheduler has to heed:
how many cycles to stall, which of six scoreboards to set, and for which to wait.
"""

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_SECTION = re.compile(r"^\s*\.section\s+\.text\.", re.MULTILINE)
_LINE = re.compile(
    r"^\s*(?:(?P<label>\.L_\S+):"
    r"|/\*[0-9a-f]{4,}\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<op>\S+)(?P<args>.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/"
    r"\s*/\* (?P<upper>0x[0-9a-f]{16}) \*/)",
    re.MULTILINE,
)
_TARGET = re.compile(r"`\((\.L\S+?)\)")
_CONTROL_BIT = 105 - 64  # of the upper 64 bits


class ToolMissingError(RuntimeError):
    """ptxas or nvdisasm is not installed."""


@dataclasses.dataclass(frozen=True)
class SassInstruction:
    """One machine instruction of sm_90.

    Attributes:
      op: the opcode with its modifiers, as `HGMMA.64x256x16.F32.BF16`.
      args: the operands as nvdisasm writes them.
      predicate: `P0`, `!UP1` or None where it always runs.
      target: label that a branch goes to, or None.
      stall: cycles until the warp may issue its next instruction.
      sets: scoreboards released when the result is written and when the operands are read; None where unused.
      waits: scoreboards that must be free, as a bit mask.
    """

    op: str
    args: str
    predicate: str | None
    target: str | None
    stall: int
    sets: tuple[int | None, int | None]
    waits: int


@dataclasses.dataclass(frozen=True)
class SassFunction:
    """A kernel's instructions, and where its labels stand among them."""

    instructions: tuple[SassInstruction, ...]
    labels: dict[str, int]


def assemble(ptx: str) -> SassFunction:
    """Assembles a module's PTX for sm_90a and reads its one kernel back; raises ToolMissingError, or as `parse`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        _run(tool("ptxas"), "-O3", "-arch=sm_90a", "/dev/stdin", "-o", cubin.name, given=ptx)
        return parse(_run(tool("nvdisasm"), "-hex", "-c", cubin.name))


def tool(name: str) -> str:
    """Returns the path of a program of the `aot` extra's wheels or of the CUDA toolkit; raises ToolMissingError."""
    wheels = importlib.util.find_spec("nvidia")
    folders = wheels.submodule_search_locations if wheels is not None else None
    found = [str(path) for folder in folders or () for path in sorted(Path(folder).glob(f"*/bin/{name}"))]
    path = found[0] if found else shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if path is None:
        raise ToolMissingError(f"{name} was found neither in a wheel nor on the PATH: install the 'aot' extra")
    return path


def parse(listing: str) -> SassFunction:
    """Reads what `nvdisasm -hex -c` prints; raises ValueError where that is not one kernel."""
    if (sections := len(_SECTION.findall(listing))) != 1:
        raise ValueError(f"expected one kernel, found {sections}")
    code: list[SassInstruction] = []
    labels: dict[str, int] = {}
    for found in _LINE.finditer(listing):
        if found["label"]:
            labels[found["label"]] = len(code)
        else:
            code.append(_decoded(found["predicate"], found["op"], found["args"].strip(), int(found["upper"], 16)))
    return SassFunction(tuple(code), labels)


def _decoded(predicate: str | None, op: str, args: str, upper: int) -> SassInstruction:
    control, target = upper >> _CONTROL_BIT, _TARGET.search(args)
    write, read = (control >> 5) & 7, (control >> 8) & 7
    sets = None if write == 7 else write, None if read == 7 else read
    return SassInstruction(op, args, predicate, target[1] if target else None, control & 15, sets, (control >> 11) & 63)


def _run(*command: str, given: str = "") -> str:
    result = subprocess.run(command, input=given, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {result.stderr[-2000:]}")
    return result.stdout
