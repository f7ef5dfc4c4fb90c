"""The prompts of DeepSeek-V4, by the rules of its checkpoints' encoder, with texts of a made-up encoder file."""

import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.text import deepseek_v4
from dsv3.text.chat_template import ChatTemplate, TemplateError, ToolMessages, uses_tools
from dsv3.text.encoder_file import read_constants
from dsv3.text.parsers import Parsers
from dsv3.text.tokenizer import Tokenizer, TokenizerError, encoder_note
from tests.dsv3.text import encoders, tiny
from tests.dsv3.text.dialects import Answer, tokenizer, tokens
from tests.dsv3.text.test_deepseek_v32 import SYSTEM, TOOL, USER, call, calling, result
from tests.dsv3.text.test_parser import CALLS, SIZES

DATA = pathlib.Path(__file__).parents[4] / "shared" / "data" / "deepseek_v4_encoder.md"
BOS, EOS = tiny.BOS, tiny.EOS
ASKED, THINKING = "<｜Assistant｜></think>", "<｜Assistant｜><think>"
SCHEMA = {"type": "object", "title": "é"}
FORM = '\n\nForm {"type": "object", "title": "é"} is ｜DSML｜ {}'
SHOWN = '\n\nUse <｜DSML｜tool_calls>"é" after </think>\n' + "{schemas}\nThat is all.\n"
JSON = '{"name": "f", "description": "é", "parameters": {"type": "object"}}'
CALL = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
PARAMETER = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>'


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """The template of each profile, and of a checkpoint without an encoder file."""
    texts = {"preview": encoders.PREVIEW, "official": encoders.OFFICIAL, "bare": ""}
    directory = tmp_path_factory.mktemp("encoders")
    found = {}
    for name, text in texts.items():
        source = deepseek_v4.chat_template(read_constants(encoders.write(directory, "encoding_dsv4.py", text)))
        found[name] = ChatTemplate(source, {"bos_token": BOS, "eos_token": EOS})
    return found


@pytest.fixture
def rendered(templates):
    """Renders messages; without `thinking` or an effort the chat does not think."""

    def render(
        *messages, profile="official", tools=None, response_format=None, prompted=True, continued=False, **kwargs
    ):
        template = templates[profile]
        return template.render(
            ToolMessages(template).prepare(messages),
            tools=tools,
            response_format=response_format,
            add_generation_prompt=prompted,
            continue_final_message=continued,
            kwargs=kwargs or {"thinking": False},
        )

    return render


def answer(content="Hello!", reasoning="hm", **fields):
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, **fields}


def test_turns(rendered):
    """Only the generation thinks: what came before the last user turn is dropped."""
    head = f"{BOS}Be brief.<｜User｜>Hi{ASKED}Hello!{EOS}<｜User｜>Hi"
    chat = [SYSTEM, USER, answer(), USER]
    assert rendered(*chat) == head + ASKED
    assert rendered(*chat, thinking=True, reasoning_effort="low") == head + THINKING
    assert rendered(*chat, prompted=False) == head
    last = rendered(USER, answer(), thinking=True, reasoning_effort="low")
    assert last == f"{BOS}<｜User｜>Hi{THINKING}hm</think>Hello!{EOS}"


def test_a_final_message_is_continued(rendered):
    options = {"prompted": False, "continued": True, "reasoning_effort": "low"}
    assert rendered(USER, answer("Well, ", None), thinking=False, **options) == f"{BOS}<｜User｜>Hi{ASKED}Well, "
    assert rendered(USER, answer("Well, "), **options) == f"{BOS}<｜User｜>Hi{THINKING}hm</think>Well, "


@pytest.mark.parametrize("thinking", [False, True])
def test_with_tools_no_reasoning_is_dropped(rendered, thinking):
    prompt = rendered(SYSTEM, USER, answer(), USER, tools=[TOOL, TOOL], thinking=thinking, reasoning_effort="low")
    begun, thought = (THINKING, "hm</think>") if thinking else (ASKED, "")
    system = "Be brief." + SHOWN.replace("{schemas}", f"{JSON}\n{JSON}")
    assert prompt == f"{BOS}{system}<｜User｜>Hi{begun}{thought}Hello!{EOS}<｜User｜>Hi{begun}"


def test_tools_and_the_response_format_need_no_system_message(rendered):
    shown = SHOWN.replace("{schemas}", JSON)
    assert rendered(USER, tools=[TOOL], response_format=SCHEMA) == f"{BOS}{shown}{FORM}<｜User｜>Hi{ASKED}"
    assert rendered(SYSTEM, USER, response_format=SCHEMA) == f"{BOS}Be brief.{FORM}<｜User｜>Hi{ASKED}"


def test_calls_and_results(rendered):
    """Results are parts of one user turn with the text after them, in the order of the calls."""
    arguments = {"city": "日本", "days": [1, {"a": None}], "n": 2}
    calls = calling(call("f", json.dumps(arguments), "a"), call("f", "", "b"), call("f", '{"cut', "c"))
    results = [result("third", "c"), USER, result("second", "b"), result("first", "a")]
    parameters = [
        PARAMETER.format("city", "true", "日本"),
        PARAMETER.format("days", "false", '[1, {"a": null}]'),
        PARAMETER.format("n", "false", "2"),
    ]
    bodies = ["\n".join(parameters), "", PARAMETER.format("arguments", "true", '{"cut')]
    invocations = "\n".join(f'<｜DSML｜invoke name="f">\n{body}\n</｜DSML｜invoke>' for body in bodies)
    assert rendered(USER, calls, *results, USER) == (
        f"{BOS}<｜User｜>Hi{ASKED}\n\n<｜DSML｜tool_calls>\n{invocations}\n</｜DSML｜tool_calls>{EOS}"
        "<｜User｜><tool_result>first</tool_result>\n\nHi\n\n<tool_result>second</tool_result>\n\n"
        f"<tool_result>third</tool_result>\n\nHi{ASKED}"
    )
    for wrong in ("[1]", "7", '"x"', "[" * 100_000):
        assert CALL.format(PARAMETER.format("arguments", "true", wrong)) in rendered(USER, calling(call("f", wrong)))


def test_reasoning_before_results_is_kept_only_with_tools(rendered):
    chat = [USER, calling(call(), reasoning_content="hm"), result("x")]
    end = f"{CALL.format('')}{EOS}<｜User｜><tool_result>x</tool_result>{THINKING}"
    assert rendered(*chat, thinking=True, reasoning_effort="low") == f"{BOS}<｜User｜>Hi{ASKED}{end}"
    prompt = rendered(*chat, tools=[TOOL], thinking=True, reasoning_effort="low")
    assert prompt.endswith(f"<｜User｜>Hi{THINKING}hm</think>{end}")


@settings(deadline=None, max_examples=50)
@given(CALLS, SIZES, st.booleans())
def test_the_parser_reads_the_calls_that_the_template_writes(calls, sizes, by_id):
    template = ChatTemplate(deepseek_v4.chat_template({}), {"bos_token": BOS, "eos_token": EOS})
    written = calling(*(call(name, json.dumps(arguments)) for name, arguments in calls), reasoning_content="hm")
    prompt = template.render(ToolMessages(template).prepare([USER, written]), kwargs={"reasoning_effort": "low"})
    text = prompt.removeprefix(f"{BOS}<｜User｜>Hi{THINKING}").removesuffix(EOS)
    found = Answer("deepseek_v4", tokens("deepseek_v4", text, by_id), sizes, prompt=THINKING, by_id=by_id)
    assert (found.reasoning, found.content, found.finish_reason) == ("hm", "", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls


HARD = "Think\nhard.\n\n"


@pytest.mark.parametrize(
    ("profile", "effort", "text"),
    [
        *(("preview", effort, "") for effort in (None, "low", "medium", "high", "xhigh")),
        ("preview", "max", HARD),
        ("official", "low", ""),
        *(("official", effort, HARD) for effort in (None, "medium", "high", "xhigh")),
        ("official", "max", "｜DSML｜!\n\n"),
        ("bare", None, ""),
        ("bare", "low", ""),
    ],
)
def test_efforts(rendered, profile, effort, text):
    """The text is in front of everything, and only where the model thinks, which it does unless it must not."""
    kwargs = {"date_string": "x"} if effort is None else {"reasoning_effort": effort}
    assert rendered(SYSTEM, USER, profile=profile, **kwargs) == f"{BOS}{text}Be brief.<｜User｜>Hi{THINKING}"
    assert rendered(USER, profile=profile, enable_thinking=True, **kwargs) == f"{BOS}{text}<｜User｜>Hi{THINKING}"
    assert rendered(USER, profile=profile, enable_thinking=False, **kwargs) == f"{BOS}<｜User｜>Hi{ASKED}"


@pytest.mark.parametrize("profile", ["preview", "official", "bare"])
def test_the_effort_none_turns_thinking_off(rendered, profile):
    for kwargs in ({}, {"thinking": True}):
        assert rendered(USER, profile=profile, reasoning_effort="none", **kwargs) == f"{BOS}<｜User｜>Hi{ASKED}"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tools": [TOOL]}, "tools: there is no TOOLS_TEMPLATE; copy encoding/encoding_dsv4.py "),
        (
            {"response_format": SCHEMA},
            "response_format: there is no response_format_template; copy encoding/encoding_dsv4.py ",
        ),
        (
            {"reasoning_effort": "high"},
            "reasoning_effort: there is no REASONING_EFFORT_PROMPTS; copy encoding/encoding_dsv4.py ",
        ),
        ({"reasoning_effort": "max"}, "reasoning_effort: .*into the model directory and restart$"),
        ({"reasoning_effort": "minimal"}, "reasoning_effort: it may be none, low"),
        ({"reasoning_effort": 75}, "reasoning_effort: it may be none, low"),
    ],
)
def test_without_the_file_what_needs_its_texts_is_refused(rendered, options, word):
    with pytest.raises(TemplateError, match=word):
        rendered(USER, profile="bare", **options)
    assert rendered(SYSTEM, USER, answer(), USER, profile="bare").endswith(f"Hello!{EOS}<｜User｜>Hi{ASKED}")


def test_reminders_and_developers(rendered):
    """A developer is a user with tools; where reasoning is dropped, earlier developers are, too."""
    reminder, developer = {"role": "latest_reminder", "content": "Today."}, {"role": "developer", "content": "Do."}
    assert rendered(SYSTEM, reminder, USER) == f"{BOS}Be brief.<｜latest_reminder｜>Today.<｜User｜>Hi{ASKED}"
    shown = SHOWN.replace("{schemas}", JSON)
    assert rendered(developer | {"tools": [TOOL]}, response_format=SCHEMA) == f"{BOS}<｜User｜>Do.{shown}{FORM}{ASKED}"
    chat = [developer, answer(), developer]
    assert rendered(*chat) == f"{BOS}<｜User｜>Do.{ASKED}Hello!{EOS}<｜User｜>Do.{ASKED}"
    assert rendered(*chat, reasoning_effort="low") == f"{BOS}Hello!{EOS}<｜User｜>Do.{THINKING}"
    chat = [USER, developer, developer, USER, USER, answer(), USER]  # users do not share a turn across a developer
    head = f"{BOS}<｜User｜>Hi<｜User｜>Hi\n\nHi{ASKED}Hello!{EOS}<｜User｜>Hi"
    assert rendered(*chat, reasoning_effort="low") == head + THINKING
    with pytest.raises(TemplateError, match="unknown role robot"):
        rendered({"role": "robot", "content": "x"})


@pytest.mark.parametrize("thinking", [False, True])
def test_quick_tasks(rendered, thinking):
    """The answer to a task has no reasoning, and none is expected of it."""
    options = {"thinking": thinking, "reasoning_effort": "low"}
    begun = THINKING if thinking else ASKED
    for task in ("query", "authority", "domain", "read_url"):
        assert rendered(USER | {"task": task}, **options) == f"{BOS}<｜User｜>Hi<｜{task}｜>"
    prompt = rendered(USER | {"task": "action"}, **options)
    assert prompt == f"{BOS}<｜User｜>Hi{begun}<｜action｜>"
    assert Parsers(tokenizer("deepseek_v4"), "</think>｜DSML｜tool_calls").reasoning(prompt).optional
    titled = rendered(USER, answer("Hello!", "hm", task="title"), **options)
    assert titled == f"{BOS}<｜User｜>Hi{begun}{'hm</think>' if thinking else ''}Hello!{EOS}<｜title｜>"
    done = rendered(USER | {"task": "action"}, answer("Search"), USER, **options)
    assert done == f"{BOS}<｜User｜>Hi{begun}<｜action｜>Search{EOS}<｜User｜>Hi{begun}"
    with pytest.raises(TemplateError, match="task: it may be action"):
        rendered(USER | {"task": "dance"})


def test_a_turn_has_the_task_of_its_first_message(rendered):
    """Another one, which the encoder drops, is refused."""
    asks, options = USER | {"task": "query"}, {"thinking": True, "reasoning_effort": "low"}
    ended = f"{BOS}<｜User｜>Hi\n\n<tool_result>x</tool_result><｜query｜>"
    assert rendered(asks, result("x"), **options) == ended
    assert rendered(asks, result("x"), answer("a b"), **options) == f"{ended}a b{EOS}"
    assert rendered(asks, result("x"), USER, **options).endswith(f"</tool_result><｜User｜>Hi{THINKING}")
    for messages in ([USER, asks], [calling(call()), result("x"), asks], [asks, result("x") | {"task": "query"}]):
        with pytest.raises(TemplateError, match="task: it must be in the first message of a turn"):
            rendered(*messages, **options)


def test_other_models_refuse_what_their_templates_would_drop():
    template = ChatTemplate(tiny.CHAT_TEMPLATE, {})
    for message in ({"role": "latest_reminder", "content": "x"}, USER | {"task": "title"}):
        with pytest.raises(TemplateError, match=r"messages\[1\]: .* DeepSeek-V4"):
            template.render([USER, message])


def test_the_template_is_made_of_the_directory(tmp_path):
    directory = tiny.write(tmp_path)
    config = {name: value for name, value in tiny.config().items() if name != "chat_template"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (directory / "config.json").write_text('{"model_type": "deepseek_v4"}')
    bare = Tokenizer.from_directory(directory).chat_template
    path = encoders.write(directory, "encoding_dsv4.py", encoders.OFFICIAL)
    full = Tokenizer.from_directory(directory)
    assert full.chat_template == deepseek_v4.chat_template(read_constants(path)) != bare
    for template in (bare, full.chat_template):
        parsers = Parsers(full, template)
        assert uses_tools(template) and (parsers.dialect_name, parsers.splits_reasoning) == ("deepseek_v4", True)
    encoders.write(directory, "encoding_dsv4.py", 'TOOLS_TEMPLATE = "{other} {tool_schemas}"')
    with pytest.raises(TokenizerError, match="TOOLS_TEMPLATE has the gap 'other'"):
        Tokenizer.from_directory(directory)


@pytest.mark.skipif(not DATA.is_file(), reason="the strings of the published encoder lie outside the repository")
def test_the_published_strings(tmp_path):
    """Prompts with the texts of the published encoder, against prompts that it wrote."""
    data = DATA.read_text("utf-8")
    _, block, rest = data.split("\n---\n")
    efforts = [line.split('"')[1].replace("⏎", "\n") for line in rest.splitlines() if line.startswith('"Reasoning')]
    golden, of_calls = (
        line.split("`")[1].replace("⏎", "\n").removeprefix("…")
        for line in rest.splitlines()
        if line.startswith(("`<｜begin", "Golden (call"))
    )
    template = block.replace("{schemas}", "{tool_schemas}") + "\n"
    text = (
        f"TOOLS_TEMPLATE = {template!r}\nREASONING_EFFORT_PROMPTS = {dict(zip(('high', 'max'), efforts, strict=True))}"
    )
    source = deepseek_v4.chat_template(read_constants(encoders.write(tmp_path, "encoding_dsv4.py", text)))
    chat = ChatTemplate(source, {"bos_token": BOS, "eos_token": EOS})
    system = {"role": "system", "content": "You are a helpful assistant."}
    first, second = ({"role": "user", "content": text} for text in ("Hello", "What is the capital of France?"))
    messages = [system, first, answer("Hi there! How can I help you?", "r1"), second]
    for effort, prefix in zip(("high", "max"), efforts, strict=True):
        assert prefix.startswith("Reasoning Effort: ") and prefix.endswith(".\n\n")
        found = chat.render(messages, kwargs={"reasoning_effort": effort})
        assert found == golden.replace(BOS, BOS + prefix)
    calls = calling(call("get_weather", '{"location": "Beijing"}'), reasoning_content="R")
    prepared = ToolMessages(chat).prepare([system, first, calls, result('{"temperature": 22}')])
    found = chat.render(prepared, tools=[TOOL], kwargs={"reasoning_effort": "high"})
    assert found.endswith(of_calls)
    assert "\n\n" + block.replace("{schemas}", JSON) + "\n<｜User｜>Hello" in found


def test_a_start_names_the_encoder_file_and_what_it_lacks(tmp_path):
    tiny.write(tmp_path)
    assert encoder_note(tmp_path) is None
    config = {name: value for name, value in tiny.config().items() if name != "chat_template"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    fields = "tools, response_format, reasoning_effort high, reasoning_effort max"
    file = "message encoder: encoding/encoding_dsv4.py"
    assert (
        encoder_note(tmp_path) == f"{file} missing; it has no text for {fields}: requests with one of these are refused"
    )
    encoders.write(tmp_path, "encoding_dsv4.py", encoders.V4)
    assert "found; it has no text for reasoning_effort high, reasoning_effort max: " in encoder_note(tmp_path)
    encoders.write(tmp_path, "encoding_dsv4.py", encoders.OFFICIAL)
    assert encoder_note(tmp_path) == f"{file} found"
    encoders.write(tmp_path, "encoding_dsv4.py", "(")
    with pytest.raises(TokenizerError, match="cannot be parsed"):
        encoder_note(tmp_path)
