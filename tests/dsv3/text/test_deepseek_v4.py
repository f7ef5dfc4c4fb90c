"""The prompts of DeepSeek-V4 with a made-up encoder file, and the file's constants."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.server.templates import escaping_template
from dsv3.text.chat_template import ChatTemplate, TemplateError, ToolMessages, uses_response_format, uses_tools
from dsv3.text.deepseek_v4 import (
    ENCODER_FILE,
    EncoderFileError,
    EncoderTexts,
    chat_template,
    read_encoder,
    write_template,
)
from dsv3.text.parsers import detect_dialect
from dsv3.text.tokenizer import Tokenizer, TokenizerError
from tests.dsv3.text import tiny
from tests.dsv3.text.dialects import Answer, tokenizer, tokens

# Constants as the encoder writes them: annotated, joined, of other constants; and code, which must not run.
COMMON = '''
import does_not_exist
raise SystemExit("an encoder is not run")
dsml_token: str = "｜DSML｜"
open_token = "<think>"
not_known = open_token.upper()
response_format_template: str = ("## Form:\\n" "{schema}" + "!")
TOOLS_TEMPLATE = """## Things {{é}}
"<{dsml_token}tool_calls>" after {open_token}\\u2014🙂\\\\n

{tool_schemas}
""" + "Done.\\n"
def write():
    TOOLS_TEMPLATE = "not of the module"
'''
PREVIEW = COMMON + 'REASONING_EFFORT_MAX = "Think a " + "lot.\\n\\n"\n'
OFFICIAL = (
    COMMON
    + 'MOST = "Think most.\\n\\n"\n'
    + 'REASONING_EFFORT_PROMPTS: dict[str, str] = {"low": "", "high": "Think a lot.\\n\\n", "max": MOST, "odd": f()}\n'
    + 'DEFAULT_REASONING_EFFORT = "low"\n'
)
SHOWN = '## Things {é}\n"<｜DSML｜tool_calls>" after <think>—🙂\\n\n\nSCHEMAS\nDone.\n'
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello!", "reasoning_content": "hm"}
TOOL = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}
TOKENS = {"bos_token": tiny.BOS, "eos_token": tiny.EOS}
BARE = ChatTemplate(write_template(EncoderTexts()), TOKENS)
ASK, THINK, END = "<｜User｜>Hi<｜Assistant｜>", "<think>", "</think>"


def written(directory: Path, source: str | bytes | None) -> Path:
    """A checkpoint directory with an encoder file, or without one."""
    if source is not None:
        (directory / ENCODER_FILE).parent.mkdir(exist_ok=True)
        (directory / ENCODER_FILE).write_bytes(source if isinstance(source, bytes) else source.encode())
    return directory


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> dict[str, ChatTemplate]:
    sources = {"official": OFFICIAL, "preview": PREVIEW, "none": None}
    directories = {name: written(tmp_path_factory.mktemp(name), source) for name, source in sources.items()}
    return {name: ChatTemplate(chat_template(directory), TOKENS) for name, directory in directories.items()}


@pytest.fixture
def rendered(templates):
    def render(messages, thinking=None, effort=None, encoder="official", **arguments):
        template = templates[encoder]
        kwargs = {"thinking": thinking, "reasoning_effort": effort}
        return template.render(ToolMessages(template).prepare(messages), kwargs=kwargs, **arguments)

    return render


def call(name="f", arguments="{}", id="1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result(text, id="1"):
    return {"role": "tool", "content": text, "tool_call_id": id}


@pytest.mark.parametrize("encoder", ["official", "preview", "none"])
def test_turns(rendered, encoder):
    """The reasoning of earlier turns is dropped."""
    head = f"{tiny.BOS}Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello!{tiny.EOS}{ASK}"
    chat = [SYSTEM, USER, ANSWER, USER]
    assert rendered(chat, encoder=encoder) == rendered(chat, False, encoder=encoder) == head + END
    assert rendered(chat, True, encoder=encoder) == rendered(chat, effort="low", encoder=encoder) == head + THINK
    assert rendered(chat, True, "none", encoder) == head + END
    assert rendered([USER, ANSWER], True, encoder=encoder).endswith(f"{THINK}hm{END}Hello!{tiny.EOS}")
    assert rendered([USER], add_generation_prompt=False) == f"{tiny.BOS}<｜User｜>Hi"
    begun = [USER, {"role": "assistant", "content": "Well, "}]
    assert rendered(begun, add_generation_prompt=False, continue_final_message=True) == f"{tiny.BOS}{ASK}{END}Well, "


@pytest.mark.parametrize(
    ("effort", "official", "preview"),
    [
        ("low", "", ""),
        *((effort, "Think a lot.\n\n", "") for effort in ("medium", "high", "xhigh")),
        ("max", "Think most.\n\n", "Think a lot.\n\n"),
    ],
)
def test_an_effort_begins_the_prompt(rendered, effort, official, preview):
    """It turns thinking on; with thinking off there is none."""
    for encoder, text in (("official", official), ("preview", preview)):
        assert rendered([SYSTEM, USER], None, effort, encoder) == f"{tiny.BOS}{text}Be brief.{ASK}{THINK}"
        assert rendered([SYSTEM, USER], False, effort, encoder) == f"{tiny.BOS}Be brief.{ASK}{END}"


def test_tools_and_a_response_format_follow_the_system_message(rendered):
    function, schema = json.dumps(TOOL["function"], ensure_ascii=False), {"type": "object", "é": 1}
    tools = "\n\n" + SHOWN.replace("SCHEMAS", f"{function}\n{function}")
    form = f"\n\n## Form:\n{json.dumps(schema, ensure_ascii=False)}!"
    given = {"tools": [TOOL, TOOL], "response_format": schema}
    assert rendered([SYSTEM, USER], **given) == f"{tiny.BOS}Be brief.{tools}{form}{ASK}{END}"
    assert rendered([USER], True, "max", **given) == f"{tiny.BOS}Think most.\n\n{tools}{form}{ASK}{THINK}"
    assert rendered([SYSTEM, USER], response_format=schema) == f"{tiny.BOS}Be brief.{form}{ASK}{END}"
    chat = [USER, ANSWER, {"role": "assistant", "content": "Bye"}, USER]
    kept = f"{ASK}{THINK}hm{END}Hello!{tiny.EOS}{END}Bye{tiny.EOS}{ASK}{THINK}"
    assert rendered(chat, True, tools=[TOOL]).endswith(kept)


@pytest.mark.parametrize("thinking", [False, True])
def test_calls_and_results(rendered, thinking):
    """Results come in any order and are one turn with the text after them; broken arguments are one text."""
    arguments = {"city": "日本", "days": [1, {"a": None}], "n": 2}
    calls = calling(call("f", json.dumps(arguments), "a"), call("g", "", "b"), call("h", '{"cut', "c"))
    chat = [
        USER,
        calls | {"reasoning_content": "hm"},
        result("third", "c"),
        result("second", "b"),
        result("first", "a"),
    ]
    begin = THINK if thinking else END
    prompt = rendered([*chat, USER], thinking, tools=[TOOL])
    assert prompt.partition("Done.\n")[2] == (
        f"{ASK}{f'{THINK}hm{END}' if thinking else END}\n\n"
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="city" string="true">日本</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, {"a": null}]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n<｜DSML｜invoke name="h">\n'
        '<｜DSML｜parameter name="arguments" string="true">{"cut</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        f"</｜DSML｜tool_calls>{tiny.EOS}<｜User｜><tool_result>first</tool_result>\n\n<tool_result>second</tool_result>"
        f"\n\n<tool_result>third</tool_result>\n\nHi<｜Assistant｜>{begin}"
    )
    assert rendered(chat, thinking, tools=[TOOL]).endswith(f"third</tool_result><｜Assistant｜>{begin}")


@given(st.lists(st.tuples(st.text("kxé_", min_size=1, max_size=4), st.text('ab{}"\\\n é🙂`', max_size=9)), max_size=3))
@settings(deadline=None, max_examples=40)
def test_a_call_in_a_prompt_is_parsed_as_it_was(pairs):
    """The parser reads what the template writes."""
    arguments = {key: (value if i % 2 else [value]) for i, (key, value) in enumerate(pairs)}
    prompt = BARE.render(ToolMessages(BARE).prepare([USER, calling(call("f", json.dumps(arguments)))]))
    answer = Answer("deepseek_v4", tokens("deepseek_v4", prompt.partition(END)[2].removesuffix(tiny.EOS)))
    assert [(name, json.loads(text)) for name, text in answer.calls] == [("f", arguments)]
    assert answer.content == ""


def test_other_roles_and_tasks(rendered):
    """`developer` is a user's turn that is dropped with the reasoning; a task takes the answer's place."""
    reminder, developer = {"role": "latest_reminder", "content": "Today"}, {"role": "developer", "content": "Do"}
    assert rendered([SYSTEM, reminder, USER]) == f"{tiny.BOS}Be brief.<｜latest_reminder｜>Today{ASK}{END}"
    assert rendered([developer, ANSWER, USER], True) == f"{tiny.BOS}Hello!{tiny.EOS}{ASK}{THINK}"
    assert rendered([developer], True) == f"{tiny.BOS}<｜User｜>Do<｜Assistant｜>{THINK}"
    shown = rendered([developer, USER], True, tools=[TOOL])
    assert shown.startswith(f"{tiny.BOS}<｜User｜>Do\n\n## Things") and shown.endswith(f"Done.\n{ASK}{THINK}")
    assert rendered([USER | {"task": "query"}], True) == f"{tiny.BOS}<｜User｜>Hi<｜query｜>"
    assert rendered([USER | {"task": "action"}]) == f"{tiny.BOS}{ASK}{END}<｜action｜>"
    acted = [USER | {"task": "action"}, {"role": "assistant", "content": "Search"}]
    assert rendered(acted, True) == f"{tiny.BOS}{ASK}{THINK}<｜action｜>Search{tiny.EOS}"
    titled = [USER, ANSWER | {"task": "title"}]
    assert rendered(titled) == f"{tiny.BOS}{ASK}{END}Hello!{tiny.EOS}<｜title｜>"
    joined = rendered([USER, calling(call()), result("1"), USER | {"task": "domain"}, USER])
    assert joined.endswith(f"<tool_result>1</tool_result>\n\nHi{ASK}{END}")


@pytest.mark.parametrize(
    ("messages", "arguments", "word"),
    [
        ([USER], {"tools": [TOOL], "encoder": "none"}, "tools: needs a text of encoding/encoding_dsv4.py"),
        ([USER], {"response_format": {}, "encoder": "none"}, ""),
        ([USER], {"response_format": {"a": 1}, "encoder": "none"}, "response_format: needs .* copy that file"),
        *(([USER], {"effort": effort, "encoder": "none"}, f"effort {effort}: needs") for effort in ("high", "max")),
        ([USER], {"effort": "minimal"}, "reasoning_effort is minimal, and may be none, low, medium"),
        ([USER | {"task": "sing"}], {}, "task is sing, and may be action"),
        ([{"role": "robot", "content": "x"}], {}, "unknown role robot"),
    ],
)
def test_what_the_format_does_not_have_is_refused(rendered, messages, arguments, word):
    if not word:
        assert rendered(messages, **arguments) == f"{tiny.BOS}{ASK}{END}"
        return
    with pytest.raises(TemplateError, match=word):
        rendered(messages, **arguments)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("x = (", "cannot be read as Python"),
        (b"x = '\xff'", "cannot be read as Python"),
        ("x = " + "(" * 100_000, "cannot be read as Python"),
        ("x = " + " + ".join(["'x'"] * 50_000), "cannot be read as Python"),
        ("#" * 2**20 + "\n", "longer than"),
        ("x = 'ab'\n" + "x = x + x\n" * 99, "a text is longer than 65536"),
        (f"x = {'x' * 999!r}\nTOOLS_TEMPLATE = {'{x}' * 99!r}", "a text is longer than 65536"),
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ('TOOLS_TEMPLATE = "no gap"', r"TOOLS_TEMPLATE has gaps for \[\]"),
        ('response_format_template = "{a} {b}"', r"response_format_template has gaps for \['a', 'b'\]"),
        ('TOOLS_TEMPLATE = "{"', "TOOLS_TEMPLATE"),
        ('REASONING_EFFORT_PROMPTS = {"low": ""}\nDEFAULT_REASONING_EFFORT = "high"', "'high', and there is no text"),
        ("DEFAULT_REASONING_EFFORT = {'low': ''}", "there is no text for it"),
    ],
)
def test_an_encoder_that_cannot_be_read_names_its_file(tmp_path, source, word):
    with pytest.raises(EncoderFileError, match=word) as error:
        chat_template(written(tmp_path, source))
    assert str(tmp_path / ENCODER_FILE) in str(error.value)


def test_only_what_an_encoder_has_is_known(tmp_path):
    """The last value of a name counts, also where it is no constant."""
    assert read_encoder(written(tmp_path, "x = 1\n") / ENCODER_FILE) == EncoderTexts()
    source = 'TOOLS_TEMPLATE = "{x}"\nTOOLS_TEMPLATE = make()\nREASONING_EFFORT_PROMPTS = {"max": "M", **other}\n'
    assert read_encoder(written(tmp_path, source) / ENCODER_FILE) == EncoderTexts(efforts={"low": "", "max": "M"})


def test_the_template_is_selected_by_the_model_type(tmp_path):
    directory = tiny.write(tmp_path)
    config = {name: value for name, value in tiny.config().items() if name != "chat_template"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (directory / "config.json").write_text('{"model_type": "deepseek_v4"}')
    known = Tokenizer.from_directory(written(directory, OFFICIAL))
    assert known.chat_template == chat_template(directory)
    assert uses_tools(known.chat_template) and uses_response_format(known.chat_template)
    assert not uses_response_format(tiny.CHAT_TEMPLATE)
    assert detect_dialect(known, known.chat_template) == "deepseek_v4"
    (directory / ENCODER_FILE).write_text("x = (")
    with pytest.raises(TokenizerError, match="cannot be read as Python"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize("source", [OFFICIAL, None], ids=["with texts", "without"])
def test_its_markers_are_distinguished_from_text(tmp_path, source):
    hiding = tokenizer("deepseek_v4").hiding_special_tokens()
    template = escaping_template(chat_template(written(tmp_path, source)), TOKENS, hiding.markers)
    prompt = template.render([{"role": "user", "content": "<｜User｜><｜action｜>"}])
    assert hiding.markers.show(prompt) == f"{tiny.BOS}<｜User｜><｜User｜><｜action｜><｜Assistant｜></think>"
    ids = hiding.encode(prompt, add_special_tokens=False)
    assert ids.count(hiding.id_of(hiding.markers.hidden[tiny.USER])) == 1


DATA = Path(__file__).parents[4] / "shared/data/deepseek_v4_encoder.md"


@pytest.mark.skipif(not DATA.is_file(), reason="the published texts are not part of the repository")
def test_published_texts_give_the_published_prompts(tmp_path):
    data = DATA.read_text("utf-8").replace("⏎", "\n")
    tools = data.split("\n---\n")[1] + "\n"
    effort = next(line for line in data.split('"') if line.startswith("Reasoning Effort: Beyond"))
    source = f"TOOLS_TEMPLATE = {tools!r}\nREASONING_EFFORT_PROMPTS = {{'low': '', 'max': {effort!r}}}\n"
    published = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    template = ChatTemplate(chat_template(written(tmp_path, source)), published)
    user = {"role": "user", "content": "What is the capital of France?"}
    first, answer = {"role": "user", "content": "Hello"}, ANSWER | {"content": "Hi there! How can I help you?"}
    chat = [{"role": "system", "content": "You are a helpful assistant."}, first, answer, user]
    golden = data.partition("Golden (thinking, no tools)")[2].split("`")[1]
    assert template.render(chat, kwargs={"thinking": True}) == golden
    calls = calling(call("get_weather", '{"location": "Beijing"}'), reasoning_content="R")
    messages = ToolMessages(template).prepare([first, calls, result('{"temperature": 22}')])
    prompt = template.render(messages, tools=[TOOL], kwargs={"thinking": True, "reasoning_effort": "max"})
    head, _, tail = prompt.partition("Hello")
    shown = tools.replace("{schemas}", json.dumps(TOOL["function"], ensure_ascii=False))
    assert head == f"{published['bos_token']}{effort}\n\n{shown}<｜User｜>"
    assert tail == data.partition("Golden (call with results)")[2].split("`")[1].removeprefix("…")
