"""DeepSeek-V3's shapes, as in DeepGEMM's tests, at which kernels are compiled, checked and measured."""

DENSE_NK = (
    (2112, 7168),  # q_a and kv_a projections
    (576, 7168),  # kv_a projection
    (24576, 1536),  # q_b projection
    (32768, 512),  # kv_b projection
    (7168, 16384),  # output projection
    (4096, 7168),  # gate and up of an expert
    (7168, 2048),  # down of an expert
)
"""(N, K) of dense products."""

DENSE_M = (1, 64, 128, 4096)

CONTIGUOUS_GROUPS = ((4, 8192), (8, 4096))
"""(groups, expected rows of each)."""

DECODE_GROUPS = ((2, 256), (32, 12), (1, 1024), (2, 512), (4, 256), (32, 192))
"""(experts of a device, expected rows of each): DeepSeek-V3 over 144 devices with 64 tokens per micro-batch, over 8
devices with 48 tokens each, then masked shapes of DeepGEMM's published table and tests."""

INT4_GROUPS = ((48, 1), (48, 12), (48, 24), (48, 48), (48, 192))
"""(experts of a device, expected rows of each) of Kimi-K2-Thinking over 8 devices: one for each height of tiles."""

EXPERT_NK = ((4096, 7168), (7168, 2048))
"""(N, K) of an expert's products in DeepSeek-V3."""

HEADS, HEAD_WIDTH, LATENT = 128, 128, 512
"""Attention heads, channels of a head and of the latent: k_up and v_up are [heads, width, latent]."""

HEAD_TOKENS = (1, 33, 64, 128, 512)

ROUTER_NK = (256, 7168)
ROUTER_TOKENS = (1, 33, 64, 128, 130, 2048)

OTHER_NK = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
"""(N, K) of grouped products in DeepGEMM's tests."""
