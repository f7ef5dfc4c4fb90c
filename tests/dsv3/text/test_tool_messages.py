"""Conversations with tool calls, as templates of several kinds expect them."""

import json

import pytest

from dsv3.server.templates import escaping_template
from dsv3.text.chat_template import ChatTemplate, TemplateError, ToolMessages, names_tools, telling_tools
from dsv3.text.dialects import DIALECTS
from dsv3.text.markers import Markers

# DeepSeek-V3.1 writes arguments as they are, DeepSeek-V3 as vLLM ships its template as JSON, GLM one by one.
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
    return template.render(ToolMessages(template).prepared(messages))


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (AS_TEXT, 'f:{"k":  "é"};1'),
        (AS_JSON, 'f:{"k": "é"};1'),
        (ONE_BY_ONE, "k=é;1"),
        (BOTH, '{"k":  "é"};1'),
    ],
)
def test_arguments_come_as_the_template_expects_them(source, prompt):
    assert rendered(source, conversation('{"k":  "é"}')) == prompt


@pytest.mark.parametrize("arguments", ["", "[1]", '"x"', "{", "[" * 100_000])
def test_arguments_that_are_no_object(arguments):
    assert rendered(AS_TEXT, conversation(arguments)) == f"f:{arguments};1"
    if not arguments:
        assert rendered(AS_JSON, conversation(arguments)) == "f:{};1"
        return
    with pytest.raises(TemplateError, match="not a JSON object"):
        rendered(AS_JSON, conversation(arguments))


def test_results_follow_the_order_of_their_calls():
    assert rendered(AS_TEXT, conversation("{}", ["2", "1"])).endswith(";12")
    unknown = conversation("{}", ["2", "3"])
    assert rendered(AS_TEXT, unknown).endswith(";23")
    without = [{name: value for name, value in m.items() if name != "tool_call_id"} for m in conversation("{}", "21")]
    assert rendered(AS_TEXT, without).endswith(";21")


# DeepSeek-V3's first template writes calls only where content is null, GLM's prints whatever is there.
IF_NULL = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + c.function.arguments }};{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PRINTED = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}<{{ c.function.name }}>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(("source", "prompt"), [(IF_NULL, "xf{};1"), (PRINTED, "x<f>1")])
@pytest.mark.parametrize("missing", [{}, {"content": None}])
def test_no_content_is_what_the_template_takes_for_it(source, prompt, missing):
    user, calling, result = conversation("{}")
    calling = {name: value for name, value in calling.items() if name != "content"} | missing
    assert rendered(source, [user, calling, result]) == prompt
    assert rendered("{{ messages[0].content }}", [{"role": "assistant", **missing}]) == ""


def test_arguments_that_are_no_object_are_found():
    with pytest.raises(TemplateError, match=r"^messages\[1\]: .*not a JSON object"):
        rendered(AS_JSON, conversation("[1]"))


def test_conversations_without_calls_stay_as_they_are():
    messages = [{"role": "user", "content": "x"}]
    assert ToolMessages(ChatTemplate("", {})).prepared(messages) == messages


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
def test_whether_a_template_shows_tools(source, expected):
    assert names_tools(source) is expected


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
def test_a_template_that_does_not_tell_tools_is_made_to(dialect, call, head):
    """DeepSeek's own templates have no place for tools: the model card of V3.1 says where they go."""
    source = head + "{% if true %}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% endif %}"
    plain, telling = ChatTemplate(source, {}), ChatTemplate(telling_tools(source, DIALECTS[dialect]), {})
    assert names_tools(telling_tools(source, DIALECTS[dialect]))
    for messages in ([SYSTEM, USER], [USER], []):
        assert telling.render(messages) == plain.render(messages)
    text = (
        "\n\n## Tools\nYou have access to the following tools:\n\n"
        f"### get_weather\nDescription: é\n\nParameters: {json.dumps(PARAMETERS)}\n\n"
        "### f\nDescription: \n\nParameters: {}\n\n"
        "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
        f"{call}<｜tool▁call▁end｜>{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n"
    )
    prompt = telling.render([SYSTEM, USER], tools=TOOLS)
    told = prompt.removeprefix(plain.render([SYSTEM])[:-1])
    assert told.startswith(text) and told.endswith("without separators or spaces][user:x]")
    assert telling.render([USER], tools=TOOLS) == prompt.replace("Be brief.", "")


def test_what_is_told_of_tools_has_the_templates_own_markers():
    """Where what clients write is escaped, the words about tools are not."""
    source = "{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}"
    dialect = DIALECTS["deepseek_v31"]
    markers, told = Markers(list(dialect.markers)), telling_tools(source, dialect)
    hiding = escaping_template(told, {}, markers).render([SYSTEM, USER], tools=TOOLS)
    assert "<｜tool▁calls▁begin｜>" not in hiding
    assert markers.show(hiding) == ChatTemplate(told, {}).render([SYSTEM, USER], tools=TOOLS)


def test_other_templates_stay_as_they_are():
    names, does_not = "{{ tools }}", "{{ messages }}"
    assert telling_tools(names, DIALECTS["deepseek_v3"]) == names
    assert telling_tools(does_not, DIALECTS["kimi_k2"]) == does_not
    assert telling_tools(does_not, None) == does_not
