"""Fixtures: a training configuration of a tiny model, and a small standard library to train on."""

from pathlib import Path

import pytest

from dsv3.config.model import ModelConfig
from training import corpus
from training.config import TrainingConfig

TOY_MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    num_nextn_predict_layers=1,
    bos_token_id=0,
    eos_token_ids=(1,),
)
# One configuration for all tests that run a step: it is what the compiled programs are kept under.
TOY = TrainingConfig(
    model=TOY_MODEL,
    steps=4,
    chat_steps=2,
    batch_size=4,
    sequence_length=32,
    learning_rate=1e-2,
    warmup_steps=1,
    final_rate_fraction=1.0,
    init_std=0.05,
    sequence_balance_weight=0.05,
    eval_every=2,
    eval_batches=1,
)

SOURCE = '''"""Module {n} of the library."""


def scale_{n}(value, factor={n}):
    """Return value times factor.

    A second paragraph.
    """
    return value * factor
'''


@pytest.fixture(scope="session")
def toy_config() -> TrainingConfig:
    return TOY


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of 200 modules in place of the standard library."""
    root = tmp_path / "library"
    (root / "package").mkdir(parents=True)
    for n in range(200):
        folder = root / "package" if n % 4 == 0 else root
        (folder / f"module{n}.py").write_text(SOURCE.format(n=n))
    monkeypatch.setattr(corpus, "standard_library", lambda: root)
    return root
