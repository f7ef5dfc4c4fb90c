"""The prompt format of DeepSeek-V3.2 as a chat template: its checkpoint has a Python encoder instead of one.

Results are matched to calls by order: there must be as many as calls, or none yet. With thinking on, reasoning between
calls stays in the prompt; that of earlier turns is dropped. The texts for tools and response formats are read from the
encoder file.

Source: the format of encoding/encoding_dsv32.py in the model's repository.
"""

from dsv3.text.deepseek_macros import appended_macro, calls_macro, refused_fields
from dsv3.text.encoder_file import Constants

ENCODER = "encoding/encoding_dsv32.py"
_TOOLS = "TOOLS_SYSTEM_TEMPLATE"


def chat_template(constants: Constants) -> str:
    """Returns the template with the texts of the encoder's `constants`; raises EncoderFileError for invalid ones."""
    macros = appended_macro(constants, ENCODER, _TOOLS)
    return macros + calls_macro("function_calls", "call.function.arguments") + _TEMPLATE


def refused(constants: Constants) -> list[str]:
    """Returns the fields of requests for which the encoder has no text."""
    return refused_fields(constants, _TOOLS)


# The string is raw: jinja turns \n into a line feed.
_TEMPLATE = r"""
{%- set thinks = thinking if thinking is defined else (enable_thinking is defined and enable_thinking) -%}
{%- set ns = namespace(last_user=-1, calls=0, results=0) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro think(is_open) -%}{{- '<think>' if is_open else '</think>' -}}{%- endmacro -%}
{%- macro require_all_results() -%}
  {%- if 0 < ns.results < ns.calls -%}
    {{- raise_exception('there are ' ~ ns.results ~ ' results of ' ~ ns.calls ~ ' tool calls') -}}
  {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if not messages or messages[0].role != 'system' -%}{{- appended(tools, response_format) -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- set ns.results = ns.results + 1 -%}
    {%- if ns.results > ns.calls -%}
      {{- raise_exception('there are more results than the ' ~ ns.calls ~ ' tool calls in front of them') -}}
    {%- endif -%}
    {{- '\n\n<function_results>' if ns.results == 1 -}}
    {{- '\n<result>' ~ message.content ~ '</result>' -}}
    {%- if ns.results == ns.calls -%}
      {{- '\n</function_results>' -}}
      {%- if add_generation_prompt or not loop.last -%}
        {{- '\n\n' ~ think(thinks and loop.index0 >= ns.last_user) -}}
      {%- endif -%}
    {%- endif -%}
  {%- else -%}
    {{- require_all_results() -}}
    {%- set ns.calls = 0 -%}{%- set ns.results = 0 -%}
    {%- if message.role == 'system' -%}
      {{- message.content -}}
      {%- if loop.first -%}{{- appended(tools, response_format) -}}{%- endif -%}
    {%- elif message.role == 'user' -%}
      {{- '<｜User｜>' ~ message.content -}}
      {%- if add_generation_prompt or not loop.last -%}
        {{- '<｜Assistant｜>' ~ think(thinks and loop.index0 == ns.last_user) -}}
      {%- endif -%}
    {%- elif message.role == 'assistant' -%}
      {%- set ns.calls = (message.tool_calls or []) | length -%}
      {%- if thinks and loop.index0 > ns.last_user -%}
        {%- if not (message.reasoning_content or ns.calls or continue_final_message) -%}
          {{- raise_exception('with thinking on, an assistant\'s last message needs reasoning_content or calls') -}}
        {%- endif -%}
        {{- (message.reasoning_content or '') ~ '</think>' -}}
      {%- endif -%}
      {{- (message.content or '') ~ calls(message) ~ eos_token -}}
    {%- else -%}
      {{- raise_exception('unknown role ' ~ message.role) -}}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{{- require_all_results() -}}
"""
