"""Makes the golden data of DeepSeek-V4: two small random checkpoints, and what transformers computes with them.

Run where transformers 5.23, a CPU torch and safetensors are installed (CI needs none of them):

    python tests/golden/make_deepseek_v4.py [MEMBER ...]

`deepseek_v4` has the published form: `compress_ratios` of 0, 4 and 128, FP8 blocks with e8m0 scales, FP4 experts.
`deepseek_v4_plain` has the configuration that transformers writes, with a heavy ratio of 8, and bfloat16 weights. Both
have the published names of tensors. Each directory has `golden.npz`: `input_ids`, float32 `logits`, and `greedy`, 16
tokens behind each of 32 prompts (`prompts`, padded with -1). The oracle is transformers' class in float32, on weights
that the files hold exactly. What transformers leaves at zero (the table of experts, sinks, biases) is random here.

A choice of index entries or experts that rounding could change would make the data useless, so a prompt that has one,
or whose greedy text has no clear winner, is drawn again.
"""

import copy
import json
import pathlib
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

HERE = pathlib.Path(__file__).parent
PROMPTS, TOKENS = 32, 16
E4M3_MAX, E2M1_MAX, BLOCK, GROUP = 448.0, 6.0, 128, 32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# float32 moves index scores by up to 4e-5 of a row's largest, and scores of experts by far less.
LEAST_GAP, LEAST_MARGIN = 1e-4, 5e-3
Tensors = dict[str, torch.Tensor]

SHAPE = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 32,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 8,
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_hash_layers": 2,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "o_groups": 2,
    "o_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-6,
    # The original context is short, so that the frequencies that YaRN changes carry most positions.
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 8,
    "swiglu_limit": 1.5,  # low enough for such small values to reach
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "vocab_size": 64,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 4, 128, 4, 128, 4],
}
QUANTIZED = {
    "expert_dtype": "fp4",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [BLOCK, BLOCK],
    },
}
PLAIN = {"compress_ratios": [128, 4, 0, 4], "num_hidden_layers": 4, "num_hash_layers": 1, "index_topk": 6}
PLAIN |= {"moe_intermediate_size": 32}
HEAVY = 8
AROUND_HEAVY = (120, 126, 127, 128, 129, 160, 200, 240, 256)
# Lengths of prompts, and of the sequence whose logits are kept: each up to a few compressed entries, then sparser.
MEMBERS = {
    "deepseek_v4": ([*range(1, 11), 12, 15, 16, 17, 20, 31, 33, 40, 50, 64, 80, 100, 112, *AROUND_HEAVY], 288),
    "deepseek_v4_plain": ([*range(1, 17), *range(18, 50, 2)], 96),
}


class Weights:
    """Draws tensors by name, as the checkpoint stores them (`stored`) and as the oracle takes them (`plain`)."""

    def __init__(self, seed: int, quantized: bool):
        self.rng, self.quantized = np.random.default_rng(seed), quantized
        self.stored: Tensors = {}
        self.plain: Tensors = {}

    def normal(self, std: float, *shape: int, mean: float = 0.0) -> torch.Tensor:
        return torch.from_numpy(self.rng.normal(mean, std, shape).astype(np.float32))

    def add(self, name: str, value: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        self.stored[name] = value.to(dtype)
        self.plain[name] = self.stored[name].float() if dtype.is_floating_point else self.stored[name]

    def linear(self, name: str, out: int, width: int, gain: float = 1.0) -> None:
        """Adds a product that is FP8 in the published form."""
        weight = self.normal(gain * width**-0.5, out, width)
        if not self.quantized:
            return self.add(f"{name}.weight", weight)
        blocks = [rows.split(BLOCK, 1) for rows in weight.split(BLOCK, 0)]
        scales = torch.tensor([[power_above(b.abs().max() / E4M3_MAX) for b in row] for row in blocks])
        spread = scales.repeat_interleave(BLOCK, 0)[:out].repeat_interleave(BLOCK, 1)[:, :width]
        self.stored[f"{name}.weight"] = (weight / spread).to(torch.float8_e4m3fn)
        self.stored[f"{name}.scale"] = scales.to(torch.float8_e8m0fnu)
        self.plain[f"{name}.weight"] = self.stored[f"{name}.weight"].float() * spread

    def expert(self, name: str, out: int, width: int, gain: float = 1.0) -> None:
        """Adds a product that is FP4 in the published form: two codes in a byte, the low one first."""
        weight = self.normal(gain * width**-0.5, out, width)
        if not self.quantized:
            return self.add(f"{name}.weight", weight)
        groups = weight.reshape(out, -1, GROUP)
        scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1) / E2M1_MAX)))
        scaled = (groups / scales[..., None]).reshape(out, width)
        codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
        value = torch.where(scaled < 0, -1.0, 1.0) * E2M1[codes]
        codes = codes + 8 * (scaled < 0)
        packed = codes[:, 0::2] + 16 * codes[:, 1::2]
        self.stored[f"{name}.weight"] = packed.to(torch.uint8).view(torch.int8)
        self.stored[f"{name}.scale"] = scales.to(torch.float8_e8m0fnu)
        self.plain[f"{name}.weight"] = value * scales.repeat_interleave(GROUP, 1)


def power_above(value: torch.Tensor) -> float:
    return float(torch.exp2(torch.ceil(torch.log2(value))))


def draw(seed: int, c: dict, heavy: int, quantized: bool) -> Weights:
    """Draws a model in which every part matters."""
    w, D, V, n = Weights(seed, quantized), c["hidden_size"], c["vocab_size"], c["hc_mult"]
    exact = torch.float32
    w.add("embed.weight", w.normal(1, V, D))
    w.add("head.weight", w.normal(8 * D**-0.5, V, D))
    w.add("norm.weight", w.normal(0.2, D, mean=1))
    w.add("hc_head_fn", w.normal((n * D) ** -0.5, n, n * D), exact)
    w.add("hc_head_base", w.normal(1, n), exact)
    w.add("hc_head_scale", w.normal(0.2, 1, mean=1), exact)
    for layer, ratio in enumerate(c["compress_ratios"][: c["num_hidden_layers"]]):
        p = f"layers.{layer}."
        for site in ("attn", "ffn"):
            w.add(f"{p}{site}_norm.weight", w.normal(0.2, D, mean=1))
            w.add(f"{p}hc_{site}_fn", w.normal((n * D) ** -0.5, n * (n + 2), n * D), exact)
            w.add(f"{p}hc_{site}_base", mixing_base(w, n), exact)
            w.add(f"{p}hc_{site}_scale", w.normal(0.2, 3, mean=1), exact)
        draw_attention(w, f"{p}attn.", c, heavy if ratio == 128 else ratio)
        draw_experts(w, f"{p}ffn.", c, layer < c["num_hash_layers"])
    return w


def mixing_base(w: Weights, n: int) -> torch.Tensor:
    """Draws the bases of one place: what goes between streams is near a cycle, whose transpose is another one."""
    order = w.rng.permutation(n)
    mixed = w.normal(0.3, n, n)
    mixed[order, np.roll(order, 1)] += 2.5
    return torch.cat([w.normal(1, 2 * n), mixed.reshape(-1)])


def draw_attention(w: Weights, p: str, c: dict, ratio: int) -> None:
    D, H, R, d, G = (c[k] for k in ("hidden_size", "num_attention_heads", "q_lora_rank", "head_dim", "o_groups"))
    w.add(f"{p}attn_sink", w.normal(0.7, H, mean=1.5), torch.float32)
    w.linear(f"{p}wq_a", R, D)
    w.add(f"{p}q_norm.weight", w.normal(0.2, R, mean=1))
    w.linear(f"{p}wq_b", H * d, R)
    w.linear(f"{p}wkv", d, D)
    w.add(f"{p}kv_norm.weight", w.normal(0.3, d, mean=1.5))
    w.linear(f"{p}wo_a", G * c["o_lora_rank"], H * d // G, 2)
    w.linear(f"{p}wo_b", D, G * c["o_lora_rank"])
    if ratio:
        draw_compressor(w, f"{p}compressor.", D, d, ratio)
    if ratio == 4:
        Hi, Y = c["index_n_heads"], c["index_head_dim"]
        w.linear(f"{p}indexer.wq_b", Hi * Y, R)
        w.add(f"{p}indexer.weights_proj.weight", w.normal(D**-0.5, Hi, D))
        draw_compressor(w, f"{p}indexer.compressor.", D, Y, ratio)


def draw_compressor(w: Weights, p: str, D: int, d: int, ratio: int) -> None:
    width = d * (2 if ratio == 4 else 1)
    w.add(f"{p}wkv.weight", w.normal(D**-0.5, width, D))
    w.add(f"{p}wgate.weight", w.normal(1.5 * D**-0.5, width, D))
    w.add(f"{p}ape", w.normal(1, ratio, width), torch.float32)
    w.add(f"{p}norm.weight", w.normal(0.3, d, mean=1.5))


def draw_experts(w: Weights, p: str, c: dict, hashed: bool) -> None:
    D, E, I, V = (c[k] for k in ("hidden_size", "n_routed_experts", "moe_intermediate_size", "vocab_size"))  # noqa: E741
    w.add(f"{p}gate.weight", w.normal(2 * D**-0.5, E, D))
    if hashed:
        table = w.rng.permuted(np.tile(np.arange(E), (V, 1)), axis=1)[:, : c["num_experts_per_tok"]]
        w.add(f"{p}gate.tid2eid", torch.from_numpy(table.copy()), torch.int64)
    else:
        w.add(f"{p}gate.bias", w.normal(0.3, E), torch.float32)
    for part, add in [*((f"experts.{e}", w.expert) for e in range(E)), ("shared_experts", w.linear)]:
        add(f"{p}{part}.w1", I, D, 1.5)
        add(f"{p}{part}.w2", D, I, 1.5)
        add(f"{p}{part}.w3", I, D, 1.5)


def oracle(config: DeepseekV4Config, plain: Tensors) -> DeepseekV4ForCausalLM:
    config = copy.deepcopy(config)
    config._experts_implementation = config._attn_implementation = "eager"
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        None, config=config, state_dict=dict(plain), dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


class Choices:
    """Watches every choice that a model makes, and keeps the smallest gap between what is in and what is out."""

    def __init__(self, model: torch.nn.Module, ratio: int):
        self.model, self.gap, self.ratio = model, np.inf, ratio
        for module in model.modules():
            name = type(module).__name__
            if name == "DeepseekV4IndexerScorer":
                module.register_forward_hook(lambda m, _, scores: self.entries(scores[0]))
                self.entries_chosen = model.config.index_topk
            if name == "DeepseekV4TopKRouter":
                module.register_forward_hook(lambda m, _, out: self.experts(m, out[0]))

    def entries(self, scores: torch.Tensor) -> None:
        for t, row in enumerate(scores):
            self.see(row[: (t + 1) // self.ratio], self.entries_chosen)

    def experts(self, router: torch.nn.Module, logits: torch.Tensor) -> None:
        for row in router.score_fn(logits) + router.e_score_correction_bias:
            self.see(row, router.top_k)

    def see(self, row: torch.Tensor, chosen: int) -> None:
        if len(row) > chosen:
            best = row.topk(chosen + 1).values
            self.gap = min(self.gap, float((best[-2] - best[-1]) / row.abs().max()))


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Returns a prompt with what greedy decoding makes of it, and the smallest margin met on the way."""
    ids, margin = prompt, np.inf
    for _ in range(TOKENS):
        best = model(ids[None], use_cache=False).logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        if margin < LEAST_MARGIN:
            break
        ids = torch.cat([ids, best.indices[:1]])
    return ids, margin


@torch.no_grad()
def clear(choices: Choices, rng: np.random.Generator, length: int, more: bool) -> torch.Tensor:
    """Draws tokens until no choice is near a tie; with `more`, what greedy decoding adds to them included."""
    model = choices.model
    for _ in range(200):
        ids = torch.from_numpy(rng.integers(2, model.config.vocab_size, length))
        ids, margin = greedy(model, ids) if more else (ids, np.inf)
        choices.gap = np.inf
        if margin >= LEAST_MARGIN:
            model(ids[None], use_cache=False)
            if choices.gap >= LEAST_GAP:
                return ids
    raise SystemExit(f"{length} tokens: no draw without a near-tie")


@torch.no_grad()
def make(name: str) -> None:
    lengths, known = MEMBERS[name]
    quantized = name == "deepseek_v4"
    published = SHAPE | (QUANTIZED if quantized else PLAIN)
    settings = {k: v for k, v in published.items() if k not in QUANTIZED}
    config = DeepseekV4Config(**copy.deepcopy(settings))
    if not quantized:
        config.compress_rates["heavily_compressed_attention"] = HEAVY
    weights = draw(0, published, 128 if quantized else HEAVY, quantized)
    model, rng = oracle(config, weights.plain), np.random.default_rng(1)
    choices = Choices(model, config.compress_rates["compressed_sparse_attention"])
    prompts, chosen = np.full((PROMPTS, max(lengths)), -1, np.int16), np.zeros((PROMPTS, TOKENS), np.int16)
    for row, length in enumerate(lengths):
        ids = clear(choices, rng, length, True).numpy()
        prompts[row, :length], chosen[row] = ids[:length], ids[length:]
    ids = clear(choices, rng, known, False)[None]
    logits = model(ids, use_cache=False).logits.numpy()
    exact = copy.deepcopy(model).double()(ids, use_cache=False).logits.numpy()
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    file = directory / "model.safetensors"
    save_file({n: t.contiguous() for n, t in weights.stored.items()}, file, {"format": "pt"})
    file.chmod(0o644)
    if not quantized:
        saved = config.to_dict() | {"dtype": "bfloat16", "architectures": SHAPE["architectures"]}
        published = {k: v for k, v in saved.items() if not k.startswith("_")}
    (directory / "config.json").write_text(json.dumps(published, indent=2, sort_keys=True) + "\n")
    golden = {"input_ids": ids.numpy().astype(np.int32), "logits": logits, "prompts": prompts, "greedy": chosen}
    np.savez_compressed(directory / "golden.npz", **golden)
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    print(f"{name}: |logits| <= {np.abs(exact).max():.1f}, float32 error {error:.1e}, "
          f"{len(np.unique(chosen))} distinct tokens")  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    for member in sys.argv[1:] or MEMBERS:
        make(member)
