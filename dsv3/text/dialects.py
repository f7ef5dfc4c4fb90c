"""The formats of reasoning and tool calls: one table per dialect; no other module knows a format.

A table maps (state, mark) to (acts, next state). A mark without an entry for the current state is dropped: no mark
reaches a client. `dsv3.text.parser` finds the marks, by token id where the vocabulary has a token for one and by text
otherwise, and runs the tables.

Sources: the model cards and tokenizers of DeepSeek-V3, R1-0528, V3.1, V3.2 and V4, Kimi-K2, GLM-4.5 and 4.7.
"""

import enum
import json
from collections.abc import Mapping

import msgspec

THINK, END_THINK = "<think>", "</think>"


class ParserState(enum.Enum):
    """The parser's position in an answer."""

    START = "nothing but white space so far"
    REASONING = "reasoning"
    CONTENT = "content"
    BETWEEN = "inside the block of calls, outside of a call"
    KIND = "the word before a name"
    NAME = "a name"
    ARGUMENTS = "arguments, as JSON"
    PARAMETERS = "arguments, one by one: between two of them"
    KEY = "the name of an argument"
    VALUE = "the value of an argument"
    AFTER = "after the calls; the rest is dropped"


class Mark(enum.Enum):
    """The meaning of a marker; the dialect has its text."""

    THINK = "reasoning begins"
    END_THINK = "reasoning ends"
    CALLS = "the block of calls begins"
    END_CALLS = "the block of calls ends"
    CALL = "a call begins"
    SEPARATOR = "a part of a call ends"
    LINE = "a line ends"
    END_CALL = "a call ends"
    KEY = "the name of an argument begins"
    END_KEY = "the name of an argument ends"
    VALUE = "the value of an argument begins"
    END_VALUE = "the value of an argument ends"
    RESULTS = "results of calls begin, which a model should not write"
    OTHER = "a marker that an answer should not have"


class Act(enum.Enum):
    """An action of a transition."""

    START = "the call with the collected name begins"
    END = "the call is complete"
    DROP = "the collected text is not a call"
    KEY = "the collected text names the next argument"
    VALUE = "a value begins"
    END_VALUE = "the value is complete"


Step = tuple[tuple[Act, ...], ParserState]
Table = dict[tuple[ParserState, Mark], Step]


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """The exact format of calls, for grammars, with markers as they are written.

    `before` and `after` enclose all calls, `between` separates two of them; `before` has a marker, which no text
    contains. `call` has gaps for {name}, {number} and {arguments}. Arguments are one JSON object, unless `text` and
    `value` are set: then they are written one by one, `text` for a text and `value` for JSON, with gaps for {key} and
    {value}; `nothing` stands for no arguments.
    """

    before: str
    call: str
    between: str = ""
    after: str = ""
    text: str = ""
    value: str = ""
    nothing: str = ""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One format of calls.

    `markers` maps their texts to marks, `table` has the transitions. `tags`: markers are tags with attributes (DSML),
    which `dsv3.text.parser` reads. `names_carry_ids`: the name is `functions.NAME:NUMBER`, the call's id. `preamble`
    renders tools for chat templates that do not. `form` is the exact format of a call.
    """

    markers: Mapping[str, Mark]
    table: Table
    tags: bool = False
    names_carry_ids: bool = False
    preamble: str | None = None
    form: CallForm


_OPEN = (ParserState.START, ParserState.REASONING, ParserState.CONTENT, ParserState.AFTER)
"""States in which calls may begin; a call inside reasoning ends it."""

REASONING_MARKERS = {THINK: Mark.THINK, END_THINK: Mark.END_THINK}
REASONING_TABLE: Table = {
    (ParserState.START, Mark.THINK): ((), ParserState.REASONING),
    (ParserState.START, Mark.END_THINK): ((), ParserState.CONTENT),
    (ParserState.REASONING, Mark.END_THINK): ((), ParserState.CONTENT),
}


def _block(first: ParserState, after: ParserState) -> Table:
    """Returns the transitions into a block of calls, out of it, and to the `first` state of a call."""
    return {
        **{(state, Mark.CALLS): ((), ParserState.BETWEEN) for state in _OPEN},
        **{(state, Mark.CALL): ((), first) for state in (*_OPEN, ParserState.BETWEEN)},
        (ParserState.BETWEEN, Mark.END_CALLS): ((), after),
        (ParserState.CONTENT, Mark.RESULTS): ((), ParserState.AFTER),
    }


def _json_call(separator: Mark, first: ParserState, after: ParserState) -> Table:
    """Returns the transitions of a call with JSON arguments; the end marker of a call may be missing."""
    return {
        (ParserState.NAME, separator): ((Act.START,), ParserState.ARGUMENTS),
        (ParserState.NAME, Mark.END_CALL): ((Act.START, Act.END), ParserState.BETWEEN),
        (ParserState.ARGUMENTS, Mark.END_CALL): ((Act.END,), ParserState.BETWEEN),
        (ParserState.ARGUMENTS, Mark.CALL): ((Act.END,), first),
        (ParserState.ARGUMENTS, Mark.END_CALLS): ((Act.END,), after),
    }


_DEEPSEEK_MARKERS = {
    "<｜tool▁calls▁begin｜>": Mark.CALLS,
    "<｜tool▁calls▁end｜>": Mark.END_CALLS,
    "<｜tool▁call▁begin｜>": Mark.CALL,
    "<｜tool▁call▁end｜>": Mark.END_CALL,
    "<｜tool▁sep｜>": Mark.SEPARATOR,
    "<｜tool▁outputs▁begin｜>": Mark.RESULTS,
    "<｜tool▁outputs▁end｜>": Mark.OTHER,
    "<｜tool▁output▁begin｜>": Mark.RESULTS,
    "<｜tool▁output▁end｜>": Mark.OTHER,
    "<｜User｜>": Mark.OTHER,
    "<｜Assistant｜>": Mark.OTHER,
    "<|EOT|>": Mark.OTHER,
}


def _preamble(call: str) -> str:
    """Returns the preamble for chat templates that do not render tools; `call` shows the format."""
    tail = (
        "\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"
        "{additional_tool_calls}<｜tool▁calls▁end｜>\n\n"
        "Where:\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
        "- For multiple tool calls, chain them directly without separators or spaces"
    )
    return _PREAMBLE.replace("TAIL", json.dumps(tail, ensure_ascii=False))


# The words are those of V3.1's model card. The last line feed is one that jinja drops.
_PREAMBLE = r"""
{%- if tools -%}
  {%- set told = namespace(text='\n\n## Tools\nYou have access to the following tools:\n') -%}
  {%- for tool in tools -%}
    {%- set told.text = told.text ~ '\n### ' ~ tool.function.name ~ '\nDescription: ' -%}
    {%- set told.text = told.text ~ (tool.function.description or '') ~ '\n\nParameters: ' -%}
    {%- set told.text = told.text ~ ((tool.function.parameters or {}) | tojson) ~ '\n' -%}
  {%- endfor -%}
  {%- set has_system = messages and messages[0].role == 'system' -%}
  {%- set told.text = (messages[0].content if has_system else '') ~ told.text ~ TAIL -%}
  {%- set messages = [{'role': 'system', 'content': told.text}] + (messages[1:] if has_system else messages) -%}
{%- endif %}
"""
_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
# function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```
_DEEPSEEK_V3 = Dialect(
    markers={**_DEEPSEEK_MARKERS, "\n": Mark.LINE},
    table={
        **_block(ParserState.KIND, ParserState.CONTENT),
        **_json_call(Mark.LINE, ParserState.KIND, ParserState.CONTENT),
        (ParserState.KIND, Mark.SEPARATOR): ((), ParserState.NAME),
        (ParserState.KIND, Mark.END_CALL): ((Act.DROP,), ParserState.BETWEEN),
    },
    preamble=_preamble("function<｜tool▁sep｜>tool_call_name\n```json\ntool_call_arguments\n```"),
    form=CallForm(
        before=_CALLS,
        call=_CALL + "function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```" + _END_CALL,
        between="\n",
        after=_END_CALLS,
    ),
)
# NAME<｜tool▁sep｜>ARGUMENTS
_DEEPSEEK_V31 = Dialect(
    markers=_DEEPSEEK_MARKERS,
    table={
        **_block(ParserState.NAME, ParserState.CONTENT),
        **_json_call(Mark.SEPARATOR, ParserState.NAME, ParserState.CONTENT),
    },
    preamble=_preamble("tool_call_name<｜tool▁sep｜>tool_call_arguments"),
    form=CallForm(before=_CALLS, call=_CALL + "{name}<｜tool▁sep｜>{arguments}" + _END_CALL, after=_END_CALLS),
)


def _dsml_form(block: str) -> CallForm:
    """Returns the form of calls in DSML; `block` is the name of the tag around them."""
    return CallForm(
        before=f"\n\n<｜DSML｜{block}>\n",
        call='<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n',
        after=f"</｜DSML｜{block}>",
        text='<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>\n',
        value='<｜DSML｜parameter name="{key}" string="false">{value}</｜DSML｜parameter>\n',
        nothing="\n",
    )


# <｜DSML｜invoke name="NAME">\n<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>\n</｜DSML｜invoke>
_DEEPSEEK_V32 = Dialect(
    markers={marker: mark for marker, mark in _DEEPSEEK_MARKERS.items() if mark is Mark.OTHER},
    tags=True,
    table={
        **{(state, Mark.CALLS): ((), ParserState.BETWEEN) for state in _OPEN},
        **{(state, Mark.CALL): ((Act.START,), ParserState.PARAMETERS) for state in (*_OPEN, ParserState.BETWEEN)},
        **{
            (state, mark): step
            for state in (ParserState.PARAMETERS, ParserState.VALUE)
            for mark, step in {
                Mark.VALUE: ((Act.END_VALUE, Act.VALUE), ParserState.VALUE),
                Mark.END_VALUE: ((Act.END_VALUE,), ParserState.PARAMETERS),
                Mark.CALL: ((Act.END, Act.START), ParserState.PARAMETERS),
                Mark.END_CALL: ((Act.END,), ParserState.BETWEEN),
                Mark.END_CALLS: ((Act.END,), ParserState.CONTENT),
            }.items()
        },
        (ParserState.BETWEEN, Mark.END_CALLS): ((), ParserState.CONTENT),
    },
    form=_dsml_form("function_calls"),
)
_TASKS = ("<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>")
# As V3.2, in a block of another name.
_DEEPSEEK_V4 = msgspec.structs.replace(
    _DEEPSEEK_V32,
    markers={**_DEEPSEEK_V32.markers, **dict.fromkeys(("<｜latest_reminder｜>", *_TASKS), Mark.OTHER)},
    form=_dsml_form("tool_calls"),
)
# functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS
_KIMI_K2 = Dialect(
    markers={
        "<|tool_calls_section_begin|>": Mark.CALLS,
        "<|tool_calls_section_end|>": Mark.END_CALLS,
        "<|tool_call_begin|>": Mark.CALL,
        "<|tool_call_argument_begin|>": Mark.SEPARATOR,
        "<|tool_call_end|>": Mark.END_CALL,
        "<|im_user|>": Mark.OTHER,
        "<|im_assistant|>": Mark.OTHER,
        "<|im_system|>": Mark.OTHER,
        "<|im_middle|>": Mark.OTHER,
    },
    table={
        **_block(ParserState.NAME, ParserState.AFTER),
        **_json_call(Mark.SEPARATOR, ParserState.NAME, ParserState.AFTER),
    },
    names_carry_ids=True,
    form=CallForm(
        before="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        after="<|tool_calls_section_end|>",
    ),
)
# NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>, with line feeds in between before GLM-4.7
_GLM45 = Dialect(
    markers={
        "<tool_call>": Mark.CALL,
        "</tool_call>": Mark.END_CALL,
        "<arg_key>": Mark.KEY,
        "</arg_key>": Mark.END_KEY,
        "<arg_value>": Mark.VALUE,
        "</arg_value>": Mark.END_VALUE,
        "<|user|>": Mark.OTHER,
        "<|assistant|>": Mark.OTHER,
        "<|observation|>": Mark.OTHER,
    },
    table={
        **{(state, Mark.CALL): ((), ParserState.NAME) for state in _OPEN},
        (ParserState.NAME, Mark.KEY): ((Act.START,), ParserState.KEY),
        (ParserState.NAME, Mark.END_CALL): ((Act.START, Act.END), ParserState.CONTENT),
        (ParserState.KEY, Mark.END_KEY): ((Act.KEY,), ParserState.PARAMETERS),
        (ParserState.KEY, Mark.VALUE): ((Act.KEY, Act.VALUE), ParserState.VALUE),
        (ParserState.PARAMETERS, Mark.KEY): ((), ParserState.KEY),
        (ParserState.PARAMETERS, Mark.VALUE): ((Act.VALUE,), ParserState.VALUE),
        (ParserState.VALUE, Mark.END_VALUE): ((Act.END_VALUE,), ParserState.PARAMETERS),
        (ParserState.VALUE, Mark.KEY): ((Act.END_VALUE,), ParserState.KEY),
        **{
            (state, Mark.END_CALL): ((Act.END,), ParserState.CONTENT)
            for state in (ParserState.KEY, ParserState.PARAMETERS, ParserState.VALUE)
        },
    },
    form=CallForm(
        before="<tool_call>",
        call="{name}\n{arguments}</tool_call>",
        between="\n<tool_call>",
        text="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        value="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
)
_GLM47 = msgspec.structs.replace(
    _GLM45,
    form=CallForm(
        before="<tool_call>",
        call="{name}{arguments}</tool_call>",
        between="<tool_call>",
        text="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        value="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    ),
)
DIALECTS: dict[str, Dialect] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": _DEEPSEEK_V32,
    "deepseek_v4": _DEEPSEEK_V4,
    "kimi_k2": _KIMI_K2,
    "glm45": _GLM45,
    "glm47": _GLM47,
}

# The part of a prompt that an answer continues begins after the last role marker, or after tool results or the token of
# a quick task, whose answer has no reasoning.
_SPEAKERS = ("<｜Assistant｜>", "<|im_middle|>", "<|assistant|>")
_RESULTS = ("<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>", "</function_results>", *_TASKS)
_TAIL_CHARS = 64
# A turn is not longer; whole prompts have up to 16 MiB, and this runs on the event loop.
_MAX_TURN_CHARS = 2**20


def knows_reasoning(chat_template: str | None) -> bool:
    """Returns whether a template uses the markers of reasoning."""
    return chat_template is not None and END_THINK in chat_template


def start_state(prompt: str, always_thinks: bool) -> tuple[ParserState, ParserState]:
    """Returns the state after `prompt`, and the one that follows START.

    The last reasoning marker in the turn decides, also where a client began the answer. Without one, the text is
    reasoning until `</think>` if the model `always_thinks`, and otherwise only if it begins with `<think>`.
    `always_thinks` does not apply after tool results: whole answers were taken for reasoning (sglang#17551).
    """
    prompt = prompt[-_MAX_TURN_CHARS:]
    speaker_end = _end_of_last(_SPEAKERS, prompt, 0)
    results_end = _end_of_last(_RESULTS, prompt, speaker_end)
    turn = prompt[results_end:] if results_end else prompt[-_TAIL_CHARS:]
    opened, closed = turn.rfind(THINK), turn.rfind(END_THINK)
    if closed > opened:
        return ParserState.CONTENT, ParserState.CONTENT
    if opened >= 0 and turn[opened + len(THINK) :].strip():
        return ParserState.REASONING, ParserState.REASONING
    thinks = opened >= 0 or (always_thinks and results_end == speaker_end)
    return ParserState.START, ParserState.REASONING if thinks else ParserState.CONTENT


def _end_of_last(marks: tuple[str, ...], prompt: str, begin: int) -> int:
    """Returns the end of the last occurrence of any of the texts after `begin`; `begin` without one."""
    for mark in marks:
        if (at := prompt.rfind(mark, begin)) >= 0:
            begin = at + len(mark)
    return begin
