"""The MTP modules compute what transformers' `MtpLayer` does: hidden states and logits, whole and served."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import ModelConfig
from dsv3.model import PAGE_SIZE, DecodeBatch, Params, PrefillBatch, StepOutput, logits, mtp
from dsv3.model.decoder import LayerContext
from dsv3.model.layers.attention import LatentAttention
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.rope import rotation
from dsv3.model.layers.uncached_attention import causal_attend
from dsv3.model.steps import predict
from tests.dsv3.model.golden import data, model, relative_error, run

MEMBER = "deepseek_v3"
TOKENS = 70  # `CHAINED_AT` of make_golden.py: six tokens on the second page
CHUNK = 64
POOL, PAGES = 5, [3, 1]
TOLERANCE = 1e-4


def test_the_modules_read_the_hidden_states_after_the_final_norm() -> None:
    params, cfg = model(MEMBER)
    golden = data(MEMBER)
    assert relative_error(run(params, cfg, golden["input_ids"]).hidden[:1], golden["hidden"]) < TOLERANCE


def test_hidden_states_of_each_module() -> None:
    """The second reads those of the first after its own norm."""
    params, cfg = model(MEMBER)
    golden = data(MEMBER)
    hidden, tokens = golden["hidden"][0], golden["input_ids"][0]
    for depth in range(2):
        length = len(tokens) - 1 - depth
        hidden = predicted(cfg, depth)(params, hidden[:length], tokens[depth + 1 :])
        assert relative_error(hidden, golden[f"mtp_hidden_{depth}"][0]) < TOLERANCE


@functools.cache
def predicted(cfg: ModelConfig, depth: int):
    def predict(params: Params, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(len(tokens), dtype=jnp.int32)
        valid = jnp.ones(len(tokens), bool)
        attention = LatentAttention(cfg, rotation(cfg, positions), causal_attend(cfg, 1, Numerics()))
        context = LayerContext(cfg, attention, valid, Numerics())
        return mtp.predict(params, context, depth, hidden, tokens, None)[0]

    return jax.jit(predict)


def test_chained_drafts_of_the_served_steps() -> None:
    """A prompt in two chunks, then drafts from the module's own hidden states, in pages."""
    golden = data(MEMBER)
    served = Served()
    tokens, hidden = golden["input_ids"][0], golden["hidden"][0]
    for start in range(0, TOKENS, CHUNK):
        rows = slice(start, min(start + CHUNK, TOKENS))
        state = served.prefill(start, hidden[rows], tokens[rows.start + 1 : rows.stop + 1])
    assert relative_error(served.prompt, golden["mtp_hidden_0"][0, :TOKENS]) < TOLERANCE
    wanted = golden["chained_hidden"], golden["chained_logits"]
    for length, (hidden, scores) in enumerate(zip(*wanted, strict=True), TOKENS + 1):
        assert relative_error(state, hidden) < TOLERANCE
        assert relative_error(served.logits(state), scores) < TOLERANCE
        state = served.decode(state, scores.argmax(), length)


class Served:
    """The first module's steps for one request, whose pages hold NaN where nothing is written."""

    def __init__(self) -> None:
        self._params, self._cfg = model(MEMBER)
        cfg = self._cfg
        self._pages = {"latents": jnp.full((cfg.num_cache_layers * POOL, PAGE_SIZE, cfg.latent_dim), jnp.nan)}
        self._table = jnp.asarray([PAGES], jnp.int32)
        self._prefill = jax.jit(lambda p, batch, pages, hidden: predict(p, cfg, batch, pages, hidden))
        self._decode = jax.jit(lambda p, batch, pages, hidden: predict(p, cfg, batch, pages, hidden))
        self.prompt = np.zeros((0, cfg.hidden_size), np.float32)

    def prefill(self, start: int, hidden: np.ndarray, following: np.ndarray) -> np.ndarray:
        """Runs a chunk that starts at `start`; returns the last row's hidden state."""
        rows = len(following)
        padded = np.full((CHUNK, hidden.shape[1]), np.nan, np.float32), np.zeros(CHUNK, np.int32)
        for whole, part in zip(padded, (hidden, following), strict=True):
            whole[:rows] = part
        ints = functools.partial(jnp.asarray, dtype=jnp.int32)
        positions = start + np.arange(CHUNK)
        batch = PrefillBatch(ints(padded[1]), ints(positions), ints([0, rows]), ints([start]), self._table)
        got = self._run(self._prefill, batch, padded[0])[:rows]
        self.prompt = np.concatenate([self.prompt, got])
        return got[-1]

    def decode(self, hidden: np.ndarray, token: int, length: int) -> np.ndarray:
        """Runs one draft behind `length - 1` tokens; returns its hidden state."""
        batch = DecodeBatch(jnp.full((1, 1), token, jnp.int32), jnp.asarray([length], jnp.int32), self._table)
        return self._run(self._decode, batch, hidden[None, None])[0, 0]

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return np.asarray(logits(self._params, self._cfg, hidden))

    def _run(self, step, batch: PrefillBatch | DecodeBatch, hidden: np.ndarray) -> np.ndarray:
        out: StepOutput = step(self._params, batch, self._pages, hidden)
        self._pages = out.pages
        return np.asarray(out.hidden)
