"""DeepSeek-V3's architecture at 6 million parameters, trained on two CPU cores in under two hours."""

from dsv3.config.model import ModelConfig
from training.config import TrainingConfig

MODEL = ModelConfig(
    vocab_size=3072,
    hidden_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    q_lora_rank=96,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    intermediate_size=512,
    moe_intermediate_size=96,
    n_routed_experts=16,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.0,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
    max_position_embeddings=2048,
    bos_token_id=0,
    eos_token_ids=(1,),
)

TRAINING = TrainingConfig(
    model=MODEL,
    steps=4000,
    chat_steps=700,
    batch_size=8,
    sequence_length=256,
    learning_rate=2e-3,
    warmup_steps=100,
    router_bias_rate=0.003,
    compute_dtype="bfloat16",
)
