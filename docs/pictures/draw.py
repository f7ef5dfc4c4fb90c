"""Draws the pictures of the docs: `python docs/pictures/draw.py` writes the SVG files beside it.

A picture is a list of boxes, arrows and texts on a grid of pixels. A test compares the files with what this writes.
"""

from pathlib import Path
from xml.sax.saxutils import escape

from training.pipeline.schedules import ALGORITHMS, PassKind, build
from training.pipeline.simulator import simulate

HERE = Path(__file__).parent
FILLS = {
    "host": "#e8f0fe",
    "device": "#e6f4ea",
    "network": "#fef3e0",
    "store": "#f3e8fd",
    "frame": "none",
    "idle": "#f1f3f4",
}
LINE = 17  # pixels from one line of text to the next
PASSES = {
    PassKind.FORWARD: ("forward", "#f2c75c"),
    PassKind.BACKWARD: ("backward", "#6fa8dc"),
    PassKind.INPUT: ("input gradient", "#a4d3a2"),
    PassKind.WEIGHT: ("weight gradient", "#c9a0dc"),
}
"""Name and color of each operation of a pipeline."""


class Picture:
    """Boxes, arrows and texts on a white sheet of `width` x `height` pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#202124">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="#5f6368"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, text: str = "", kind: str = "host") -> None:
        """Draws a box with lines of text in its middle; those of a frame stand at its top left."""
        dashes = ' stroke-dasharray="5 4"' if kind == "frame" else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{FILLS[kind]}" '
            f'stroke="#9aa0a6"{dashes}/>'
        )
        if kind == "frame":
            self.text(x + 10, y + 19, text, bold=True)
            return
        lines = text.split("\n")
        first = y + height / 2 - LINE * (len(lines) - 1) / 2 + 4.5
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + number * LINE, line, anchor="middle")

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", bold: bool = False, small: bool = False
    ) -> None:
        """Writes one line of text; (x, y) is its `anchor` on the base line."""
        style = (' font-weight="bold"' if bold else "") + (' font-size="11" fill="#5f6368"' if small else "")
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{escape(text)}</text>')

    def arrow(self, *points: tuple[int, int], label: str = "", both: bool = False) -> None:
        """Draws an arrow along points, with a label over the middle of its first part."""
        path = " ".join(f"{x},{y}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="#5f6368" stroke-width="1.4" '
            f'marker-end="url(#head)"{start}/>'
        )
        if label:
            (x0, y0), (x1, y1) = points[:2]
            if y0 == y1:
                self.text((x0 + x1) / 2, y0 - 6, label, anchor="middle", small=True)
            else:
                self.text(x0 + 6, (y0 + y1) / 2 + 4, label, small=True)

    def cell(self, x: float, y: float, width: float, height: float, fill: str, text: str = "", ink: str = "") -> None:
        """Draws a filled cell with a text in its middle; a fill of "none" is a thick frame."""
        line = "#000" if fill == "none" else "#555"
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(
            f'<rect {size} fill="{fill}" stroke="{line}" stroke-width="{1.5 if line == "#000" else 0.5}"/>'
        )
        if text:
            middle = f'x="{x + width / 2:g}" y="{y + height - 5:g}" text-anchor="middle"'
            self._parts.append(f'<text {middle} font-size="11" fill="{ink}">{text}</text>')

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def request() -> Picture:
    """The life of a request, by process."""
    p = Picture(980, 430, "The life of a request")
    p.box(10, 10, 290, 410, "API server processes (no jax)", "frame")
    p.box(330, 10, 330, 410, "engine process (leader)", "frame")
    p.box(690, 10, 280, 410, "other hosts (followers)", "frame")
    for row, text in enumerate(("parse and validate JSON", "render the chat template", "tokenize, hash pages")):
        p.box(40, 45 + 50 * row, 230, 36, text)
        if row:
            p.arrow((155, 31 + 50 * row), (155, 45 + 50 * row))
    for row, text in enumerate(("stop strings, tool calls, JSON", "detokenize")):
        p.box(40, 285 + 55 * row, 230, 36, text)
    p.arrow((155, 340), (155, 321))
    p.arrow((155, 285), (155, 255), label="events to the client")
    p.box(360, 45, 270, 36, "admission: queue, batch slot, pages")
    p.box(360, 110, 270, 36, "schedule step n + 1: a list of jobs")
    p.box(360, 175, 270, 36, "executor: launch", "host")
    p.box(360, 240, 270, 50, "devices: prefill, decode,\nsampler, page copies", "device")
    p.box(360, 340, 270, 36, "results of step n, as columns")
    for upper, lower in ((81, 110), (146, 175), (211, 240), (290, 340)):
        p.arrow((495, upper), (495, lower))
    p.box(720, 175, 220, 36, "executor: launch")
    p.box(720, 240, 220, 50, "devices: the same programs,\nother ranks and experts", "device")
    p.arrow((830, 211), (830, 240))
    p.arrow((270, 163), (315, 163), (315, 63), (360, 63))
    p.text(312, 180, "Add", anchor="middle", small=True)
    p.arrow((630, 193), (720, 193), label="Step")
    p.arrow((630, 265), (720, 265), label="NCCL", both=True)
    p.arrow((830, 290), (830, 358), (630, 358), label="digest")
    p.arrow((360, 358), (270, 358), label="Outputs")
    p.text(495, 402, "tokens come back one step late", anchor="middle", small=True)
    return p


def programs() -> Picture:
    """The two compiled programs and what they share."""
    p = Picture(980, 330, "Two compiled programs")
    p.box(20, 40, 260, 60, "prefill: chunks of several prompts\ntokens [X, T]", "host")
    p.box(20, 220, 260, 60, "decode: a row per request\nrows [X, B, 1 + drafts]", "host")
    for y, name in ((30, "prefill program"), (210, "decode program")):
        p.box(330, y, 330, 80, "", "device")
        p.text(495, y + 22, name, anchor="middle", bold=True)
        p.text(495, y + 44, "attention form, size: chosen by the host", anchor="middle", small=True)
        p.text(495, y + 64, "all layers, experts on all devices", anchor="middle", small=True)
        p.arrow((280, y + 40), (330, y + 40))
        p.box(720, y + 5, 110, 32, "scores", "idle")
        p.box(720, y + 45, 110, 32, "hidden", "idle")
        p.arrow((660, y + 21), (720, y + 21))
        p.arrow((660, y + 61), (720, y + 61))
        p.box(870, y + 5, 95, 32, "sampler", "device")
        p.box(870, y + 45, 95, 32, "drafter", "device")
        p.arrow((830, y + 21), (870, y + 21))
        p.arrow((830, y + 61), (870, y + 61))
    p.box(330, 143, 330, 34, "parameters, page pool, decode state (donated)", "store")
    p.arrow((495, 110), (495, 143), both=True)
    p.arrow((495, 177), (495, 210), both=True)
    p.text(
        20,
        315,
        "Each is compiled for a few sizes before the first request; after warm-up nothing compiles.",
        small=True,
    )
    return p


def step() -> Picture:
    """Host and device time of three steps, and the jobs of one."""
    p = Picture(980, 310, "A step's jobs, and how steps overlap")
    p.text(20, 50, "host", bold=True)
    p.text(20, 110, "devices", bold=True)
    width = 290
    for number, name in enumerate(("n + 1", "n + 2", "n + 3")):
        x = 90 + number * width
        p.box(x, 30, 120, 34, f"schedule {name}")
        p.box(x + 122, 30, 60, 34, "launch")
        p.box(x + 184, 30, 102, 34, "results " + ("n", "n + 1", "n + 2")[number], "idle")
        p.box(x, 90, width - 4, 34, "step " + ("n", "n + 1", "n + 2")[number], "device")
        if number < 2:
            p.arrow((x + 152, 64), (x + 152, 78), (x + width + 6, 78), (x + width + 6, 90))
    p.text(
        90,
        144,
        "The host schedules and launches the next step while the devices compute; it waits only for results.",
        small=True,
    )
    p.box(20, 165, 945, 130, "one step: jobs of five kinds, in this order", "frame")
    jobs = (
        ("decode", "a token per row,\nor several with drafts"),
        ("pages", "copies to host memory\nand back"),
        ("prefill", "chunks of prompts"),
        ("draft", "proposes the next\nrows' tokens"),
        ("experts", "moves experts between\ndevices"),
    )
    for number, (name, text) in enumerate(jobs):
        x = 35 + 186 * number
        p.box(x, 200, 168, 78, f"{name}\n{text}", "device")
        if number:
            p.arrow((x - 18, 239), (x, 239))
    return p


def decode_pipeline() -> Picture:
    """Two micro-batches of a decode layer: what computes while the other's rows travel."""
    p = Picture(980, 235, "Two-batch overlap in decode")
    p.text(15, 75, "compute", bold=True)
    p.text(15, 130, "network", bold=True)
    x = 95
    for half in range(2):
        a, b = half, 1 - half
        p.box(x, 50, 175, 40, f"shared {a}, project {b}", "device")
        p.box(x + 178, 50, 85, 40, f"experts {a}", "device")
        p.box(x + 266, 50, 165, 40, f"core and router {b}", "device")
        p.box(x, 105, 175, 40, f"dispatch {a} (FP8)", "network")
        p.box(x + 266, 105, 165, 40, f"combine {a} (bf16)", "network")
        p.arrow((x + 175, 125), (x + 220, 125), (x + 220, 90))
        x += 437
    p.text(95, 30, "first half of a layer", bold=True)
    p.text(532, 30, "second half: 0 and 1 change places", bold=True)
    p.text(
        95,
        175,
        "0 and 1 are a step's micro-batches. project: query and latent products; core: attention on the cache.",
        small=True,
    )
    p.text(
        95,
        195,
        "Program order is enforced: between start and finish of a transfer stands the other micro-batch's work.",
        small=True,
    )
    p.text(95, 215, "dsv3/model/schedules/overlapped.py has this order, and that of prefill.", small=True)
    return p


def fleet() -> Picture:
    """Several instances behind a router."""
    p = Picture(980, 380, "A fleet: router, prefill and decode instances, shared pages")
    p.box(20, 140, 120, 60, "clients")
    p.box(210, 125, 170, 90, "router\nchoice, retries,\nresume")
    p.arrow((140, 170), (210, 170), label="HTTP", both=True)
    for y, role, text in (
        (20, "prefill", "prefill instances\nEP32: 4 hosts each"),
        (230, "decode", "decode instances\nEP144: 18 hosts each"),
    ):
        p.box(480, y, 230, 110, text, "device")
        p.text(595, y + 98, f"launch.serve --role {role}", anchor="middle", small=True)
    p.arrow((380, 150), (430, 150), (430, 75), (480, 75), label="")
    p.arrow((380, 190), (430, 190), (430, 285), (480, 285))
    p.text(395, 62, "1. prompt", small=True)
    p.text(395, 305, "2. go on", small=True)
    p.arrow((595, 130), (595, 230), label="3. pages, by sockets or NIXL")
    p.box(800, 75, 150, 70, "host memory\nof each instance", "store")
    p.box(800, 225, 150, 70, "disk or object store,\nshared", "store")
    p.arrow((710, 100), (800, 100), both=True)
    p.arrow((875, 145), (875, 225), both=True)
    p.arrow((710, 260), (800, 260), both=True)
    p.arrow((480, 40), (295, 40), (295, 125))
    p.text(280, 32, "KV events: which pages are where", small=True)
    p.text(
        20,
        365,
        "Any instance may die: the router sends its requests to another one, behind the tokens that have come.",
        small=True,
    )
    return p


def pipeline_schedules() -> Picture:
    """The operations of the four pipeline schedules with four stages, at their simulated times."""
    unit, row, left, micro_batches = 18, 20, 60, 12
    runs = []
    for algorithm in ALGORITHMS:
        ranks = 2 if algorithm == "DualPipeV" else 4
        runs.append((algorithm, ranks, simulate(build(algorithm, ranks, micro_batches)).events))
    width = left + max(event.end for _, _, events in runs for event in events) * unit + 10
    height = 40 + sum(ranks * row + 34 for _, ranks, _ in runs)
    p = Picture(round(width), height, "Pipeline schedules")
    for i, (name, fill) in enumerate(PASSES.values()):
        p.cell(4 + i * 130, 6, 14, 14, fill)
        p.text(22 + i * 130, 17, name, small=True)
    p.text(524, 17, "thick frame: an overlapped pair; white numbers: direction 1", small=True)
    top = 50
    for algorithm, ranks, events in runs:
        p.text(4, top - 6, f"{algorithm}: {ranks} ranks, 4 stages, {micro_batches} micro-batches", bold=True)
        for rank in range(ranks):
            p.text(4, top + rank * row + 14, f"rank {rank}", small=True)
        for event in events:
            y, share = top + event.rank * row, (event.end - event.start) / len(event.operation) * unit
            for i, part in enumerate(event.operation):
                ink = "#fff" if part.direction else "#000"
                x = left + event.start * unit + i * share
                p.cell(x, y, share, row - 2, PASSES[part.kind][1], str(part.micro_batch), ink)
            if len(event.operation) == 2:
                p.cell(left + event.start * unit, y, 2 * share, row - 2, "none")
        top += ranks * row + 34
    return p


PICTURES = {
    "request": request,
    "programs": programs,
    "step": step,
    "decode_pipeline": decode_pipeline,
    "fleet": fleet,
    "pipeline_schedules": pipeline_schedules,
}


def main() -> None:
    """Writes all pictures."""
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
