"""What the host launches in a step: the thunks of a compiled program, and which of them a command buffer holds.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu.thunks decode_ep144 [--capture]     minutes; needs no GPU

XLA runs a program as a list of thunks. It gathers neighbours in command buffers (CUDA graphs), of which the host
launches each as one. By default those hold kernels and copies; with `--capture` the program is compiled so that they
may hold collectives and loops too. Prints, for each kind of thunk of one MoE layer, how many the host launches by
itself and how many lie in command buffers.
"""

import argparse
import collections
import dataclasses
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

EVERYTHING = (
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES,WHILE,CONDITIONAL"  # XLA's names
)
_THUNK = re.compile(r"( *)\d+: k(\w+)")


@dataclasses.dataclass
class Thunk:
    """A thunk and those inside of it."""

    kind: str
    depth: int
    inner: list["Thunk"] = dataclasses.field(default_factory=list)

    def walk(self) -> Iterator["Thunk"]:
        """Yields all thunks inside of this one."""
        for thunk in self.inner:
            yield thunk
            yield from thunk.walk()

    def launched(self) -> Iterator[tuple["Thunk", bool]]:
        """Yields the thunks that the host launches, and those in command buffers with True; no loops, only bodies."""
        for thunk in self.inner:
            yield thunk, False
            if thunk.kind == "CommandBuffer":
                yield from ((each, True) for each in thunk.walk())
            else:
                yield from thunk.launched()


def parse(text: str) -> Thunk:
    """Reads XLA's dump of a thunk sequence; deeper thunks belong to the one above them.

    The conditions of loops are left out: no loop here has one that is asked, its passes are counted.
    """
    root, in_condition = Thunk("Program", -1), False
    above = [root]
    for line in text.splitlines():
        in_condition = line.strip() == "condition:" or (in_condition and line.strip() != "body:")
        if not in_condition and (match := _THUNK.match(line)):
            thunk = Thunk(match[2], len(match[1]))
            while above[-1].depth >= thunk.depth:
                above.pop()
            above[-1].inner.append(thunk)
            above.append(thunk)
    return root


def layer_loop(program: Thunk) -> Thunk:
    """Returns the loop over the MoE layers: the one with the most collectives, or the program where it has none."""

    def collectives(thunk: Thunk) -> int:
        return sum(each.kind.startswith("All") for each in thunk.walk())

    loops = (thunk for thunk in program.walk() if thunk.kind == "While")
    return max(loops, key=collectives, default=program)


def table(program: Thunk) -> Iterator[str]:
    """Yields the lines of the table of one layer."""
    alone, captured = collections.Counter[str](), collections.Counter[str]()
    for thunk, inside in layer_loop(program).launched():
        (captured if inside else alone)[thunk.kind] += 1
    yield "| thunk of one MoE layer | launched by the host | in command buffers |"
    yield "|---|---|---|"
    for kind in sorted(alone | captured, key=lambda kind: -(alone[kind] + captured[kind])):
        yield f"| {kind} | {alone[kind] or ''} | {captured[kind] or ''} |"
    yield f"| all | {alone.total()} | {captured.total()} |"
    around = [
        thunk for thunk in program.walk() if thunk.kind == "CommandBuffer" and layer_loop(program) in thunk.walk()
    ]
    yield f"The loop over the layers lies in a command buffer: {'yes' if around else 'no'}."


def compiled_thunks(deployment: str, capture: bool) -> str:
    """Returns the thunks of the largest step of a deployment, as XLA dumps them."""
    import jax

    from configs.deepseek_v3 import DEEPSEEK_V3
    from configs.deployments import DEPLOYMENTS
    from sharding.wire.collectives import compiler_options
    from tools.plan.plan import phases
    from tools.plan.programs import lay_out, runs

    planned = lay_out(DEEPSEEK_V3, DEPLOYMENTS[deployment])
    run = runs(planned, phases(planned.deployment)[0])[0]
    spec = planned.programs.spec(run.key)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, object] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        if capture:
            options["xla_gpu_enable_command_buffer"] = EVERYTHING
        lowered = jax.jit(spec.body, donate_argnums=spec.donated).lower(*spec.arguments)
        lowered.compile((compiler_options("cuda") or {}) | options)
        [dumped] = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        return dumped.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deployment", help="as `launch.plan` takes it, or a file with a dumped thunk sequence")
    parser.add_argument("--capture", action="store_true", help="let command buffers hold collectives and loops")
    args = parser.parse_args()
    is_dump = Path(args.deployment).is_file() and args.deployment.endswith(".txt")
    text = Path(args.deployment).read_text() if is_dump else compiled_thunks(args.deployment, args.capture)
    print("\n".join(table(parse(text))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
