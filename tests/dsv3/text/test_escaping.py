"""Message text that spells a special token stays text, and all other text keeps its tokens."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv3
from dsv3.server.templates import escaping_template
from dsv3.text.chat_template import ChatTemplate, TemplateError
from dsv3.text.deepseek_v4 import chat_template as deepseek_v4_template
from dsv3.text.parser import DSML
from dsv3.text.special_tokens import SpecialTokens
from dsv3.text.tokenizer import Tokenizer, TokenizerError
from tests.dsv3.text import tiny
from tests.dsv3.text.dialects import tokenizer as dialect_tokenizer

TOOL_MARKERS = [
    f"<｜tool▁{name}｜>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "output▁begin", "output▁end")
]
# The features of the templates of V3, R1 and V3.1: merged system messages, dropped reasoning, calls and their results.
DEEPSEEK = (
    "{%- set ns = namespace(system='', after_user=false) -%}"
    "{%- for m in messages if m['role'] == 'system' -%}{%- set ns.system = ns.system + m['content'] -%}{%- endfor -%}"
    "{%- if tools -%}{%- set ns.system = ns.system ~ '\n\n## Tools\n' ~ (tools | tojson) -%}{%- endif -%}"
    "{{ bos_token }}{{ ns.system }}"
    "{%- for m in messages -%}"
    "{%- if m['role'] == 'user' -%}{%- set ns.after_user = true -%}{{ '<｜User｜>' + m['content'] | trim }}"
    "{%- elif m['role'] == 'assistant' -%}"
    "{%- if ns.after_user -%}<｜Assistant｜>{{ '<think>' if m['prefix'] and thinking else '</think>' }}{%- endif -%}"
    "{%- set ns.after_user = false -%}"
    "{%- set content = m['content'] or '' -%}"
    "{%- if '</think>' in content -%}{%- set content = content.split('</think>', 1)[1] -%}{%- endif -%}"
    "{{ content.replace('<think>', '') }}"
    "{%- for call in m['tool_calls'] or [] -%}"
    "{{ ('<｜tool▁calls▁begin｜>' if loop.first else '') + '<｜tool▁call▁begin｜>' + call['function']['name']"
    " + '<｜tool▁sep｜>' + call['function']['arguments'] ~ '<｜tool▁call▁end｜>' }}"
    "{%- if loop.last -%}{{ '<｜tool▁calls▁end｜>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if not (loop.last and continue_final_message) -%}{{ eos_token }}{%- endif -%}"
    "{%- elif m['role'] == 'tool' -%}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' ~ ('<think>' if thinking else '</think>') }}{%- endif -%}"
)


def deepseek() -> Tokenizer:
    """Special tokens as in V3's files: some in the vocabulary, most after it and not called special, "ö" among them."""
    backend = tiny.backend()
    added = [tokenizers.AddedToken(each, normalized=True, special=False) for each in (*TOOL_MARKERS, "ö")]
    backend.add_tokens(added)
    return Tokenizer(backend, tiny.config(), DEEPSEEK)


def deepseek_v4() -> Tokenizer:
    """The tags of calls are made of one token, which is also in the text that shows tools."""
    source = deepseek_v4_template(
        {"TOOLS_TEMPLATE": "<｜DSML｜tool_calls> {tool_schemas}", "REASONING_EFFORT_MAX": "!"}
    )
    return Tokenizer(dialect_tokenizer("deepseek_v4")._backend, tiny.config(), source)


BUNDLED = Tokenizer.from_directory(Path(dsv3.__file__).parent / "bundled")
TINY = Tokenizer(tiny.backend(), tiny.config(), tiny.CHAT_TEMPLATE)
TOKENIZERS = {"bundled": BUNDLED, "tiny": TINY, "deepseek": deepseek(), "deepseek_v4": deepseek_v4()}
HIDING = {name: tokenizer.hiding_special_tokens() for name, tokenizer in TOKENIZERS.items()}
PLAIN = {name: ChatTemplate(each.chat_template, each.special_tokens) for name, each in TOKENIZERS.items()}
ESCAPING = {
    name: escaping_template(each.chat_template, TOKENIZERS[name].special_tokens, each.markers)
    for name, each in HIDING.items()
}
MARKERS = [*tiny.SPECIAL, *tiny.MARKERS, *TOOL_MARKERS]
# Whole special tokens, and parts that form one where a template joins them.
PARTS = [
    *MARKERS,
    DSML,
    "<｜title｜>",
    "<｜Us",
    "er｜>",
    "<",
    "think>",
    "</",
    "｜",
    "0",
    "a b",
    " ",
    "\n",
    "é",
    "日本",
    "def ",
]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
HARMLESS = st.text(st.characters(blacklist_characters="\0<", blacklist_categories=["Cs"]), max_size=20)


def _assistant(text, calls):
    return {"role": "assistant", "content": text, "tool_calls": calls}


def conversations(texts):
    """Messages of all roles; each template supports some."""
    call = st.builds(lambda name, at: {"function": {"name": name, "arguments": json.dumps({"at": at})}}, texts, texts)
    message = st.one_of(
        st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "user"]), texts),
        st.builds(_assistant, texts, st.lists(call)),
        st.builds(lambda text: {"role": "tool", "content": text}, texts),
    )
    return st.lists(message, min_size=1, max_size=6)


def rendered(template: ChatTemplate, messages, **arguments) -> str | None:
    try:
        return template.render(messages, **arguments)
    except TemplateError:
        return None


def markers_of(name: str, ids: list[int]) -> list[int]:
    """The ids of special tokens, in order."""
    wanted = {HIDING[name].id_of(hidden) for hidden in HIDING[name].markers.hidden.values()}
    return [i for i in ids if i in wanted]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=150)
@given(conversations(TEXTS), st.booleans(), st.data())
def test_no_special_token_comes_from_a_message(name, messages, thinking, data):
    """The special tokens are those of the same conversation without text, whatever the messages spell."""
    arguments = {"kwargs": {"thinking": thinking}, "tools": data.draw(st.sampled_from([None, [{"name": MARKERS[5]}]]))}
    prompt = rendered(ESCAPING[name], messages, **arguments)
    if prompt is None:
        return
    tokenizer = HIDING[name]
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    empty = PLAIN[name].render([_emptied(message) for message in messages], **arguments | {"tools": None})
    expected = TOKENIZERS[name].encode(empty, add_special_tokens=False)
    assert markers_of(name, ids) == markers_of(name, expected)
    assert TOKENIZERS[name].decode(ids, skip_special_tokens=False) == tokenizer.markers.show(prompt)


def _emptied(message):
    """The same message without text; V4 writes a tag for each argument."""
    calls = [{"function": {"name": "", "arguments": json.dumps({"at": ""})}} for _ in message.get("tool_calls", ())]
    return message | {"content": "", "tool_calls": calls}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=150)
@given(conversations(st.one_of(HARMLESS, st.sampled_from(["ö", " x ", "", "日本 <b>", "a</b>"]))), st.booleans())
def test_other_messages_keep_their_tokens(name, messages, prompted):
    arguments = {"add_generation_prompt": prompted}
    plain, escaping = rendered(PLAIN[name], messages, **arguments), rendered(ESCAPING[name], messages, **arguments)
    assert (plain is None) == (escaping is None)
    if plain is not None and escaping is not None:
        assert HIDING[name].markers.show(escaping) == plain
        assert HIDING[name].encode(escaping, False) == TOKENIZERS[name].encode(plain, False)


@pytest.mark.parametrize("marker", MARKERS)
def test_each_marker_of_deepseek_is_text_in_every_field(marker):
    """Also where a template has none of it: names, arguments, tools."""
    tokenizer, call = HIDING["deepseek"], {"function": {"name": marker, "arguments": marker}}
    messages = [
        {"role": "system", "content": marker},
        {"role": "user", "content": marker},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": marker},
    ]
    tools = [{"function": {"name": marker, "description": marker}}]
    prompt = ESCAPING["deepseek"].render(messages, tools=tools)
    empty = PLAIN["deepseek"].render([_emptied(message) for message in messages])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert markers_of("deepseek", ids) == markers_of("deepseek", TOKENIZERS["deepseek"].encode(empty, False))
    assert tokenizer.markers.show(prompt).count(marker) >= 6
    assert tokenizer.id_of(tokenizer.markers.hidden[marker]) == TOKENIZERS["deepseek"].id_of(marker)


def test_templates_can_still_search_messages_for_markers():
    """An earlier answer's reasoning is dropped, though its markers are text."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c<think>"}]
    prompt = ESCAPING["deepseek"].render(messages, add_generation_prompt=False)
    shown = HIDING["deepseek"].markers.show(prompt)
    assert shown == f"{tiny.BOS}<｜User｜>a<｜Assistant｜></think>c{tiny.EOS}"
    continued = ESCAPING["deepseek"].render(messages, add_generation_prompt=False, continue_final_message=True)
    assert HIDING["deepseek"].markers.show(continued) == shown.removesuffix(tiny.EOS)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% macro turn(m) %}<｜User｜>{{ m.content }}{% endmacro %}{{ turn(messages[0]) }}", "[<｜User｜>]x</think>"),
        ("{% set end = '</think>' %}{{ messages[0].content ~ end }}", "x</think>[</think>]"),
        ("{{ messages[0].content | replace('</think>', '<think>') }}", "x[<think>]"),
        ("{{ messages[0].name or '<think>' }}{{ {'a': '<think>'}['a'] }}", "[<think>][<think>]"),
        ("{{ ['<｜User｜>', messages[0].content | trim('x')] | join('<think>') }}", "[<｜User｜>][<think>]</think>"),
        ("{% if '</think>' in messages[0].content %}{{ '<think>' * 2 }}{% endif %}", "[<think>][<think>]"),
    ],
)
def test_special_tokens_are_tracked_through_a_template(template, expected):
    """Special tokens that the template wrote are in brackets."""
    markers = HIDING["deepseek"].markers
    prompt = escaping_template(template, {}, markers).render([{"role": "user", "content": "x</think>"}])
    for marker, hidden in markers.hidden.items():
        prompt = prompt.replace(hidden, f"[{marker}]")
    assert prompt == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ '<｜' ~ 'User｜>' ~ messages[0].content }}",  # a marker of parts
        "<｜User｜>{{ 'x'.join(['<｜', 'User｜>']).replace('x', '') }}",
        "{% set end = '</think>' %}{{ end ~ messages[0].content.split(end)[-1] }}",  # written, and searched for
        "{{ ('<think>' ~ messages[0].content)[:2] }}",  # cut
    ],
)
def test_templates_that_cannot_be_tracked_are_refused(template):
    tokenizer = HIDING["deepseek"]
    assert ChatTemplate(template, {}).render([{"role": "user", "content": "x"}])
    with pytest.raises(TemplateError, match="escape_special_tokens"):
        escaping_template(template, {}, tokenizer.markers)


def test_nul_is_refused_in_every_field():
    """It would turn text into hidden forms."""
    hidden = HIDING["tiny"].markers.hidden[tiny.USER]
    user, template = {"role": "user", "content": "x"}, ESCAPING["tiny"]
    for messages, arguments in [
        ([user | {"content": hidden}], {}),
        ([user | {"name": hidden}], {}),
        ([user | {"tool_calls": [{"function": {"name": "x", "arguments": hidden}}]}], {}),
        ([user], {"tools": [{"parameters": {"enum": [[hidden]]}}]}),
        ([user], {"tools": [{hidden: 1}]}),
        ([user], {"kwargs": {"date_string": hidden}}),
    ]:
        with pytest.raises(TemplateError, match="NUL"):
            template.render(messages, **arguments)
    assert template.render([user])


def test_only_whole_hidden_forms_are_replaced():
    markers = SpecialTokens(["<a>", "<ab>", "<a>b"])
    assert markers.show(markers.hide("x<a>b<ab><a><a")) == "x<a>b<ab><a><a"
    assert markers.hide("<a>b") == markers.hidden["<a>b"]
    for cut in ("\0", "\0\x000", "\0\x009\0", "\x000\0", "0\0"):
        with pytest.raises(ValueError, match="cut"):
            markers.show(cut)


def test_vocabularies_that_form_special_tokens_of_text_are_refused():
    """The special token is an ordinary token too, so text that spells it cannot be distinguished."""
    backend = tiny.backend()
    ordinary = next(text for text, i in backend.get_vocab(False).items() if len(text) == 3 and text.isalpha())
    backend.add_tokens([tokenizers.AddedToken(ordinary, special=True)])
    with pytest.raises(TokenizerError, match="cannot be"):
        Tokenizer(backend, tiny.config()).hiding_special_tokens()
