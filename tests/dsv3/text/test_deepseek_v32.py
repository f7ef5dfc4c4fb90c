"""The prompts of DeepSeek-V3.2, by the rules of its checkpoint's encoder, with texts of a made-up encoder file."""

import json

import pytest

from dsv3.text.chat_template import ChatTemplate, TemplateError, ToolMessages, uses_tools
from dsv3.text.deepseek_v32 import chat_template
from dsv3.text.encoder_file import read_constants
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.text import encoders, tiny

BARE = ChatTemplate(chat_template({}), {"bos_token": tiny.BOS, "eos_token": tiny.EOS})
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}


def call(name="f", arguments="{}", id="1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result(text, id="1"):
    return {"role": "tool", "content": text, "tool_call_id": id}


def rendered(messages, thinking=False, template=BARE, **settings):
    return template.render(ToolMessages(template).prepare(messages), kwargs={"thinking": thinking}, **settings)


def test_turns():
    answer = {"role": "assistant", "content": "Hello!", "reasoning_content": "hm"}
    head = f"{tiny.BOS}Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello!{tiny.EOS}<｜User｜>Hi<｜Assistant｜>"
    assert rendered([SYSTEM, USER, answer, USER]) == head + "</think>"
    assert rendered([SYSTEM, USER, answer, USER], thinking=True) == head + "<think>"
    assert rendered([USER], add_generation_prompt=False) == f"{tiny.BOS}<｜User｜>Hi"
    begun = [USER, {"role": "assistant", "content": "Well, "}]
    settings = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(begun, **settings) == f"{tiny.BOS}<｜User｜>Hi<｜Assistant｜></think>Well, "
    assert rendered(begun, thinking=True, **settings).endswith("<｜Assistant｜><think></think>Well, ")


def test_tools_and_the_response_format_follow_the_system_message(tmp_path):
    constants = read_constants(encoders.write(tmp_path, "encoding_dsv32.py", encoders.V32))
    full = ChatTemplate(chat_template(constants), {"bos_token": tiny.BOS, "eos_token": tiny.EOS})
    shown = json.dumps(TOOL["function"], ensure_ascii=False)
    wanted = {"tools": [TOOL, TOOL], "response_format": {"type": "object"}, "template": full}
    texts = f"\n\nUse <｜DSML｜function_calls>.\n{shown}\n{shown}\nThat is all.\n"
    texts += '\n\nForm {"type": "object"} is ｜DSML｜ {}'
    assert rendered([SYSTEM, USER], **wanted) == f"{tiny.BOS}Be brief.{texts}<｜User｜>Hi<｜Assistant｜></think>"
    assert rendered([USER], **wanted) == f"{tiny.BOS}{texts}<｜User｜>Hi<｜Assistant｜></think>"
    for name, value in wanted.items():
        if name != "template":
            with pytest.raises(
                TemplateError, match=f"{name}: there is no .*; copy encoding/encoding_dsv32.py of the published"
            ):
                rendered([USER], **{name: value})


@pytest.mark.parametrize("thinking", [False, True])
def test_calls_and_results(thinking):
    """Results come in any order; reasoning between calls stays in the prompt only with thinking on."""
    arguments = {"city": "日本", "days": [1, {"a": None}], "n": 2}
    calls = calling(call("f", json.dumps(arguments), "a"), call("g", "", "b"), reasoning_content="hm")
    prompt = rendered([USER, calls, result("second", "b"), result("first", "a")], thinking=thinking)
    assert prompt == (
        f"{tiny.BOS}<｜User｜>Hi<｜Assistant｜>{'<think>hm</think>' if thinking else '</think>'}\n\n"
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="city" string="true">日本</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, {"a": null}]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
        f"{tiny.EOS}\n\n<function_results>\n<result>first</result>\n<result>second</result>\n</function_results>\n\n"
        f"{'<think>' if thinking else '</think>'}"
    )


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([USER, calling(call(), call(id="2")), result("x")], "1 results of 2"),
        ([USER, calling(call(), call(id="2")), result("x"), USER], "1 results of 2"),
        ([USER, calling(call()), result("x"), result("y", "2")], "more results"),
        ([USER, result("x")], "more results"),
        ([USER, calling(call(arguments="[1]"))], "not a JSON object"),
        ([USER, calling(call(arguments='{"cut'))], "not a JSON object"),
        ([USER, calling(call(arguments="[" * 100_000))], "not a JSON object"),
        ([USER, {"role": "assistant", "content": "no reasoning"}], "reasoning_content"),
        ([{"role": "robot", "content": "x"}], "unknown role"),
    ],
)
def test_invalid_conversations_are_refused(messages, word):
    with pytest.raises(TemplateError, match=word):
        rendered(messages, thinking=True)


def test_the_template_is_selected_by_the_model_type(tmp_path):
    directory = tiny.write(tmp_path)
    config = {name: value for name, value in tiny.config().items() if name != "chat_template"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    assert Tokenizer.from_directory(directory).chat_template is None
    (directory / "config.json").write_text('{"model_type": "deepseek_v32"}')
    assert Tokenizer.from_directory(directory).chat_template == chat_template({})
    path = encoders.write(directory, "encoding_dsv32.py", encoders.V32)
    assert Tokenizer.from_directory(directory).chat_template == chat_template(read_constants(path)) != chat_template({})
    tiny.write(tmp_path)
    assert Tokenizer.from_directory(directory).chat_template == tiny.CHAT_TEMPLATE
    assert uses_tools(chat_template({})) and not uses_tools(tiny.CHAT_TEMPLATE)
