"""The prompt format of DeepSeek-V4 as a chat template: its checkpoint has a Python encoder instead of one.

Thinking is on unless the request turns it off. Reasoning before the last user turn is dropped, and nothing of it where
the request has tools. Results of calls are part of a user turn. A message may have a quick `task`, whose token ends the
prompt. The role latest_reminder has a token of its own; a developer is a user whose turn has the tools.

The encoder drops the task of a result, and of a user message that joins the turn of an earlier one: the model would
answer as if there were none. The template refuses such a task.

The texts for tools, response formats and efforts are read from the encoder file. It has one of two profiles: in the
preview only the effort max has a text, in the official one low, high and max have one each.

Source: the format of encoding/encoding_dsv4.py in the model's repository.
"""

from collections.abc import Mapping

from dsv3.text.deepseek_macros import appended_macro, calls_macro, jinja_literal, need_text, refused_fields
from dsv3.text.encoder_file import Constants

ENCODER = "encoding/encoding_dsv4.py"
_TOOLS = "TOOLS_TEMPLATE"
_OFFICIAL, _PREVIEW = "REASONING_EFFORT_PROMPTS", "REASONING_EFFORT_MAX"


def chat_template(constants: Constants) -> str:
    """Returns the template with the texts of the encoder's `constants`; raises EncoderFileError for invalid ones."""
    macros = appended_macro(constants, ENCODER, _TOOLS)
    macros += calls_macro("tool_calls", "call.function.arguments | arguments_object")
    refuse = need_text("reasoning_effort", ENCODER, _OFFICIAL)
    efforts = "{%- set efforts = " + jinja_literal(_efforts(constants)) + " -%}"
    return macros + efforts + _EFFORT.replace("REFUSE", refuse) + _MESSAGES


def refused(constants: Constants) -> list[str]:
    """Returns the fields of requests, and the efforts, for which the encoder has no text."""
    known = _efforts(constants)
    efforts = [f"reasoning_effort {effort}" for effort in ("low", "high", "max") if effort not in known]
    return refused_fields(constants, _TOOLS) + efforts


def _efforts(constants: Constants) -> dict[str, str]:
    """Returns the texts of the efforts low, high and max, as far as the encoder has them."""
    match constants.get(_OFFICIAL), constants.get(_PREVIEW):
        case Mapping() as texts, _:
            return {effort: texts[effort] for effort in ("low", "high", "max") if effort in texts}
        case _, str() as text:
            return {"low": "", "high": "", "max": text}
        case _:
            return {"low": ""}


# An effort that the request does not name is high, as in DeepSeek's API; the strings are raw: jinja reads \n.
_EFFORT = r"""
{%- set effort = reasoning_effort if reasoning_effort is defined else none -%}
{%- if effort not in (none, 'none', 'low', 'medium', 'high', 'xhigh', 'max') -%}
  {{- raise_exception('reasoning_effort: it may be none, low, medium, high, xhigh or max') -}}
{%- endif -%}
{%- set level = {'medium': 'high', 'xhigh': 'high'}.get(effort, effort) -%}
{%- set asked = thinking if thinking is defined else (enable_thinking if enable_thinking is defined else true) -%}
{%- set thinks = asked and effort != 'none' -%}
{%- macro effort_text() -%}
  {%- if level is none -%}{{- efforts.get('high', '') -}}
  {%- elif level in efforts -%}{{- efforts[level] -}}
  {%- else -%}REFUSE{%- endif -%}
{%- endmacro -%}
"""
_MESSAGES = r"""
{%- set ns = namespace(last=-1, keeps=false, starts=[], task=none) -%}
{%- if tools -%}{%- set ns.keeps = true -%}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role in ('user', 'developer', 'tool') -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
  {%- if message.tools -%}{%- set ns.keeps = true -%}{%- endif -%}
{%- endfor -%}
{%- if thinks and not ns.keeps and ns.last > 0 -%}
  {%- for message in messages[:ns.last] -%}
    {%- if message.role == 'developer' -%}
      {%- set ns.starts = ns.starts + [loop.index0 - ns.starts | length] -%}
    {%- endif -%}
  {%- endfor -%}
  {%- set earlier = messages[:ns.last] | rejectattr('role', 'equalto', 'developer') | list -%}
  {%- set messages = earlier + messages[ns.last:] -%}
  {%- set ns.last = earlier | length -%}
{%- endif -%}
{{- bos_token -}}
{%- if thinks -%}{{- effort_text() -}}{%- endif -%}
{%- if not messages or messages[0].role not in ('system', 'developer') -%}
  {{- appended(tools, response_format) -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role in ('system', 'developer') -%}
    {{- ('<｜User｜>' if message.role == 'developer' else '') ~ (message.content or '') -}}
    {{- appended(message.tools or (tools if loop.first), response_format if loop.first) -}}
  {%- elif message.role in ('user', 'tool') -%}
    {%- set follows = not loop.first and loop.previtem.role in ('user', 'tool') and loop.index0 not in ns.starts
      and (message.role == 'tool' or not ns.task) -%}
    {%- if message.task and (follows or message.role == 'tool') -%}
      {{- raise_exception('task: it must be in the first message of a turn, and not in a result') -}}
    {%- endif -%}
    {%- if not follows -%}{%- set ns.task = message.task -%}{%- endif -%}
    {{- '\n\n' if follows else '<｜User｜>' -}}
    {{- message.content if message.role == 'user' else '<tool_result>' ~ message.content ~ '</tool_result>' -}}
  {%- elif message.role == 'latest_reminder' -%}
    {{- '<｜latest_reminder｜>' ~ message.content -}}
  {%- elif message.role == 'assistant' -%}
    {%- if thinks and not ns.task and (ns.keeps or loop.index0 > ns.last) -%}
      {{- (message.reasoning_content or '') ~ '</think>' -}}
    {%- endif -%}
    {{- (message.content or '') ~ calls(message) ~ eos_token -}}
  {%- else -%}
    {{- raise_exception('unknown role ' ~ message.role) -}}
  {%- endif -%}
  {%- if message.role not in ('user', 'tool') -%}{%- set ns.task = message.task -%}{%- endif -%}
  {%- if (add_generation_prompt if loop.last else loop.nextitem.role in ('assistant', 'latest_reminder')) -%}
    {%- if ns.task -%}
      {%- if ns.task not in ('action', 'query', 'authority', 'domain', 'title', 'read_url') -%}
        {{- raise_exception('task: it may be action, query, authority, domain, title or read_url') -}}
      {%- endif -%}
      {{- '<｜Assistant｜>' ~ ('<think>' if thinks else '</think>') if ns.task == 'action' -}}
      {{- {
        'action': '<｜action｜>', 'query': '<｜query｜>', 'authority': '<｜authority｜>',
        'domain': '<｜domain｜>', 'title': '<｜title｜>', 'read_url': '<｜read_url｜>'
      }[ns.task] -}}
    {%- elif message.role in ('user', 'developer', 'tool') -%}
      {%- set is_open = thinks and (ns.keeps or loop.index0 >= ns.last) -%}
      {{- '<｜Assistant｜>' ~ ('<think>' if is_open else '</think>') -}}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
"""
