"""Distinguishes the special tokens that a chat template writes from message text that spells the same.

A special token such as `<｜User｜>` structures a prompt. A rendered prompt is one string, in which a message's
`<｜User｜>` looks like the template's own. So the template writes a hidden form of it, and only that is encoded as the
token. It is two NUL, a number and one NUL: messages may contain no NUL, so none has a hidden form, and the ends of two
of them do not form a third with the text between them.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import nodes

NUL = "\0"

# Methods and filters that search a text for their arguments or strip them; a refusal's text is not part of a prompt.
_SEARCHES = frozenset(
    [
        *("split", "rsplit", "partition", "rpartition", "find", "rfind", "index", "rindex", "count", "startswith"),
        *("endswith", "removeprefix", "removesuffix", "strip", "lstrip", "rstrip", "trim", "raise_exception"),
    ]
)
# Fields of a node whose value is compared and never written.
_DECIDING: dict[type[nodes.Node], tuple[str, ...]] = {
    nodes.If: ("test",),
    nodes.CondExpr: ("test",),
    nodes.For: ("test",),
    nodes.Compare: ("expr", "ops"),
    nodes.Test: ("node", "args", "kwargs"),
    nodes.Getitem: ("arg",),
}


class SpecialTokens:
    """A tokenizer's special tokens; `hidden` maps them to their hidden forms.

    Where two of them match a text at one position, the longer one wins.
    """

    def __init__(self, tokens: Sequence[str] = ()):
        self.hidden = {token: f"{NUL}{NUL}{i:x}{NUL}" for i, token in enumerate(tokens)}
        self._shown = {hidden: token for token, hidden in self.hidden.items()}
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def hide(self, text: str) -> str:
        """Replaces every special token in a text by its hidden form."""
        return self._pattern.sub(lambda match: self.hidden[match[0]], text)

    def show(self, text: str) -> str:
        """Replaces every hidden form by the special token; raises ValueError where a NUL is left."""
        if NUL not in text:
            return text
        shown = re.sub(r"\0\0[0-9a-f]+\0", lambda match: self._shown.get(match[0], match[0]), text)
        if NUL in shown:
            raise ValueError("a hidden special token has been cut")
        return shown

    def hide_in(self, template: nodes.Template) -> nodes.Template:
        """Hides the special tokens that a parsed template writes, in place, and returns it.

        Text that is compared or searched for stays as it is: `content.split('</think>')` works on messages.
        """
        for constant in _written(template):
            if isinstance(constant, nodes.TemplateData):
                constant.data = self.hide(constant.data)
            elif isinstance(constant.value, str):
                constant.value = self.hide(constant.value)
        return template


def has_nul(value: Any) -> bool:
    """Returns whether any text in a JSON value contains NUL."""
    if isinstance(value, str):
        return NUL in value
    if isinstance(value, dict):
        return any(has_nul(key) or has_nul(item) for key, item in value.items())
    return isinstance(value, list | tuple) and any(map(has_nul, value))


def _written(node: nodes.Node) -> Iterator[nodes.Const | nodes.TemplateData]:
    """Yields the constants of a template that may become part of a prompt."""
    if isinstance(node, nodes.Const | nodes.TemplateData):
        yield node
    for child in _written_children(node):
        yield from _written(child)


def _written_children(node: nodes.Node) -> Iterator[nodes.Node]:
    name = _called(node)
    if name in _SEARCHES:
        yield from node.iter_child_nodes(only=("node",))
    elif name == "replace":  # the first argument is searched for
        searched = node.args[0] if node.args else None  # type: ignore[attr-defined]
        yield from (child for child in node.iter_child_nodes() if child is not searched)
    else:
        yield from node.iter_child_nodes(exclude=_DECIDING.get(type(node), ()))


def _called(node: nodes.Node) -> str | None:
    """Returns the name of the method, filter or global function that a node calls; macros have names of their own."""
    if isinstance(node, nodes.Filter):
        return node.name
    called = node.node if isinstance(node, nodes.Call) else None
    if isinstance(called, nodes.Getattr):
        return called.attr
    return "raise_exception" if isinstance(called, nodes.Name) and called.name == "raise_exception" else None
