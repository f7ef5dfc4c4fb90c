import json
import threading
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from dsv3.text.tokenizer import Tokenizer, TokenizerError, TokenizerNotFound
from tests.dsv3.text import tiny

BACKEND = tiny.backend()
TOKENIZER = Tokenizer(BACKEND, tiny.config())


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40), st.booleans())
def test_decode_equals_the_library(ids, skip):
    assert TOKENIZER.decode(ids, skip) == BACKEND.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=60))
def test_round_trip(text):
    if any(marker in text for marker in tiny.SPECIAL):
        return
    try:
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    except TokenizerError:
        assert any(0xD800 <= ord(c) < 0xE000 for c in text)


def test_bos_is_added_once():
    bos = TOKENIZER.bos_token_id
    plain = TOKENIZER.encode("def", add_special_tokens=False)
    assert bos not in plain
    assert TOKENIZER.encode("def") == [bos, *plain]
    assert TOKENIZER.encode(tiny.BOS + "def") == [bos, *plain]


def test_bos_of_a_post_processor_is_not_doubled():
    backend = tiny.backend()
    bos = backend.token_to_id(tiny.BOS)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{tiny.BOS} $A", special_tokens=[(tiny.BOS, bos)]
    )
    undecided = {k: v for k, v in tiny.config().items() if k != "add_bos_token"}
    for settings_ in (undecided, tiny.config()):
        tokenizer = Tokenizer(backend, settings_)
        assert tokenizer.encode(tiny.BOS + "x")[:2] == [bos, *TOKENIZER.encode("x", False)]
        assert tokenizer.encode("x") == [bos, *TOKENIZER.encode("x", False)]
    assert bos not in Tokenizer(backend, undecided | {"add_bos_token": False}).encode("x")


def test_lone_surrogate_is_refused():
    with pytest.raises(TokenizerError, match="surrogate"):
        TOKENIZER.encode("a\ud800b")


def test_unknown_ids_are_empty():
    assert TOKENIZER.decode([10**6, *TOKENIZER.encode("ab", False)]) == "ab"


def test_from_directory(tmp_path):
    with pytest.raises(TokenizerNotFound, match="token ids"):
        Tokenizer.from_directory(tmp_path)
    tokenizer = Tokenizer.from_directory(tiny.write(tmp_path))
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    assert tokenizer.encode("def add") == TOKENIZER.encode("def add")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert Tokenizer.from_directory(tmp_path).chat_template == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: .* can't decode"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 200_000)
    with pytest.raises(TokenizerError, match="nested too deeply"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: this file is a git-lfs pointer: run git lfs pull"):
        Tokenizer.from_directory(tmp_path)


def test_other_decoders_are_refused():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.Metaspace()
    with pytest.raises(TokenizerError, match="Metaspace"):
        Tokenizer(backend, {})


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["def ", " x", "  ", "\n", "return", "🙂", "é", "日本", tiny.BOS]), max_size=2000))
def test_a_text_that_fits_never_exceeds_the_limit(parts):
    """Cuts parts at any position, which are as short as the argument about them allows."""
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsv3.text.tokenizer._PART_CHARS", 1)
        assert not TOKENIZER.surely_exceeds(text, len(TOKENIZER.encode(text, False)))
        assert TOKENIZER.surely_exceeds("abc " * 4096, 1000)


def test_encoding_a_huge_text_leaves_other_threads_running():
    """The interpreter lock is released: the main thread runs while a worker encodes."""
    worker = threading.Thread(target=TOKENIZER.encode, args=("hello world " * 60_000,))
    worker.start()
    ticks = 0
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 5
