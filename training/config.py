"""`TrainingConfig`: data, optimizer, learning rate, losses and intervals of a training run."""

import dataclasses
from typing import Literal

from dsv3.config.model import ModelConfig

MULTIPLE = 16
"""Widths of FP8 products must be a multiple: 16 bytes of e4m3, the stride of the GPU's copies into shared memory.

A backward contracts over the forward's outputs, so this holds for both sides of a weight.
"""


def check_fp8_widths(cfg: ModelConfig) -> None:
    """Raises ValueError with all widths of the model that FP8 products do not support."""
    wrong = [f"{name} is {width}" for name, width in linear_widths(cfg).items() if width % MULTIPLE]
    if wrong:
        raise ValueError(
            f"FP8 products need widths in multiples of {MULTIPLE}, but {', '.join(wrong)}; change the model, or train "
            "without fp8_products"
        )


def linear_widths(cfg: ModelConfig) -> dict[str, int]:
    """Returns the input and output widths of linear layers and experts, by the model's settings."""
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


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Settings of one run. Lengths are in tokens, intervals in training steps.

    A run has `steps` training steps. Each takes `batch_size` rows of `sequence_length` tokens. In the last `chat_steps`
    steps, `chat_fraction` of the rows are conversations; the others are plain text. The learning rate rises linearly
    over `warmup_steps`, then follows a cosine down to `final_rate_fraction` of its peak. `mtp_weight` is lambda of the
    DeepSeek-V3 report (2.2), `router_bias_rate` is its gamma and `sequence_balance_weight` its alpha (2.1.2); with 0
    there is no sequence-wise auxiliary loss. With `fp8_products` linear layers and experts multiply e4m3 values in
    training, forward and backward (3.3); activations stay in `compute_dtype`, and validation does not use FP8.

    The text is the standard library `library_copies` times, each with other cuts, and the installed `packages`.

    Raises ValueError if the model has no bias-corrected routed experts, if the parts of the run exceed `steps`, or if
    FP8 products do not support the model's widths.
    """

    model: ModelConfig
    steps: int
    chat_steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    warmup_steps: int
    final_rate_fraction: float = 0.05
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    init_std: float = 0.02
    mtp_weight: float = 0.3
    router_bias_rate: float = 0.001
    sequence_balance_weight: float = 0.0
    chat_fraction: float = 0.5
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    fp8_products: bool = False
    library_copies: int = 1
    packages: tuple[str, ...] = ()
    eval_every: int = 200
    eval_batches: int = 8
    checkpoint_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model.topk_method != "noaux_tc" or not self.model.num_moe_layers:
            raise ValueError(
                f"topk_method {self.model.topk_method}, {self.model.num_moe_layers} MoE layers: only models with "
                "bias-corrected routed experts can be trained (topk_method noaux_tc)"
            )
        if not self.warmup_steps < self.steps or not 0 <= self.chat_steps <= self.steps:
            raise ValueError(
                f"{self.steps} steps are too few for {self.warmup_steps} of warm-up and {self.chat_steps} of chat"
            )
        if self.fp8_products:
            check_fp8_widths(self.model)
