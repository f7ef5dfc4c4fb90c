"""The families that are served, by the `model_type` of their config.json."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from dsv3.config.hugging_face import nested
from dsv3.config.hugging_face.deepseek import V2_ROUTERS, Family, read
from dsv3.config.hugging_face.fields import Fields
from dsv3.config.hugging_face.rotary import read_mistral_rotary
from dsv3.config.model import ModelConfig

_log = logging.getLogger(__name__)

_MISTRAL = Family(
    members="",
    routers=(("softmax", "greedy"),),
    one_group=True,
    rotary=read_mistral_rotary,
    per_tensor_fp8=True,
    fixed={"sliding_window": None},
)

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family("DeepSeek-V2, V2-Lite", V2_ROUTERS, renormalizes=False, may_renormalize=False),
    "deepseek_v3": Family("DeepSeek-V3, R1, V3.1, Moonlight"),
    "deepseek_v32": Family("DeepSeek-V3.2", indexer_interleaved=False),
    "glm_moe_dsa": Family("GLM-5, 5.1, 5.2", indexer_interleaved=True, fixed={"partial_rotary_factor": 1.0}),
    "kimi_k2": Family("Kimi-K2"),
    "glm4_moe_lite": Family("GLM-4.7-Flash", fixed={"partial_rotary_factor": 1.0}),
    "axk1": Family("A.X-K1", post_moe_norm=True),
    "mistral4": dataclasses.replace(_MISTRAL, members="Mistral Small 4"),
    "mistral_large_3": dataclasses.replace(_MISTRAL, members="Mistral Large 3"),
}
"""Families whose file describes the language model alone."""

WRAPPERS: dict[str, nested.Wrapper] = {
    "kimi_k25": nested.Wrapper("Kimi-K2.5, K2.6 (text)", ("deepseek_v3", "kimi_k2")),
    "mistral3": nested.Wrapper("Mistral Small 4 (text)", ("mistral4",)),
}
"""Families whose file has the language model's under `text_config`."""

OF_MISTRAL = ("mistral3", "mistral4")
"""Families whose directories may have Mistral's own file beside config.json."""


def from_hf(config: Mapping[str, Any], file: str = "config.json") -> ModelConfig:
    """Returns the `ModelConfig` of a parsed config.json of one of `FAMILIES` or `WRAPPERS`.

    Rotary settings may be spelled as `rope_theta` and `rope_scaling`, or as transformers 5's `rope_parameters`.
    `file` is the name of the file in messages.

    Raises:
      ConfigError: a field is missing, unknown, of the wrong type, or has a value that is not supported; the text
        names the field, its value and what is supported.
    """
    fields = Fields(config, file=file)
    family = fields.get("model_type")
    if family not in (*FAMILIES, *WRAPPERS):
        known = (f"{name!r} ({each.members})" for name, each in (FAMILIES | WRAPPERS).items())
        raise fields.fail("model_type", " or ".join(known))
    if family in FAMILIES:
        return dataclasses.replace(read(fields, FAMILIES[family]), family=family)
    text = nested.text_config(config, fields, WRAPPERS[family])
    cfg = read(text, FAMILIES[text.get("model_type")])
    _log.info("%s: only the language model is served; images and other media are not", family)
    return dataclasses.replace(cfg, family=family, eos_token_ids=nested.end_tokens(fields, cfg))
