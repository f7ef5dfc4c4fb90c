"""The prompt format of DeepSeek-V3.2 as a chat template: its checkpoint has a Python encoder instead of one.

The model was trained with these texts, so they stay as they are, to the character. Results are matched to calls by
order: there must be as many as calls, or none yet. With thinking on, reasoning between calls stays in the prompt; that
of earlier turns is dropped.

Source: encoding/encoding_dsv32.py of the model's repository (MIT).
"""

# The string is raw: jinja turns \n into a line feed.
CHAT_TEMPLATE = r"""
{%- set thinks = thinking if thinking is defined else (enable_thinking is defined and enable_thinking) -%}
{%- set ns = namespace(last_user=-1, calls=0, results=0) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro think(is_open) -%}{{- '<think>' if is_open else '</think>' -}}{%- endmacro -%}
{%- macro shown_tools() -%}
  {{- '\n\n## Tools\n\nYou have access to a set of tools you can use to answer the user\'s question.\n' -}}
  {{- 'You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of ' -}}
  {{- 'your reply to the user:\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="$FUNCTION_NAME">\n' -}}
  {{- '<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>\n' -}}
  {{- '...\n</｜DSML｜invoke>\n<｜DSML｜invoke name="$FUNCTION_NAME2">\n' -}}
  {{- '...\n</｜DSML｜invoke>\n</｜DSML｜function_calls>\n\nString and scalar parameters should be specified ' -}}
  {{- 'as is without any escaping or quotes, while lists and objects should use JSON format. The "string" ' -}}
  {{- 'attribute should be set to "true" for string type parameters and "false" for other types (numbers, ' -}}
  {{- 'booleans, arrays, objects).\n\nIf the thinking_mode is enabled, then after function results you ' -}}
  {{- 'should strongly consider outputting a thinking block. Here is an example:\n\n' -}}
  {{- '<｜DSML｜function_calls>\n...\n</｜DSML｜function_calls>\n\n<function_results>\n' -}}
  {{- '...\n</function_results>\n\n<think>...thinking about results</think>\n\n' -}}
  {{- 'Here are the functions available in JSONSchema format:\n' -}}
  {{- '<functions>\n' -}}
  {%- for tool in tools -%}{{- tool.function | tojson -}}{{- '\n' -}}{%- endfor -%}
  {{- '</functions>\n' -}}
{%- endmacro -%}
{%- macro require_all_results() -%}
  {%- if 0 < ns.results < ns.calls -%}
    {{- raise_exception('there are ' ~ ns.results ~ ' results of ' ~ ns.calls ~ ' tool calls') -}}
  {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools and (not messages or messages[0].role != 'system') -%}{{- shown_tools() -}}{%- endif -%}
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
      {%- if tools and loop.first -%}{{- shown_tools() -}}{%- endif -%}
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
      {{- message.content or '' -}}
      {%- for call in message.tool_calls or [] -%}
        {{- '\n\n<｜DSML｜function_calls>\n' if loop.first else '\n' -}}
        {{- '<｜DSML｜invoke name="' ~ call.function.name ~ '">\n' -}}
        {%- for key, value in call.function.arguments.items() -%}
          {{- '<｜DSML｜parameter name="' ~ key ~ '" string="' ~ ('true' if value is string else 'false') ~ '">' -}}
          {{- value if value is string else value | tojson -}}
          {{- '</｜DSML｜parameter>' ~ ('' if loop.last else '\n') -}}
        {%- endfor -%}
        {{- '\n</｜DSML｜invoke>' -}}
        {{- '\n</｜DSML｜function_calls>' if loop.last -}}
      {%- endfor -%}
      {{- eos_token -}}
    {%- else -%}
      {{- raise_exception('unknown role ' ~ message.role) -}}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{{- require_all_results() -}}
"""
