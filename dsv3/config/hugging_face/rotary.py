"""Rotary settings: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`."""

import dataclasses
from typing import Any

from dsv3.config.hugging_face.fields import Fields
from dsv3.config.model import ModelConfig, QueryScaling, YarnConfig


def read_rotary(fields: Fields) -> dict[str, Any]:
    """Reads the rotary settings as DeepSeek means them: YaRN's `mscale_all_dim` also scales the softmax.

    Returns them by the names of `ModelConfig`'s fields.
    """
    theta, rope = _theta(fields)
    yarn = None
    if rope is not None:
        rope.one_of("partial_rotary_factor", (1, 1.0), 1.0)
        yarn = _yarn(rope)
        rope.finish()
    return {"rope_theta": theta, "yarn": yarn}


def read_mistral_rotary(fields: Fields) -> dict[str, Any]:
    """Does what `read_rotary` does, with the settings that Mistral's configurations have.

    `llama_4_scaling_beta` lengthens the queries of late tokens. `partial_rotary_factor` is the rotated share of a
    query. An `attention_factor` of 1 without mscales says that YaRN changes frequencies alone.
    """
    theta, rope = _theta(fields)
    if rope is None:
        return {"rope_theta": theta}
    rotated = fields.integer("qk_rope_head_dim")
    share = rotated / (rotated + fields.integer("qk_nope_head_dim"))
    rope.one_of("partial_rotary_factor", (share,), share)
    rope.get("max_position_embeddings")
    scaling = None
    if rope.has("llama_4_scaling_beta"):
        period = rope.integer("original_max_position_embeddings")
        scaling = QueryScaling(rope.number("llama_4_scaling_beta", above=False), period)
    rope.get("llama_4_scaling_beta")
    yarn = frequencies_alone(rope) if rope.has("attention_factor") else _yarn(rope)
    if yarn is None and rope.has("attention_factor"):
        raise rope.fail("attention_factor", "absent without yarn")
    rope.get("original_max_position_embeddings")
    rope.finish()
    return {"rope_theta": theta, "yarn": yarn, "query_scaling": scaling}


def frequencies_alone(rope: Fields) -> YarnConfig | None:
    """Reads a YaRN that scales neither cosines and sines nor the softmax; None where `rope` has no YaRN."""
    rope.one_of("attention_factor", (1, 1.0), 1.0)
    for name in ("mscale", "mscale_all_dim"):
        rope.one_of(name, (None,), None)
    yarn = _yarn(rope, with_factor=True)
    return None if yarn is None else dataclasses.replace(yarn, mscale=0.0, mscale_all_dim=0.0)


def mistral_rope_parameters(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the `rope_parameters` that `read_mistral_rotary` reads."""
    share = cfg.qk_rope_head_dim / cfg.qk_head_dim
    parameters: dict[str, Any] = {"rope_theta": cfg.rope_theta, "partial_rotary_factor": share}
    if cfg.yarn is None:
        parameters |= {"type": "default", "rope_type": "default"}
    else:
        parameters |= {"type": "yarn", "rope_type": "yarn", **dataclasses.asdict(cfg.yarn)}
        if (cfg.yarn.mscale, cfg.yarn.mscale_all_dim) == (0.0, 0.0):
            parameters |= {"attention_factor": 1.0, "mscale": None, "mscale_all_dim": None}
    if cfg.query_scaling is not None:
        parameters["llama_4_scaling_beta"] = cfg.query_scaling.beta
        parameters["original_max_position_embeddings"] = cfg.query_scaling.original_max_position_embeddings
    return parameters


def _theta(fields: Fields) -> tuple[float, Fields | None]:
    """Returns the base of the frequencies, and the object with all else, which the caller finishes."""
    if fields.has("rope_scaling") and fields.has("rope_parameters"):
        raise fields.fail("rope_parameters", "absent where rope_scaling is given, or the other way round")
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope, theta = fields.object(name), None
    fields.get("rope_scaling"), fields.get("rope_parameters")
    if rope is not None and rope.has("rope_theta"):
        theta = rope.number("rope_theta")
        if fields.has("rope_theta") and fields.number("rope_theta") != theta:
            raise fields.fail("rope_theta", f"equal to {name}.rope_theta, {theta}")
    theta = theta or fields.number("rope_theta")
    fields.get("rope_theta")
    return theta, rope


def _yarn(rope: Fields, *, with_factor: bool = False) -> YarnConfig | None:
    spelled = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.one_of(spelled, ("yarn", "default"))
    rope.one_of("type", (kind,), kind)
    if kind == "default":
        return None
    rope.one_of("truncate", (True,), True)
    if rope.has("attention_factor") and not with_factor:
        raise rope.fail("attention_factor", "null or absent: it follows from factor, mscale and mscale_all_dim")
    rope.get("attention_factor")
    return YarnConfig(
        factor=rope.number("factor", least=1.0, above=False),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale", 1.0, above=False),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, above=False),
    )
