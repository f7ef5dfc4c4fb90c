"""The tokenizer: every text survives it, special tokens have fixed ids, the template renders DeepSeek's form."""

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dsv3.training import tokenizer as tk

TEXTS = ["def f(x):\n    return x\n", 'class Größe:\n    """Länge."""\n', "for i in range(10):\n\tprint(i)\n"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tk.train_tokenizer(TEXTS, 290)


@given(text=st.text())
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_fixed_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(t) for t in tk.SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert (tk.BOS, tk.EOS) == ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")


def test_the_file_adds_no_token_by_itself(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("def").ids == tokenizer.encode("def", add_special_tokens=False).ids


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="give more text"):
        tk.train_tokenizer(["abc"], 400)


def render(messages: list[dict[str, str]], **options: bool) -> str:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    config = tk.tokenizer_config(128)
    template = jinja2.Environment().from_string(config["chat_template"])
    tokens = {name: config[name]["content"] for name in ("bos_token", "eos_token")}
    return template.render(messages=messages, raise_exception=refuse, **tokens, **options)


def test_template_puts_system_first_and_ends_answers_with_eos() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q1"},
        {"role": "assistant", "content": "A1"},
        {"role": "user", "content": "Q2"},
    ]
    expected = f"{tk.BOS}S{tk.USER}Q1{tk.ASSISTANT}A1{tk.EOS}{tk.USER}Q2"
    assert render(messages) == expected
    assert render(messages, add_generation_prompt=True) == expected + tk.ASSISTANT


def test_template_refuses_an_unknown_role() -> None:
    with pytest.raises(jinja2.TemplateError, match="not tool"):
        render([{"role": "tool", "content": "x"}])


def test_training_conversations_are_what_the_template_renders(tokenizer: Tokenizer) -> None:
    text = render([{"role": "user", "content": "f?"}, {"role": "assistant", "content": "def f(x)"}])
    assert tk.encode_chat(tokenizer, "f?", "def f(x)") == tokenizer.encode(text, add_special_tokens=False).ids
