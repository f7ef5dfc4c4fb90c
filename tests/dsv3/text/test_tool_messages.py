"""Conversations with tool calls, as templates of several kinds expect them."""

import json

import pytest

from dsv3.server.templates import escaping_template
from dsv3.text.chat_template import ChatTemplate, TemplateError, ToolMessages, uses_tools, with_tool_preamble
from dsv3.text.dialects import DIALECTS
from dsv3.text.special_tokens import SpecialTokens

# DeepSeek-V3.1 writes arguments unchanged, DeepSeek-V3 (vLLM's template) as JSON, GLM one by one.
CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{{ m.content if m.role == 'tool' }}{% endfor %}"
AS_TEXT = CALLS + "{{ c.function.name + ':' + c.function.arguments }};{% endfor %}" + END
AS_JSON = CALLS + "{{ c.function.name }}:{{ c.function.arguments | tojson }};{% endfor %}" + END
ONE_BY_ONE = CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}" + END
BOTH = CALLS + (
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }};{% endfor %}" + END
)


def conversation(arguments, results=("1",)):
    ids = ["1", "2"][: max(1, len(results))]
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}} for i in ids]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    return messages + [{"role": "tool", "content": i, "tool_call_id": i} for i in results]


def rendered(source, messages):
    template = ChatTemplate(source, {})
    return template.render(ToolMessages(template).prepare(messages))


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (AS_TEXT, 'f:{"k":  "é"};1'),
        (AS_JSON, 'f:{"k": "é"};1'),
        (ONE_BY_ONE, "k=é;1"),
        (BOTH, '{"k":  "é"};1'),
    ],
)
def test_arguments_are_converted_to_the_templates_form(source, prompt):
    assert rendered(source, conversation('{"k":  "é"}')) == prompt


@pytest.mark.parametrize("arguments", ["", "[1]", '"x"', "{", "[" * 100_000])
def test_arguments_that_are_not_an_object(arguments):
    assert rendered(AS_TEXT, conversation(arguments)) == f"f:{arguments};1"
    if not arguments:
        assert rendered(AS_JSON, conversation(arguments)) == "f:{};1"
        return
    with pytest.raises(TemplateError, match="not a JSON object"):
        rendered(AS_JSON, conversation(arguments))


def test_results_are_sorted_by_their_calls():
    assert rendered(AS_TEXT, conversation("{}", ["2", "1"])).endswith(";12")
    unknown = conversation("{}", ["2", "3"])
    assert rendered(AS_TEXT, unknown).endswith(";23")
    without = [{name: value for name, value in m.items() if name != "tool_call_id"} for m in conversation("{}", "21")]
    assert rendered(AS_TEXT, without).endswith(";21")


# DeepSeek-V3's first template writes calls only where content is null; GLM's prints any content.
IF_NULL = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + c.function.arguments }};{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PRINTED = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}<{{ c.function.name }}>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(("source", "prompt"), [(IF_NULL, "xf{};1"), (PRINTED, "x<f>1")])
@pytest.mark.parametrize("missing", [{}, {"content": None}])
def test_missing_content_becomes_what_the_template_expects(source, prompt, missing):
    user, calling, result = conversation("{}")
    calling = {name: value for name, value in calling.items() if name != "content"} | missing
    assert rendered(source, [user, calling, result]) == prompt
    assert rendered("{{ messages[0].content }}", [{"role": "assistant", **missing}]) == ""


def test_the_error_names_the_message_with_invalid_arguments():
    with pytest.raises(TemplateError, match=r"^messages\[1\]: .*not a JSON object"):
        rendered(AS_JSON, conversation("[1]"))


def test_conversations_without_calls_are_unchanged():
    messages = [{"role": "user", "content": "x"}]
    assert ToolMessages(ChatTemplate("", {})).prepare(messages) == messages


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for t in tools %}{{ t }}{% endfor %}", True),
        ("{% for m in messages %}{% if tools %}{% break %}{% endif %}{% endfor %}", True),
        ("{% set tools = 1 %}{{ tools }}", False),
        ("{{ messages }} tools {# tools #} {{ 'tools' }}", False),
        ("{% for", False),
        ("{{ " + "(" * 5_000, False),
    ],
)
def test_whether_a_template_uses_tools(source, expected):
    assert uses_tools(source) is expected


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}
PARAMETERS = {"properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "é", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "f"}},
]


@pytest.mark.parametrize(
    ("dialect", "call"),
    [
        ("deepseek_v31", "tool_call_name<｜tool▁sep｜>tool_call_arguments"),
        ("deepseek_v3", "function<｜tool▁sep｜>tool_call_name\n```json\ntool_call_arguments\n```"),
    ],
)
@pytest.mark.parametrize("head", ["", "  ", "\n"])
def test_a_preamble_adds_tools_to_a_template_without_them(dialect, call, head):
    """DeepSeek's own templates do not render tools; V3.1's model card describes where they go."""
    source = head + "{% if true %}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% endif %}"
    plain, extended = ChatTemplate(source, {}), ChatTemplate(with_tool_preamble(source, DIALECTS[dialect]), {})
    assert uses_tools(with_tool_preamble(source, DIALECTS[dialect]))
    for messages in ([SYSTEM, USER], [USER], []):
        assert extended.render(messages) == plain.render(messages)
    text = (
        "\n\n## Tools\nYou have access to the following tools:\n\n"
        f"### get_weather\nDescription: é\n\nParameters: {json.dumps(PARAMETERS)}\n\n"
        "### f\nDescription: \n\nParameters: {}\n\n"
        "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
        f"{call}<｜tool▁call▁end｜>{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n"
    )
    prompt = extended.render([SYSTEM, USER], tools=TOOLS)
    shown = prompt.removeprefix(plain.render([SYSTEM])[:-1])
    assert shown.startswith(text) and shown.endswith("without separators or spaces][user:x]")
    assert extended.render([USER], tools=TOOLS) == prompt.replace("Be brief.", "")


def test_markers_in_the_preamble_are_special_tokens():
    """Client text is escaped; the preamble is not."""
    source = "{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}"
    dialect = DIALECTS["deepseek_v31"]
    markers, extended = SpecialTokens(list(dialect.markers)), with_tool_preamble(source, dialect)
    hiding = escaping_template(extended, {}, markers).render([SYSTEM, USER], tools=TOOLS)
    assert "<｜tool▁calls▁begin｜>" not in hiding
    assert markers.show(hiding) == ChatTemplate(extended, {}).render([SYSTEM, USER], tools=TOOLS)


def test_other_templates_are_unchanged():
    uses, ignores = "{{ tools }}", "{{ messages }}"
    assert with_tool_preamble(uses, DIALECTS["deepseek_v3"]) == uses
    assert with_tool_preamble(ignores, DIALECTS["kimi_k2"]) == ignores
    assert with_tool_preamble(ignores, None) == ignores
