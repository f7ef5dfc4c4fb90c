"""The tokenizer: lossless for all text, fixed special ids, and DeepSeek's chat format."""

import json

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dsv3.engine.build import bundled_model
from dsv3.text.parsers import Parsers
from dsv3.text.tokenizer import Tokenizer as TextTokenizer
from training import tokenizer as tk

TEXTS = ["def f(x):\n    return x\n", 'class Größe:\n    """Länge."""\n', "for i in range(10):\n\tprint(i)\n"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tk.train_tokenizer(TEXTS, 290)


@given(text=st.text())
def test_every_text_is_decoded_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_fixed_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(t) for t in tk.SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert (tk.BOS, tk.EOS) == ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")


def test_a_text_with_special_tokens_begins_with_bos(tokenizer: Tokenizer) -> None:
    """Other programs read only the file, so it must agree with this runtime, also for the bundled model."""
    assert tokenizer.encode("def").ids == [tk.BOS_ID, *tokenizer.encode("def", add_special_tokens=False).ids]
    own = TextTokenizer.from_directory(bundled_model())
    bundled = Tokenizer.from_file(str(bundled_model() / "tokenizer.json"))
    for text in ("hello world", "", "def f(x):\n    return x"):
        assert bundled.encode(text).ids == own.encode(text)
        assert bundled.encode(text, add_special_tokens=False).ids == own.encode(text, add_special_tokens=False)
    assert own.encode(tk.BOS + "a") == own.encode("a")


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="give more text"):
        tk.train_tokenizer(["abc"], 400)


def render(messages: list[dict], **options: object) -> str:
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
    with pytest.raises(jinja2.TemplateError, match="system, user, assistant and tool, not function"):
        render([{"role": "function", "content": "x"}])


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
SPELLED = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"at": 1}\n```<｜tool▁call▁end｜>'
TOOL = {"type": "function", "function": {"name": "look", "description": "D", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("content", ["", "Wait.", None])
def test_template_writes_calls_and_results_as_deepseek_v3_does(content: str | None) -> None:
    """Arguments may be a text or an object; the answer follows the results without a marker."""
    as_object = {"function": {"name": "look", "arguments": {"at": 1}}}
    messages: list[dict] = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": content, "tool_calls": [CALL, as_object]},
        *[{"role": "tool", "content": text} for text in "12"],
    ]
    calls = f"<｜tool▁calls▁begin｜>{SPELLED}\n{SPELLED}<｜tool▁calls▁end｜>"
    results = "<｜tool▁output▁begin｜>1<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>2<｜tool▁output▁end｜>"
    expected = f"{tk.BOS}{tk.USER}Q{tk.ASSISTANT}{content or ''}{calls}{tk.EOS}"
    expected += f"<｜tool▁outputs▁begin｜>{results}<｜tool▁outputs▁end｜>"
    assert render(messages) == render(messages, add_generation_prompt=True) == expected
    answer, question = {"role": "assistant", "content": "A"}, {"role": "user", "content": "Q2"}
    assert render([*messages, answer, question]) == f"{expected}A{tk.EOS}{tk.USER}Q2"
    assert render([*messages, question]) == f"{expected}{tk.USER}Q2"


def test_template_shows_tools_after_the_system_message() -> None:
    system, question = {"role": "system", "content": "S"}, {"role": "user", "content": "Q"}
    shown = render([system, question], tools=[TOOL])
    assert shown.startswith(f"{tk.BOS}S\n\n## Tools\n") and shown.endswith(f"{tk.USER}Q")
    assert (
        "\n### look\nDescription: D\n\nParameters: {" in shown
        and "function<｜tool▁sep｜>tool_call_name\n```json" in shown
    )
    assert render([question], tools=[TOOL]) == shown.replace(f"{tk.BOS}S", tk.BOS)
    assert render([system, question], tools=None) == render([system, question]) == f"{tk.BOS}S{tk.USER}Q"


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_template_refuses_content_that_is_not_text(role: str) -> None:
    with pytest.raises(jinja2.TemplateError, match=f"role {role} must be a text"):
        render([{"role": role, "content": None}])


def test_the_bundled_model_has_this_configuration() -> None:
    """The bundled files equal those that a run exports."""
    directory = bundled_model()
    settings = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    assert settings == tk.tokenizer_config(
        json.loads((directory / "config.json").read_text())["max_position_embeddings"]
    )


def test_the_bundled_models_calls_have_the_templates_form() -> None:
    """Its vocabulary has no marker tokens, so it writes them as text."""
    own = TextTokenizer.from_directory(bundled_model())
    assert Parsers(own, own.chat_template).dialect_name == "deepseek_v3"


def test_training_conversations_equal_the_rendered_template(tokenizer: Tokenizer) -> None:
    text = render([{"role": "user", "content": "f?"}, {"role": "assistant", "content": "def f(x)"}])
    assert tk.encode_chat(tokenizer, "f?", "def f(x)") == tokenizer.encode(text, add_special_tokens=False).ids
