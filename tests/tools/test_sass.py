"""Reading machine code: control words, main loops, counts, and the model of a multiprocessor on small loops."""

import dataclasses

import pytest

from benchmarks.gpu import machine_code
from benchmarks.record import Report
from pallas_kernels.gemm.plan import TilePlan
from tools.sass import ceilings, counts, disassembly, kernels, listed, loops, model
from tools.sass.model import Load, Protocol, Role, TmaLink
from tools.sass.reading import OTHERS, KernelReading

NO_SCOREBOARD = 7


def upper(stall=1, *, write=NO_SCOREBOARD, read=NO_SCOREBOARD, waits=0):
    """Encodes the upper 64 bits of an instruction."""
    return (stall | write << 5 | read << 8 | waits << 11) << 41


def listing(*lines):
    """Formats nvdisasm's output: labels unchanged, else a text or (text, upper bits)."""
    out, address = ['\t.section\t.text.kernel,"ax",@progbits'], 0
    for line in lines:
        if isinstance(line, str) and line.endswith(":"):
            out.append(line)
            continue
        text, bits = (line, upper()) if isinstance(line, str) else line
        out.append(f"        /*{address:04x}*/                   {text} ;    /* 0x0000000000000918 */")
        out.append(f"                                            /* {bits:#018x} */")
        address += 16
    return "\n".join(out)


def function(*lines):
    return disassembly.parse(listing(*lines))


def test_an_instruction_is_decoded():
    (read,) = function(("@!P0 LDS.128 R4, [R2+UR5]", upper(4, write=2, read=3, waits=0b1001))).instructions
    assert (read.op, read.args, read.predicate) == ("LDS.128", "R4, [R2+UR5]", "!P0")
    assert (read.stall, read.sets, read.waits) == (4, (2, 3), 0b1001)
    (plain,) = function("EXIT").instructions
    assert plain.sets == (None, None) and plain.predicate is None


PRODUCT = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3"
ARRIVE = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ"
DONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0"

NESTED = (
    "MOV R1, R2",
    ".L_tiles:",
    "IADD3 R1, R1, 1, RZ",
    ".L_steps:",
    WAIT,
    "@P0 BRA `(.L_ready)",
    ".L_try:",
    WAIT,
    "@!P0 BRA `(.L_try)",
    ".L_ready:",
    PRODUCT,
    "@P1 BRA `(.L_unmasked)",
    "FSEL R1, R2, R3, P4",
    "FSEL R1, R2, R3, P4",
    ".L_unmasked:",
    DONE,
    "@P2 BRA `(.L_skip)",
    ARRIVE,
    ".L_skip:",
    "@P3 BRA `(.L_steps)",
    "STG.E [R2], R3",
    "@P5 BRA `(.L_tiles)",
    "EXIT",
)


def test_the_usual_path_skips_what_is_rare_and_keeps_arrivals():
    (path,) = loops.main_loops(function(*NESTED))
    assert [i.op.split(".")[0] for i in path] == [
        "SYNCS", "BRA", "HGMMA", "BRA", "WARPGROUP", "BRA", "SYNCS", "BRA"
    ]  # fmt: skip
    assert sum(map(loops.is_wait, path)) == sum(map(loops.is_arrival, path)) == 1


def test_a_kernel_without_products_has_no_main_loop():
    assert loops.main_loops(function(".L_a:", "IADD3 R1, R1, 1, RZ", "@P0 BRA `(.L_a)", "EXIT")) == []


def test_resources_of_a_path():
    path = function(
        (PRODUCT, upper(3)), "HGMMA.64x64x16.F32.BF16 R8, R4, gdesc[UR8], R8", "STSM.16.M88.4 [R2], R4", "LDS R2, [R3]",
        "IMAD.MOV.U32 R1, RZ, RZ, R2", "MUFU.EX2 R1, R1", "R2UR UR4, R2", "F2FP.BF16.F32.PACK_AB R1, R2, R3", "WEIRD",
    ).instructions  # fmt: skip
    operands = (2048 + 8192) + 2048  # the second one's left operand comes from registers
    stored_and_loaded = 4 * (512 + 128)
    assert counts.resources(path) == {
        "tensor core": 128 + 32, "shared memory": (operands + stored_and_loaded) / 128, "issue": 9, "exp2": 8
    }  # fmt: skip


def loop(*lines):
    return function(*lines).instructions


STEP = loop(WAIT, PRODUCT, DONE, ARRIVE, "BRA `(.L_a)")
RING = Protocol((Role(("full",), ("empty",)),) * 2, (Load("full", "empty", 1000, 1000),), 4, {"empty": 2})


def test_two_warpgroups_hide_each_others_latencies_behind_the_tensor_core():
    run = model.simulate([STEP], RING, TmaLink(latency=100, bytes_per_cycle=float("inf")))
    assert run.cycles == run.tensor_cycles == 2 * 128
    one = dataclasses.replace(RING, roles=RING.roles[:1], arrivals={})
    alone = model.simulate([STEP], one, TmaLink(latency=100, bytes_per_cycle=float("inf")))
    assert alone.cycles > alone.tensor_cycles == 128


@pytest.mark.parametrize("round_robin", [True, False])
def test_a_slow_link_binds(round_robin):
    run = model.simulate([STEP], RING, TmaLink(latency=100, bytes_per_cycle=2, round_robin=round_robin))
    assert run.cycles == pytest.approx(1000 / 2, abs=1)
    assert max(run.waiting[0], key=run.waiting[0].__getitem__) == "full"


def test_a_short_ring_shows_the_latency():
    cycles = [
        model.simulate([STEP], dataclasses.replace(RING, ahead=ahead), TmaLink(2000, float("inf"))).cycles
        for ahead in (1, 2, 4)
    ]
    assert cycles[0] > 2000 and cycles[0] > cycles[1] > cycles[2]


def test_a_longer_chain_takes_longer():
    chained = [("MUFU.EX2 R1, R1", upper(1, write=0)), ("FADD R2, R1, R1", upper(1, waits=1))] * 20
    fast = TmaLink(100, float("inf"))
    slow = model.simulate([loop(WAIT, PRODUCT, DONE, *chained, ARRIVE)], RING, fast)
    assert slow.cycles > model.simulate([STEP], RING, fast).cycles
    assert slow.waiting[0]["scoreboard"] > 0


def test_a_loop_that_does_not_match_its_protocol_is_rejected():
    with pytest.raises(model.ModelError, match="1 waits at mbarriers"):
        model.simulate([STEP], Protocol((Role(("a", "b"), ("c",)),) * 2, RING.loads), TmaLink(1, 1))
    with pytest.raises(model.ModelError, match="3 main loops for 2"):
        model.simulate([STEP] * 3, RING, TmaLink(1, 1))


def test_warpgroups_that_wait_for_each_other_forever_are_an_error(monkeypatch):
    monkeypatch.setattr(model, "_MOST_CYCLES", 5000)
    stuck = dataclasses.replace(RING, arrivals={"empty": 3})
    with pytest.raises(model.ModelError, match="no end after 500"):
        model.simulate([STEP], stuck, TmaLink(100, 40))


def test_a_missing_tool_says_what_to_install(monkeypatch):
    with pytest.raises(disassembly.ToolMissingError, match="'aot' extra"):
        disassembly.tool("no_such_tool")
    monkeypatch.setattr("sys.argv", ["machine_code", "--only", "nothing like it"])
    assert machine_code.main(Report()) == 2


def test_tables_name_bounds_and_others(monkeypatch):
    """Builds the tables from a small loop in place of a compiled kernel's."""
    kernel = dataclasses.replace(kernels.dense(4096, 2112, 7168, "DeepGEMM dense 128x192"), protocol=RING)
    run = model.simulate([STEP], RING, TmaLink(100, 40))
    reading = KernelReading(kernel, 0, "232/40", [STEP], {kernels.FAST: (run, run)})
    assert max(reading.bounds(), key=reading.bounds().__getitem__) == "tensor core"
    report = Report()
    machine_code.tabulate(report, [reading])
    text = "\n".join(line for table in report.tables for line in table.lines())
    assert "| DeepGEMM dense 128x192 | 768 / 768 |" in text and "**256**" in text
    ratio = 768 * (256 / 768) / run.cycles
    assert f"| {ratio:.2f} / {ratio:.2f} |" in text


def test_attention_to_listed_rows_is_bounded_for_64_rows_and_64_heads():
    """A pass of eight warps is 32 heads and 32 rows of 1,024 bytes: a quarter of the work; rows come twice."""
    (path,) = loops.main_loops(
        function(
            ".L_rows:",
            "LDGSTS.E.BYPASS.128 [R2], [R4.64]",
            *["LDSM.16.M88.4 R8, [R6]"] * 2,
            *["HMMA.16816.F32.BF16 R12, R8, R10, R12"] * 64,
            "MUFU.EX2 R3, R3",
            "@P0 BRA `(.L_rows)",
            "EXIT",
        )
    )
    products, fetched, tensor, shared, issue, exp2, l2 = listed.bounds(path, 8, 32, 32, 1024)
    assert products == tensor == 64 * 8 * 4 == 2 * 64 * 64 * 512 / 2048  # as many as there are to do
    assert (fetched, l2) == (128, 128 * 1024 / 40)
    assert (shared, issue, exp2) == (4 * 8 * 3 * 512 / 128, 4 * 2 * 69, 4 * 2 * 8)


def test_every_other_loop_is_one_of_the_stored():
    for kernel in kernels.kernels():
        assert kernel.other is None or kernel.other in OTHERS["loops"], kernel.name
    for name, stored in OTHERS["loops"].items():
        assert name.split()[0] in OTHERS["sources"]
        assert stored["bounds"]["tensor core"] > 0


def test_the_ceiling_of_a_product_counts_its_last_wave_and_what_binds():
    shape, tall = ceilings.Shape("dense", 1, 4096, 4096, 7168), TilePlan(True, 256, 128, cluster=2)
    filled = 512 / (4 * 132)  # 512 tiles in four waves
    assert ceilings.ceiling(shape, tall, ours=False, shared_memory=False) == pytest.approx(filled)
    assert ceilings.ceiling(shape, tall, ours=False) == pytest.approx(filled * 1024 / 1160)
    alone = TilePlan(True, 256, 128)  # 50,176 bytes of a step at 40 per cycle
    assert ceilings.ceiling(shape, alone, ours=False) == pytest.approx(filled * 1024 / (50176 / 40))


def test_pairs_of_two_groups_share_activations_where_deepgemm_shares_nothing():
    shape, tiling = (
        ceilings.Shape("contiguous", 32, 128, 7168, 2048),
        TilePlan(True, 128, 192, cluster=2, shares_weights=True),
    )
    ours, theirs = (ceilings.ceiling(shape, tiling, ours=side, shared_memory=False) for side in (True, False))
    assert ours > 1.1 * theirs


def test_no_product_of_many_rows_has_a_lower_ceiling_than_deepgemms():
    """Fails for a plan that leaves a wave of multiprocessors idle (docs/performance/machine_code.md)."""
    for name, *_, ratio, without_shared_memory in ceilings.rows(OTHERS["tiles"]):
        assert min(float(ratio), float(without_shared_memory)) >= 1, name
