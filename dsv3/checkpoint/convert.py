"""Converts a checkpoint directory to the pre-stacked form or back, with a bounded part of it in memory."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dsv3.checkpoint import fill, int4
from dsv3.checkpoint.boxes import Box, block_axis, blocks, extents, full_box, grid, moved
from dsv3.checkpoint.checksum import checksum
from dsv3.checkpoint.fill import Files, aligned_empty
from dsv3.checkpoint.load import plan_directory
from dsv3.checkpoint.load_plan import Array, Fp8Mode, LoadPlan
from dsv3.checkpoint.publish import check_free, partial_path, publish, replace_file, sync
from dsv3.checkpoint.reader import Advance, check_duplicates, reporter
from dsv3.checkpoint.safetensors_file import DATA_ALIGNMENT, header_bytes
from dsv3.checkpoint.stacked import FOLDER, FORMAT, MANIFEST, VERSION, manifest_bytes
from dsv3.checkpoint.writer import F32, refuse_int4, write_hf
from dsv3.config.hugging_face import to_hf
from dsv3.config.model import ModelConfig
from pallas_kernels.float8 import E4M3

WINDOW_BYTES = 256 << 20
JOURNAL = "journal.json"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tiktoken.model",
    "tekken.json",
    "tokenization_kimi.py",
    "tokenization_moonshot.py",
    "generation_config.json",
)


def convert_to_stacked(
    source: Path,
    target: Path,
    cfg: ModelConfig,
    *,
    dtype: Any = None,
    fp8: Fp8Mode = "keep",
    progress: bool = False,
    threads: int = 8,
) -> None:
    """Writes the pre-stacked form of a checkpoint directory; `dtype` None keeps the embedding's.

    `target` appears whole. After a kill, the next run with the same source and options keeps the files that were
    finished and writes the others. With another source or other options it starts afresh.

    Raises `CheckpointError` if the source is not what `cfg` describes, `FileExistsError` if `target` holds anything.
    """
    plan = _plan(source, cfg, dtype, fp8)
    check_free(target)
    partial = partial_path(target)
    done = _resume(partial, _fingerprint(plan, cfg))
    arrays = [array for leaf in plan.leaves.values() for array in leaf if array.name not in done["arrays"]]
    total = plan.bytes_to_compare + sum(a.bytes_to_read(full_box(a.shape)) for a in arrays)
    with Files(threads) as files, reporter(total, "converting", shown=progress) as advance:
        files.open(plan.files)
        check_duplicates(files, plan, advance)
        for path, leaf in plan.leaves.items():
            if leaf[0].name not in done["arrays"]:
                done["arrays"] |= _write_leaf(files, leaf, partial / FOLDER / f"{path}.safetensors", advance)
                replace_file(partial / JOURNAL, json.dumps(done).encode())
    _finish(source, partial, plan, cfg, done["arrays"])
    publish(partial, target)


def convert_to_hf(
    source: Path,
    target: Path,
    cfg: ModelConfig,
    *,
    dtype: Any = None,
    fp8: Fp8Mode = "keep",
    shard_bytes: int = 5 * 10**9,
    progress: bool = False,
    threads: int = 8,
) -> None:
    """Writes the Hugging Face form of a checkpoint directory, as `writer.save_hf` does.

    `target` appears whole; after a kill the next run starts afresh. Raises as `convert_to_stacked` does.
    """
    plan = _plan(source, cfg, dtype, fp8)
    refuse_int4(path for path, leaf in plan.leaves.items() if leaf[0].dtype == int4.WORD)
    with Files(threads) as files:
        files.open(plan.files)
        check_duplicates(files, plan, _ignore)
        write_hf(
            target,
            cfg,
            PlannedStacks(plan, files),
            shard_bytes=shard_bytes,
            scale_dtype=F32,
            companions=_companions(source),
            progress=progress,
        )


def _plan(source: Path, cfg: ModelConfig, dtype: Any, fp8: Fp8Mode) -> LoadPlan:
    if fp8 == "quantize":
        raise ValueError("fp8 'quantize' is for serving, which rounds on its devices; files can keep or dequantize")
    return plan_directory(source, cfg, dtype, fp8)


@dataclasses.dataclass(frozen=True)
class PlannedStacks:
    """Stacks of a checkpoint directory, read when they are asked for (`writer.Stacks`)."""

    plan: LoadPlan
    files: Files

    def dtypes(self, path: str) -> tuple[np.dtype, ...]:
        """Returns the dtypes of a leaf's arrays."""
        return tuple(array.dtype for array in self.plan.leaves[path])

    def rows(self, path: str, part: int, rows: slice) -> np.ndarray:
        """Returns the indices `rows` of the first axis of one array."""
        array = self.plan.leaves[path][part]
        box = (slice(*rows.indices(array.shape[0])[:2]), *full_box(array.shape[1:]))
        out = aligned_empty(extents(box), array.dtype)
        self.files.fill(array, [(box, out)], _ignore)
        return out


def windows(array: Array) -> Iterator[Box]:
    """Returns the boxes of at most `WINDOW_BYTES` that follow each other in the array's bytes.

    Each consists of whole blocks.
    """
    itemsize = array.dtype.itemsize
    axis, count = block_axis(array.shape, itemsize, WINDOW_BYTES)
    finer_axis, finer_count = block_axis(array.shape, itemsize, fill.BLOCK_BYTES)
    if axis == finer_axis and count < array.shape[axis]:
        count -= count % finer_count
    for _, box in grid(array.shape, axis, count, full_box(array.shape)):
        yield box


def _ignore(_: int) -> None:
    pass


def _write_leaf(files: Files, leaf: tuple[Array, ...], path: Path, advance: Advance) -> dict[str, Any]:
    """Writes one file and returns the manifest's entries for its arrays."""
    entries: dict[str, Any] = {}
    with path.open("wb") as out:
        out.write(header_bytes([(a.name, a.dtype, a.shape) for a in leaf], {"format": FORMAT}, DATA_ALIGNMENT))
        for array in leaf:
            checksums: list[int] = []
            for window in windows(array):
                host = aligned_empty(extents(window), array.dtype)
                files.fill(array, [(window, host)], advance)
                out.write(host.reshape(-1).view(np.uint8).data)
                checksums += _checksums(array, window, host)
            entries[array.name] = {"file": path.name, "checksums": checksums}
    sync(path)
    sync(path.parent)
    return entries


def _checksums(array: Array, window: Box, host: np.ndarray) -> Iterator[int]:
    """Returns the checksum of each block of a window, whose values are `host`."""
    for _, block in blocks(array.shape, array.dtype.itemsize, window, fill.BLOCK_BYTES):
        inside = host[moved(block, tuple(-s.start for s in window))]
        yield checksum(inside.reshape(-1).view(np.uint8))


def _fingerprint(plan: LoadPlan, cfg: ModelConfig) -> str:
    """Digests all that shapes the output: the source files as they are now, the options, the configuration."""
    files = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in plan.files]
    arrays = [(a.name, a.shape, str(a.dtype)) for leaf in plan.leaves.values() for a in leaf]
    facts = [VERSION, fill.BLOCK_BYTES, dataclasses.asdict(cfg), sorted(files), arrays]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _resume(partial: Path, fingerprint: str) -> dict[str, Any]:
    """Returns the journal of a run that was killed, or starts a fresh one in an empty directory."""
    fresh: dict[str, Any] = {"fingerprint": fingerprint, "arrays": {}}
    try:
        journal = json.loads((partial / JOURNAL).read_bytes())
        if journal["fingerprint"] == fingerprint:
            return journal
    except (OSError, ValueError, KeyError, TypeError):
        pass
    shutil.rmtree(partial, ignore_errors=True)
    (partial / FOLDER).mkdir(parents=True)
    replace_file(partial / JOURNAL, json.dumps(fresh).encode())
    return fresh


def _finish(source: Path, partial: Path, plan: LoadPlan, cfg: ModelConfig, entries: dict[str, Any]) -> None:
    quantized = any(array.dtype == E4M3 for leaf in plan.leaves.values() for array in leaf)
    settings = to_hf(cfg if quantized else dataclasses.replace(cfg, fp8=None))
    (partial / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    for path in _companions(source):
        shutil.copyfile(path, partial / path.name)
    (partial / FOLDER / MANIFEST).write_bytes(manifest_bytes(entries, fill.BLOCK_BYTES))
    (partial / JOURNAL).unlink()


def _companions(source: Path) -> list[Path]:
    return [source / name for name in COMPANIONS if (source / name).is_file()]
