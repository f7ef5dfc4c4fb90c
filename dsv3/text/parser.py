"""The tool-call and reasoning parser: one state machine that runs a dialect's table over an answer."""

import json
import re
import secrets
from collections.abc import Callable, Mapping

import msgspec

from dsv3.text.deltas import (
    AnswerDelta,
    RawDelta,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    merge_deltas,
)
from dsv3.text.dialects import Act, Dialect, Mark, ParserState, Table

# Longer text is not a tag: names of functions and arguments have at most 256 characters.
_MAX_TAG_CHARS = 1024
DSML = "｜DSML｜"
_TAG_BEGINNINGS = (f"<{DSML}", f"</{DSML}")
# The second alternative is the end of an answer that was cut off inside a character, the third belongs to no tag.
_TAG = rf"</?｜DSML｜(?:[^<>]{{0,{_MAX_TAG_CHARS}}}>)?|</?｜D?S?M?L?(?=\ufffd)|｜DSML｜"
_TAG_NAME = re.compile(r"<(/?)｜DSML｜\s*(\w*)")
_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"([^"]*)"')
# V3.2, V4 and V4.1 have different names for the block, and models mix them up.
_BLOCKS = frozenset({"function_calls", "tool_calls", "toolcalls", "calls", "tool"})
_TAGS = {
    **{("", name): Mark.CALLS for name in _BLOCKS},
    **{("/", name): Mark.END_CALLS for name in _BLOCKS},
    ("", "invoke"): Mark.CALL,
    ("/", "invoke"): Mark.END_CALL,
    ("", "parameter"): Mark.VALUE,
    ("/", "parameter"): Mark.END_VALUE,
}


class MarkMatch(msgspec.Struct, frozen=True, gc=False):
    """A mark at `start` to `end` of a text, with a tag's attributes.

    `ends` is the mark that a self-closing tag implies.
    """

    mark: Mark
    start: int = 0
    end: int = 0
    name: str = ""
    is_string: bool | None = None
    ends: Mark | None = None


class MarkFinder:
    """Finds marks and DSML tags in text, in time linear in the text."""

    def __init__(self, spellings: Mapping[str, Mark], tags: bool):
        self._spellings = spellings
        self._pattern = re.compile("|".join([*map(re.escape, spellings), *([_TAG] if tags else [])]))
        self._beginnings = [*spellings, *((*_TAG_BEGINNINGS, DSML) if tags else ())]
        self._first_chars = frozenset(text[0] for text in self._beginnings)
        self._longest = max(map(len, self._beginnings))

    def find(self, text: str, start: int) -> tuple[MarkMatch | None, int]:
        """Returns the first mark from `start` on and its position.

        Without one: None, and the position from which the text may become a mark.
        """
        match = self._pattern.search(text, start)
        if match is None:
            return None, self._possible(text, start)
        if (mark := self._spellings.get(match[0])) is not None:
            return MarkMatch(mark, match.start(), match.end()), match.start()
        if match[0] in _TAG_BEGINNINGS and len(text) - match.end() <= _MAX_TAG_CHARS and "<" not in text[match.end() :]:
            return None, match.start()
        return _read_tag(match), match.start()

    def _possible(self, text: str, start: int) -> int:
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first_chars and any(b.startswith(text[at:]) for b in self._beginnings):
                return at
        return len(text)


def _read_tag(match: re.Match[str]) -> MarkMatch:
    if (named := _TAG_NAME.match(match[0])) is None:
        return MarkMatch(Mark.OTHER, match.start(), match.end())
    closing, name = named.groups()
    attributes = dict(_ATTRIBUTE.findall(match[0]))
    is_string = {"true": True, "false": False}.get(attributes.get("string", ""))
    mark = _TAGS.get((closing, name), Mark.OTHER)
    ends = _TAGS.get(("/", name)) if match[0].endswith("/>") and not closing else None
    return MarkMatch(mark, match.start(), match.end(), attributes.get("name", ""), is_string, ends)


# A partial fence before JSON, and a whole one; no JSON begins with a back quote.
_FENCE_SO_FAR = re.compile(r"`{0,2}|```\s*(?:j|js|jso|json\s*)?")
_FENCE = re.compile(r"```\s*(?:json\s*)?")
_MAX_FENCE = 64
_WRAPPERS = ("arguments", "input")
_CLOSING_CHARS = " \t\r\n`"


class JsonArguments:
    """Passes JSON through as it comes, without a fence (```json) and white space around it."""

    def __init__(self) -> None:
        self._has_begun = False
        self._opening = ""
        self._closing: list[str] = []

    def push(self, text: str) -> str:
        """Returns the JSON that is certain after more text."""
        if not self._has_begun:
            text = (self._opening + text).lstrip()
            if _FENCE_SO_FAR.fullmatch(text) and len(text) <= _MAX_FENCE:
                self._opening = text
                return ""
            self._has_begun = True
            fence = _FENCE.match(text)
            text = text[fence.end() :] if fence is not None and fence.end() <= _MAX_FENCE else text
        body = text.rstrip(_CLOSING_CHARS)
        if body:
            body = "".join([*self._closing, body])
            self._closing.clear()
        self._closing.append(text[len(text.rstrip(_CLOSING_CHARS)) :])
        return body

    def end(self) -> str:
        """Returns "{}" for a call without arguments."""
        return "" if self._has_begun else "{}"


class Parameters:
    """Builds a JSON object of arguments that come one by one.

    A value known to be text is streamed. Any other waits until it is complete: it is JSON if it parses as that, else
    text. `schema` maps known arguments to whether each is a string; None if that is open. Models sometimes write all
    arguments as one, under a name that the schema does not have: these are unwrapped.
    """

    def __init__(self, schema: Mapping[str, bool | None]):
        self._schema = schema
        self._count = 0
        self._streams = self._is_whole = False
        self._head = ""  # of a value that may be all arguments
        self._value: list[str] | None = None
        self._outside: list[str] = []

    def begin_value(self, key: str, is_string: bool | None) -> str:
        """Returns the JSON that begins an argument; `is_string` is the model's own attribute."""
        self._value = []
        if self._is_whole:
            return ""
        head = ("{" if self._count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        if self._count == 0 and key in _WRAPPERS and self._schema and key not in self._schema:
            self._head, head = head, ""
        self._count += 1
        self._streams = not self._head and (self._schema.get(key) if is_string is None else is_string) is True
        return head + '"' if self._streams else head

    def push(self, text: str) -> str:
        """Returns the JSON that is certain after more text of the value."""
        if self._value is None:
            self._outside.append(text)
            return ""
        if self._streams and not self._is_whole:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._value.append(text)
        return ""

    def end_value(self) -> str:
        """Returns the JSON that ends the value; "" if no value has begun."""
        if self._value is None:
            return ""
        text, self._value = "".join(self._value), None
        head, self._head = self._head, ""
        if self._is_whole:
            return ""
        if self._streams:
            return '"'
        if head and _is_object(text):
            self._is_whole = True
            return text.strip()
        return head + (text.strip() if _is_json(text) else json.dumps(text, ensure_ascii=False))

    def end(self) -> str:
        """Returns the end of the object; a model may have written all of it as JSON, outside any argument."""
        if self._count:
            tail = self.end_value()
            return tail if self._is_whole else tail + "}"
        body = "".join(self._outside)
        return body.strip() if _is_object(body) else "{}"


def _is_object(text: str) -> bool:
    return text.lstrip().startswith("{") and _is_json(text)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


MAX_NAME_CHARS = 256
# The limit on calls in a message of a request.
MAX_CALLS = 128
_NAME_WITH_ID = re.compile(r"(?:functions\.)?(?P<name>.*?)(?P<number>:\d+)?", re.DOTALL)


class Tools(msgspec.Struct, frozen=True):
    """The tools of a request, as far as the parser needs them.

    `parameters` maps each tool to its arguments, and those to whether they are strings; None if the schema leaves it
    open.
    """

    parameters: Mapping[str, Mapping[str, bool | None]] = {}
    parallel: bool = True


class AnswerFormat:
    """A dialect for one vocabulary: marks that are tokens, and marks to find in text. Parsers share it."""

    def __init__(
        self, dialect: Dialect | None, markers: Mapping[str, Mark], table: Table, id_of: Callable[[str], int | None]
    ):
        ids = {marker: id_of(marker) for marker in markers}
        self.dialect = dialect
        self.table = table
        self.marks_by_id = {token_id: markers[marker] for marker, token_id in ids.items() if token_id is not None}
        tag_id = id_of(DSML) if dialect is not None and dialect.tags else None
        self.text_ids = frozenset() if tag_id is None else frozenset([tag_id])
        in_text = {marker: mark for marker, mark in markers.items() if ids[marker] is None}
        self._finders = {state: self._finder(state, in_text) for state in ParserState}

    def finder(self, state: ParserState) -> MarkFinder | None:
        """Returns the finder of a state's marks in text; None without such marks."""
        return self._finders[state]

    def _finder(self, state: ParserState, in_text: Mapping[str, Mark]) -> MarkFinder | None:
        wanted = {marker: mark for marker, mark in in_text.items() if (state, mark) in self.table}
        tags = self.dialect is not None and self.dialect.tags
        return MarkFinder(wanted, tags) if wanted or tags else None


class AnswerParser:
    """Parses reasoning and tool calls of an answer. Marks are dropped; text that may be part of one is pending.

    `state` is the state at the beginning, `then` the one after START. Without `tools` calls are dropped. `new_id` makes
    the id of a call where the dialect has none.
    """

    def __init__(
        self,
        form: AnswerFormat,
        state: ParserState,
        then: ParserState,
        tools: Tools | None,
        new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ):
        self._format = form
        self.marker_ids: Mapping[int, Mark] = form.marks_by_id
        """The tokens that come as `SpecialToken`."""
        self.text_ids = form.text_ids
        """The tokens that are part of a tag: the parser needs their text, even where they are special."""
        self._state, self._then = state, then
        self._tools = tools
        self._new_id = new_id
        self._out: list[AnswerDelta] = []
        self._pending = ""  # text that may be part of a mark
        self._passes_text = False  # text is emitted at once, unchanged
        self._blank: list[str] = []  # white space that is dropped if a call follows
        self._collected: list[str] = []  # a name
        self._key = ""
        self._arguments: JsonArguments | Parameters = JsonArguments()
        self._call: ToolCallStart | None = None  # the one that is emitted
        self._num_begun = self._num_emitted = 0
        self.num_calls = 0
        """Complete calls that were emitted."""
        self.num_dropped = 0
        """Calls that were dropped: without a name, not requested, or more than allowed."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the model is thinking."""
        return self._state is ParserState.REASONING or (
            self._state is ParserState.START and self._then is ParserState.REASONING
        )

    def push(self, delta: RawDelta) -> list[AnswerDelta]:
        """Returns the deltas that are certain after one more."""
        if isinstance(delta, TextDelta):
            if self._passes_text:  # the usual case
                return [delta if self._state is ParserState.CONTENT else ReasoningDelta(delta.text)]
            self._read(delta.text)
        else:
            self._flush_pending()
            self._apply(MarkMatch(self._format.marks_by_id[delta.token_id]))
        self._passes_text = self._format.finder(self._state) is None and (
            self._state is ParserState.REASONING or (self._state is ParserState.CONTENT and self._tools is None)
        )
        out, self._out = self._out, []
        return merge_deltas(out)

    def finish(self) -> list[AnswerDelta]:
        """Returns the pending deltas; arguments that end here are incomplete, and must not end with half a marker."""
        if self._state in (ParserState.ARGUMENTS, ParserState.PARAMETERS, ParserState.VALUE):
            self._pending = ""
        self._flush_pending()
        if self._state is ParserState.START:
            self._state = self._then
        if self._state is ParserState.REASONING or not self._num_begun:
            self._emit_text("".join(self._blank))
        out, self._out = self._out, []
        return merge_deltas(out)

    def _flush_pending(self) -> None:
        """Writes pending text, which is not part of a mark; drops the beginning of a tag."""
        text, self._pending = self._pending, ""
        if not text:
            return
        if self._state is ParserState.START:
            self._leave_start()
        if not text.startswith(("<｜", "</｜")):
            self._write(text)

    def _read(self, text: str) -> None:
        """Processes text up to what may be part of a mark."""
        text, at = self._pending + text, 0
        self._pending = ""
        while at < len(text):
            if self._state is ParserState.START:
                body = text[at:].lstrip()
                self._blank.append(text[at : len(text) - len(body)])
                at = len(text) - len(body)
            finder = self._format.finder(self._state)
            found, end = (None, len(text)) if finder is None else finder.find(text, at)
            if self._state is ParserState.START and end > at:
                self._leave_start()
                continue
            if end > at:
                self._write(text[at:end])
            if found is None:
                self._pending = text[end:]
                return
            self._apply(found)
            at = found.end

    def _leave_start(self) -> None:
        """Leaves START; the white space so far becomes part of the answer."""
        blank, self._blank = "".join(self._blank), []
        self._state = self._then
        if blank:
            self._write(blank)

    def _write(self, text: str) -> None:
        match self._state:
            case ParserState.CONTENT if self._tools is not None:
                body = text.rstrip()
                if body:
                    self._emit_text("".join([*self._blank, body]))
                    self._blank.clear()
                self._blank.append(text[len(body) :])
            case ParserState.CONTENT | ParserState.REASONING:
                self._emit_text(text)
            case ParserState.KIND | ParserState.NAME | ParserState.KEY:
                self._collected.append(text)
            case ParserState.ARGUMENTS | ParserState.PARAMETERS | ParserState.VALUE:
                self._emit_arguments(self._arguments.push(text))

    def _apply(self, found: MarkMatch) -> None:
        """Applies a mark's transition in the current state."""
        step = self._format.table.get((self._state, found.mark))
        if step is None:
            return
        acts, state = step
        self._blank.clear()
        for act in acts:
            self._do(act, found, state)
        self._collected.clear()
        self._state = state
        if found.ends is not None:
            self._apply(MarkMatch(found.ends))

    def _do(self, act: Act, found: MarkMatch, state: ParserState) -> None:
        match act:
            case Act.START:
                self._begin_call(found.name or self._text())
                self._arguments = JsonArguments() if state is ParserState.ARGUMENTS else Parameters(self._schema())
            case Act.END:
                self._emit_arguments(self._arguments.end())
                self.num_calls += self._call is not None
                self._call = None
            case Act.DROP:
                self.num_dropped += 1
            case Act.KEY:
                self._key = self._text()
            case Act.VALUE | Act.END_VALUE:
                assert isinstance(self._arguments, Parameters)
                text = self._arguments.end_value()
                if act is Act.VALUE:
                    text += self._arguments.begin_value(found.name or self._key, found.is_string)
                self._emit_arguments(text)

    def _text(self) -> str:
        return "".join(self._collected).strip()

    def _begin_call(self, written: str) -> None:
        """Emits the start of a call, unless it has no name or is not allowed."""
        self._num_begun += 1
        name, call_id = self._read_name(written[: MAX_NAME_CHARS + 1])
        allowed = 0 if self._tools is None else MAX_CALLS if self._tools.parallel else 1
        if not name or len(name) > MAX_NAME_CHARS or self._num_emitted >= allowed:
            self.num_dropped += 1
            self._call = None
            return
        self._call = ToolCallStart(self._num_emitted, call_id, name)
        self._num_emitted += 1
        self._out.append(self._call)

    def _read_name(self, written: str) -> tuple[str, str]:
        """Returns name and id of a call."""
        if self._format.dialect is None or not self._format.dialect.names_carry_ids:
            return written, self._new_id()
        match = _NAME_WITH_ID.fullmatch(written)
        assert match is not None  # it matches any text
        name, known = match["name"], self._tools.parameters if self._tools is not None else {}
        if name.isdecimal() and name not in known:  # a number alone means the only tool
            name = next(iter(known)) if len(known) == 1 else ""
        is_id = match["number"] is not None and written.startswith("functions.")
        return name, written if is_id else f"functions.{name}:{self._num_begun - 1}"

    def _schema(self) -> Mapping[str, bool | None]:
        """Returns the known arguments of the current call."""
        return {} if self._call is None or self._tools is None else self._tools.parameters.get(self._call.name, {})

    def _emit_text(self, text: str) -> None:
        if text:
            self._out.append(ReasoningDelta(text) if self._state is ParserState.REASONING else TextDelta(text))

    def _emit_arguments(self, text: str) -> None:
        if text and self._call is not None:
            self._out.append(ToolArgumentsDelta(self._call.index, text))
