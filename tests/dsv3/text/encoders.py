"""Made-up encoder files, with the names of the constants that DeepSeek's have and texts of their own."""

_COMMON = """
import os

raise SystemExit("an encoder file is never run")
dsml_token: str = "｜DSML｜"
thinking_start_token, thinking_end_token = "<x>", "</x>"
thinking_start_token = "<think>"
thinking_end_token = thinking_start_token[:1] + "/think>"
thinking_end_token = "</" + "think>"
response_format_template: str = ("Form {schema}" " is {dsml_token} {{}}")
"""
_LIST = '\n{tool_schemas}\nThat is all.\n"""\n'
V32 = _COMMON + 'TOOLS_SYSTEM_TEMPLATE = """Use <{dsml_token}function_calls>.' + _LIST
V4 = _COMMON + 'TOOLS_TEMPLATE = """Use <{dsml_token}tool_calls>"é" after {thinking_end_token}' + _LIST
PREVIEW = V4 + 'REASONING_EFFORT_MAX = "Think\\n" "hard.\\n\\n"\n'
OFFICIAL = (
    PREVIEW + 'REASONING_EFFORT_PROMPTS = {"low": "", "high": REASONING_EFFORT_MAX, "max": f"{dsml_token}!\\n\\n"}\n'
)


def write(directory, name, text):
    """Writes an encoder file; returns its path."""
    path = directory / "encoding" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, "utf-8")
    return path
