"""Writes a DeepSeek-V3 checkpoint of ours as a GGUF file, which a llama-server reads.

    pip install gguf safetensors ml_dtypes
    python benchmarks/to_gguf.py DIR FILE.gguf --type bf16|f32|q8_0

DIR is a directory that `benchmarks.cpu_peers --make` wrote, or the bundled model. It needs these packages only,
so it runs in an environment of its own. Names and shapes are those of llama.cpp's `deepseek2`; as there, norms and the
router stay float32 in every type. Layers of multi-token prediction are left out.

llama.cpp's own converter does the same, with torch and transformers, and refuses a tokenizer that it does not know.
Prompts of `cpu_peers` are token ids; text is split by a general rule here, which is not this tokenizer's own.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import ml_dtypes  # noqa: F401  numpy learns bfloat16 by it
import numpy as np
from safetensors import safe_open

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
SPECIAL_PREFIX = "<｜"


def tensors(cfg: dict, directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each tensor's name in the GGUF file and its values."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, cfg["num_hidden_layers"])
    files = [safe_open(path, "numpy") for path in sorted(directory.glob("*.safetensors"))]
    found = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def read(name: str) -> np.ndarray:
        return found[name].get_tensor(name).astype(np.float32)

    for name in found:
        theirs = names.get_name(name.replace("correction_bias", "correction.bias"), (".weight", ".bias"))
        if theirs is not None and "kv_b_proj" not in name:
            yield theirs, read(name)
    for layer in range(cfg["num_hidden_layers"]):
        ours, block = f"model.layers.{layer}.", f"blk.{layer}."
        up = read(f"{ours}self_attn.kv_b_proj.weight")
        up = up.reshape(cfg["num_attention_heads"], -1, up.shape[-1])  # [H, nope + V, R]
        keys, values = np.split(up, [cfg["qk_nope_head_dim"]], axis=1)
        yield block + "attn_k_b.weight", keys.transpose(0, 2, 1)
        yield block + "attn_v_b.weight", values
        if layer >= cfg["first_k_dense_replace"]:
            for kind in ("gate", "up", "down"):
                experts = [f"{ours}mlp.experts.{e}.{kind}_proj.weight" for e in range(cfg["n_routed_experts"])]
                yield f"{block}ffn_{kind}_exps.weight", np.stack(list(map(read, experts)))


def kind_of(name: str, values: np.ndarray, wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    """Returns the type of a tensor: as wanted, but float32 for vectors and the router."""
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    if values.ndim == 1 or "ffn_gate_inp" in name or values.shape[-1] % block:
        return gguf.GGMLQuantizationType.F32
    return wanted


SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "head_count": "num_attention_heads", "q_lora_rank": "q_lora_rank",
    "layer_norm_rms_eps": "rms_norm_eps", "rope_freq_base": "rope_theta", "rope_dimension_count": "qk_rope_head_dim",
    "vocab_size": "vocab_size", "leading_dense_block_count": "first_k_dense_replace", "kv_lora_rank": "kv_lora_rank",
    "value_length": "kv_lora_rank", "value_length_mla": "v_head_dim", "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok", "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}  # fmt: skip
"""Fields of a GGUF file, `GGUFWriter.add_*`, and those of config.json."""


def describe(writer: gguf.GGUFWriter, cfg: dict) -> None:
    """Writes the model's sizes."""
    for field, name in SIZES.items():
        if cfg.get(name) is not None:
            getattr(writer, f"add_{field}")(cfg[name])
    writer.add_head_count_kv(1)  # absorbed attention: one latent for all heads
    writer.add_key_length(cfg["kv_lora_rank"] + cfg["qk_rope_head_dim"])
    writer.add_key_length_mla(cfg["qk_nope_head_dim"] + cfg["qk_rope_head_dim"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def write_tokenizer(writer: gguf.GGUFWriter, directory: Path, cfg: dict) -> None:
    """Writes the byte-level BPE; ids that it lacks up to the vocabulary's size get names of their own."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    names = {number: name for name, number in ids.items()}
    tokens = [names.get(i, f"<{i}>") for i in range(cfg["vocab_size"])]
    kinds = [gguf.TokenType.CONTROL if t.startswith(SPECIAL_PREFIX) else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    for add, number in ((writer.add_bos_token_id, cfg["bos_token_id"]), (writer.add_eos_token_id, cfg["eos_token_id"])):
        if number is not None:
            add(number)
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=TYPES, default="bf16")
    arguments = parser.parse_args()
    cfg = json.loads((arguments.directory / "config.json").read_text())
    for field in ("rope_scaling", "quantization_config"):
        if cfg.get(field):
            parser.error(f"{field} {cfg[field]} is not written; models without it are")
    writer = gguf.GGUFWriter(arguments.file, "deepseek2")
    describe(writer, cfg)
    write_tokenizer(writer, arguments.directory, cfg)
    for name, values in tensors(cfg, arguments.directory):
        kind = kind_of(name, values, TYPES[arguments.type])
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
