"""Selects the reasoning and tool-call parsers of a model by options, vocabulary and chat template."""

from dsv3.config.server_options import ReasoningParser, ToolCallParser
from dsv3.text.chat_template import uses_tools
from dsv3.text.dialects import (
    DIALECTS,
    END_THINK,
    REASONING_MARKERS,
    REASONING_TABLE,
    THINK,
    Dialect,
    ParserState,
    knows_reasoning,
    start_state,
)
from dsv3.text.grammar import ReasoningSpan
from dsv3.text.parser import DSML, AnswerFormat, AnswerParser, Tools
from dsv3.text.tokenizer import Tokenizer


class Parsers:
    """Makes the parsers for one model's answers.

    `dialect` is that of its tool calls, None if unknown, `dialect_name` its name, and `marker_ids` the ids of its
    markers that are tokens, and of the part of its tags if that is a special one, so that a grammar cannot spell it.
    `splits_reasoning`: reasoning is separated from the content.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None,
        reasoning: ReasoningParser = "auto",
        tools: ToolCallParser = "auto",
    ):
        name = detect_dialect(tokenizer, chat_template) if tools == "auto" else tools
        self.dialect: Dialect | None = DIALECTS.get(name or "")
        self.dialect_name = name if self.dialect is not None else None
        self.splits_reasoning = knows_reasoning(chat_template) if reasoning == "auto" else reasoning != "none"
        self._id_of, self._end = tokenizer.id_of, tokenizer.eos_token_id
        self._always_thinks = reasoning == "deepseek_r1"
        markers, table = ({}, {}) if self.dialect is None else (self.dialect.markers, self.dialect.table)
        self.marker_ids = {marker: i for marker in markers if (i := tokenizer.id_of(marker)) is not None}
        tag_id = tokenizer.id_of(DSML) if self.dialect is not None and self.dialect.tags else None
        if tag_id is not None and tag_id in tokenizer.special_token_ids:
            self.marker_ids[DSML] = tag_id
        if self.splits_reasoning:
            markers, table = {**REASONING_MARKERS, **markers}, {**REASONING_TABLE, **table}
        self._format = AnswerFormat(self.dialect, markers, table, tokenizer.id_of) if markers else None

    def start(self, prompt: str) -> tuple[ParserState, ParserState]:
        """Returns the state in which answers to `prompt` begin, and the one after START."""
        if not self.splits_reasoning:
            return ParserState.CONTENT, ParserState.CONTENT
        return start_state(prompt, self._always_thinks)

    def reasoning(self, prompt: str) -> ReasoningSpan | None:
        """Returns the reasoning at the beginning of answers to `prompt`; None without any."""
        state, then = self.start(prompt)
        if state is ParserState.CONTENT:
            return None
        opened = ParserState.REASONING in (state, then)
        first, last = (marker if (token := self._id_of(marker)) is None else token for marker in (THINK, END_THINK))
        return ReasoningSpan(first, last, opened, optional=not opened, end=self._end)

    def parser(self, start: tuple[ParserState, ParserState], tools: Tools | None) -> AnswerParser | None:
        """Returns a new parser for one answer; None where there is nothing to parse."""
        return None if self._format is None else AnswerParser(self._format, *start, tools)


def detect_dialect(tokenizer: Tokenizer, chat_template: str | None) -> str | None:
    """Returns the name of the dialect in which a model writes calls; None if it is unknown.

    Vocabulary and template decide, not the model's name: fine-tunes have others. A model whose vocabulary lacks the
    markers of V3 writes them as text, if its template renders tools. V3.1 has the tokens of V3, and only its template
    shows that arguments have no fence. GLM-4.7 and GLM-5 have those of GLM-4.5, and their templates show that no line
    feed separates key and value.
    """
    template = chat_template or ""
    if tokenizer.id_of("<|tool_calls_section_begin|>") is not None:
        return "kimi_k2"
    if tokenizer.id_of("<tool_call>") is not None and tokenizer.id_of("<arg_key>") is not None:
        return "glm47" if "</arg_key><arg_value>" in template else "glm45"
    if "｜DSML｜" in template:
        return "deepseek_v4" if "｜DSML｜tool_calls" in template else "deepseek_v32"
    if "<｜tool▁call" in template and (tokenizer.id_of("<｜tool▁calls▁begin｜>") is not None or uses_tools(template)):
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    return None
