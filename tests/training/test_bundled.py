"""The bundled model: its configuration, loss and answers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv3
from configs.bundled import MODEL
from dsv3.checkpoint import load_params
from dsv3.config.hugging_face import load_config
from dsv3.model.forward import ForwardOutput, forward
from dsv3.model.params import Params
from dsv3.text.chat_template import ChatTemplate
from dsv3.text.tokenizer import Tokenizer
from training import corpus
from training.loss import main_loss
from training.tokenizer import BOS_ID, EOS_ID

BUNDLED = Path(dsv3.__file__).parent / "bundled"
MAX_BYTES = 24 * 2**20
HELD_OUT = "sched.py"
LOSS_BOUND = 3.4
"""Nats per token; the model card states the loss over all held-out text."""
LENGTH = 128


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(BUNDLED, load_config(BUNDLED), dtype=jnp.float32, progress=False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(BUNDLED)


def continuation(params: Params, ids: list[int], count: int) -> list[int]:
    """Returns the greedy continuation, up to eos or `count` tokens."""
    start = len(ids)
    while len(ids) < start + count and ids[-1] != EOS_ID:
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(ids)] = ids
        ids = [*ids, int(np.asarray(_forward(params, row).logits)[0, len(ids) - 1].argmax())]
    return ids[start:]


@jax.jit
def _forward(params: Params, row: jax.Array) -> ForwardOutput:
    """Compiles one program for all tests: a row of `LENGTH` tokens."""
    return forward(params, MODEL, row)


def test_directory_is_small_and_describes_the_bundled_configuration() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file()) < MAX_BYTES
    assert load_config(BUNDLED) == MODEL


def test_loss_on_held_out_text(params: Params, tokenizer: Tokenizer) -> None:
    path = corpus.standard_library() / HELD_OUT
    assert corpus.is_held_out(HELD_OUT)
    ids = tokenizer.encode(path.read_text(), add_special_tokens=False)
    rows = np.asarray(ids[: 8 * (LENGTH - 1)], np.int32).reshape(8, LENGTH - 1)
    tokens = np.concatenate([np.full((8, 1), BOS_ID, np.int32), rows], axis=1)
    loss = np.mean([main_loss(_forward(params, row[None]), row[None]) for row in tokens])
    assert loss < LOSS_BOUND, f"{loss} nats per token"


@pytest.mark.parametrize("question", ["Hello", "Who are you?", "What does json.dumps do?"])
def test_a_question_is_answered_and_the_answer_ends(params: Params, tokenizer: Tokenizer, question: str) -> None:
    template = ChatTemplate(tokenizer.chat_template or "", tokenizer.special_tokens)
    prompt = template.render([{"role": "user", "content": question}])
    answer = continuation(params, tokenizer.encode(prompt, add_special_tokens=False), 90)
    assert answer[-1] == EOS_ID
    assert len(answer) > 3
