"""Makes `saved/`: what transformers' `save_pretrained` writes of each family, without the numbers.

Run where transformers 5.24 or newer, a CPU torch and safetensors are installed (CI needs none of them):

    python tests/golden/make_saved.py [FAMILY ...]

A file of `saved/` has all that `config.json` says after a model was made of a published configuration, as these
directories have it at a small size, and saved again; each tensor's type and shape; and of a family that is published
in FP8 the settings that transformers writes for it. `tests/dsv3/test_saved_by_transformers.py` reads each.
"""

import json
import pathlib
import sys
import tempfile

import torch
import transformers
from safetensors import safe_open
from transformers import FineGrainedFP8Config

HERE = pathlib.Path(__file__).parent
# Fewer experts than the golden models: their names are most of a file.
SMALL = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
ONE_GROUP = SMALL | {"n_group": 1}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "patch_size": 4}
PIXTRAL |= {"num_attention_heads": 2, "image_size": 8}
MOON = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 2}
MOON |= {"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2}

# Each family: where its published configuration is, transformers' class, and what is smaller than there. Kimi-K2, which
# transformers does not know, is DeepSeek-V3's code.
FAMILIES: dict[str, tuple[str, str, dict]] = {
    "deepseek_v2": ("deepseek_v2", "DeepseekV2ForCausalLM", SMALL),
    "deepseek_v2_lite": ("deepseek_v2_lite", "DeepseekV2ForCausalLM", ONE_GROUP),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3ForCausalLM", SMALL),
    "deepseek_v31": ("deepseek_v31", "DeepseekV3ForCausalLM", SMALL),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32ForCausalLM", SMALL),
    "moonlight": ("moonlight", "DeepseekV3ForCausalLM", ONE_GROUP),
    "kimi_k2": ("kimi_k2", "DeepseekV3ForCausalLM", ONE_GROUP | {"model_type": "deepseek_v3"}),
    "kimi_k25": ("kimi_k25", "Kimi_K25ForConditionalGeneration", ONE_GROUP),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", ONE_GROUP),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsaForCausalLM", ONE_GROUP),
    "axk1": ("axk1", "AXK1ForCausalLM", SMALL),
    "mistral3": ("mistral4", "Mistral3ForConditionalGeneration", ONE_GROUP),
    "mistral4": ("mistral4", "Mistral4ForCausalLM", ONE_GROUP),
}


def configuration(name: str) -> dict:
    """The published configuration of a family at a size of no use."""
    directory, oracle, smaller = FAMILIES[name]
    config = json.loads((HERE / directory / "config.json").read_text())
    if "ForCausalLM" in oracle and "text_config" in config:
        config = config["text_config"]
    text = config.get("text_config", config)
    text |= smaller
    for part in (config, text):  # a model that is saved as it was trained has plain weights
        part.pop("quantization_config", None)
    if "vision_config" in config:
        config["vision_config"] = PIXTRAL if name == "mistral3" else MOON
    return config | {"architectures": [oracle]}


def make(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, saved = pathlib.Path(folder), pathlib.Path(folder) / "saved"
        (source / "config.json").write_text(json.dumps(configuration(name)))
        config = transformers.AutoConfig.from_pretrained(source)
        model = getattr(transformers, FAMILIES[name][1])(config).to(torch.bfloat16)
        model.save_pretrained(saved)
        with safe_open(saved / "model.safetensors", "pt") as file:
            slices = {tensor: file.get_slice(tensor) for tensor in sorted(file.keys())}
            tensors = {tensor: [each.get_dtype(), each.get_shape()] for tensor, each in slices.items()}
        content = {"config": json.loads((saved / "config.json").read_text()), "tensors": tensors}
    published = json.loads((HERE / FAMILIES[name][0] / "config.json").read_text())
    if "quantization_config" in published:  # FP8 is written on a GPU alone, and this is what is written of it
        content["quantization_config"] = FineGrainedFP8Config.from_dict(published["quantization_config"]).to_dict()
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in content.items())
    (HERE / "saved" / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    (HERE / "saved").mkdir(exist_ok=True)
    for each in sys.argv[1:] or FAMILIES:
        make(each)
