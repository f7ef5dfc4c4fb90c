"""Turns the tensors of a family's checkpoint into those that `layout` knows: one name and one form for each.

Nothing is read or copied: a tensor is a window of a file, and so is each expert of a tensor that holds them all.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from dsv3.checkpoint.errors import raise_findings
from dsv3.checkpoint.layout import scale_name, scale_shape
from dsv3.checkpoint.safetensors_file import Tensor
from dsv3.config.hugging_face.names import is_of_other_media, text_name
from pallas_kernels.float8 import E4M3

_log = logging.getLogger(__name__)
_MOST_EXPERTS = 2**12  # of a layer; a tensor of more is none of a model's, and stays as it is
_SCALE = scale_name("")

_ALL_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(_scale_inv)?")
# Scales of inputs that a file holds ready-made: inputs are quantized as they come, 128 channels at a time.
_OF_INPUTS = (".activation_scale", ".input_scale", "_proj_activation_scale")


def in_deepseek_form(directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the language model under DeepSeek's names.

    Those of other media are left out, which the log says, and so are ready-made scales of inputs. Experts that lie in
    one tensor become one tensor each. A scale for a whole FP8 tensor stands for each of its blocks.

    Raises `CheckpointError` where two tensors would have one name.
    """
    skipped = [name for name in tensors if is_of_other_media(name)]
    if skipped:
        _log.info("%s: %d tensors of other media, such as %s, are not loaded", directory, len(skipped), skipped[0])
    named: dict[str, Tensor] = {}
    clashes: list[str] = []
    for name in tensors if not skipped else (n for n in tensors if not is_of_other_media(n)):
        for ours, tensor in _apart(text_name(name), tensors[name]):
            if ours in named:
                clashes.append(f"{ours}, of {named[ours].name} and {name}")
            named[ours] = tensor
    raise_findings(directory, {"tensors that mean the same": clashes})
    return {name: _spread(named, name) for name in named if not name.endswith(_OF_INPUTS)}


def _apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields a tensor, or one for each expert that it holds: `[E, 2 * I, D]`, `[E, D, I]`, or scales `[E, ...]`."""
    match = _ALL_EXPERTS.fullmatch(name)
    if match is None or not tensor.shape or not 0 < tensor.shape[0] <= _MOST_EXPERTS:
        yield name, tensor
        return
    experts, projection, scale = match.groups()
    suffix = ".weight_scale_inv" if scale else ".weight"
    count, inner = tensor.shape[0], tensor.shape[1:]
    each = math.prod(inner) * tensor.dtype.itemsize
    for e in range(count):
        whole = dataclasses.replace(tensor, shape=inner, offset=tensor.offset + e * each)
        stem = f"{experts}.{e}."
        if projection == "down_proj":
            yield f"{stem}down_proj{suffix}", whole
        elif math.prod(inner) == 1:  # one scale for both
            yield f"{stem}gate_proj{suffix}", whole
            yield f"{stem}up_proj{suffix}", whole
        else:
            half = dataclasses.replace(whole, shape=(inner[0] // 2, *inner[1:]))
            yield f"{stem}gate_proj{suffix}", half
            yield f"{stem}up_proj{suffix}", dataclasses.replace(half, offset=half.offset + half.nbytes)


def _spread(named: Mapping[str, Tensor], name: str) -> Tensor:
    """Returns a tensor; a scale of a whole FP8 matrix gets the shape of the blocks' scales, each of which it is."""
    tensor = named[name]
    if not name.endswith(_SCALE) or math.prod(tensor.shape) != 1:
        return tensor
    weight = named.get(name.removesuffix(_SCALE))
    if weight is None or weight.dtype != E4M3 or len(weight.shape) != 2:
        return tensor
    return dataclasses.replace(tensor, shape=scale_shape(weight.shape), repeated=True)
