"""The widths of a model's linear layers, and which of them FP8 products take. Imports no jax."""

from dsv3.config.model import ModelConfig

MULTIPLE = 16
"""Values that a width must be a multiple of: 16 bytes of e4m3, the stride of the GPU's copies into shared memory.

A backward contracts over what the forward gives, so it holds for both sides of a weight.
"""


def check_fp8_widths(cfg: ModelConfig) -> None:
    """Raises ValueError where FP8 products do not take a width of the model, with all that they do not take."""
    wrong = [f"{name} is {width}" for name, width in linear_widths(cfg).items() if width % MULTIPLE]
    if wrong:
        raise ValueError(
            f"FP8 products take widths in multiples of {MULTIPLE}, but {', '.join(wrong)}; change the model, or train "
            "it without fp8_products"
        )


def linear_widths(cfg: ModelConfig) -> dict[str, int]:
    """Returns what linear layers and experts take and give, by the settings of the model that it follows from."""
    queries, heads = cfg.num_attention_heads * cfg.qk_head_dim, cfg.num_attention_heads
    widths = {
        "hidden_size": cfg.hidden_size,
        "kv_lora_rank": cfg.kv_lora_rank,
        "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)": queries,
        "num_attention_heads * qk_nope_head_dim": heads * cfg.qk_nope_head_dim,
        "num_attention_heads * v_head_dim": heads * cfg.v_head_dim,
        "moe_intermediate_size": cfg.moe_intermediate_size,
    }
    if cfg.q_lora_rank is None:
        widths["queries + kv_lora_rank + qk_rope_head_dim"] = queries + cfg.latent_dim
    else:
        widths["q_lora_rank"] = cfg.q_lora_rank
        widths["q_lora_rank + kv_lora_rank + qk_rope_head_dim"] = cfg.q_lora_rank + cfg.latent_dim
    if cfg.num_dense_layers:
        widths["intermediate_size"] = cfg.intermediate_size
    if cfg.indexer is not None:
        widths["the indexer's head_dim"] = cfg.indexer.head_dim
    return widths
