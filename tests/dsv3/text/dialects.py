"""Writes calls as models do: the counterpart of the parser."""

import functools
import json

from dsv3.sampling_params import SamplingParams
from dsv3.text.deltas import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart, merge_deltas
from dsv3.text.dialects import DIALECTS
from dsv3.text.output import OutputProcessor
from dsv3.text.parser import DSML, AnswerParser, Tools
from dsv3.text.parsers import Parsers
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.text import tiny

NAMES = sorted(DIALECTS)
TOOLS, GREEDY = Tools(), SamplingParams()
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] if reasoning_effort != 'low' %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.reasoning_content ~ '</think>' if m.reasoning_content else '' }}"
    "{{ m.content or '' }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments }}<｜tool▁call▁end｜>"
    "{% endfor %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}"
)


def markers(dialect):
    """The texts that are tokens in a vocabulary of the dialect."""
    known = DIALECTS[dialect]
    return [*tiny.MARKERS, *(marker for marker in known.markers if len(marker) > 1), *([DSML] if known.tags else [])]


@functools.cache
def tokenizer(dialect, by_id=True):
    """A tokenizer with the markers of a dialect as tokens, or without any."""
    own = [marker for marker in markers(dialect) if marker not in tiny.SPECIAL]
    return Tokenizer(tiny.backend(markers=own if by_id else []), tiny.config())


def write(directory):
    """Writes the tokenizer and the template of a model that calls as DeepSeek-V3.1 does; returns the directory."""
    tokenizer("deepseek_v31")._backend.save(str(directory / "tokenizer.json"))
    config = tiny.config() | {"chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory


@functools.cache
def byte_ids(dialect, by_id=True):
    """The tokens of single bytes."""
    known = tokenizer(dialect, by_id)
    pairs = ((known.token_bytes(i), i) for i in range(4, known.vocab_size))
    return {data: i for data, i in pairs if len(data) == 1}


def spelled(dialect, text, by_id=True):
    """The tokens of a text, one for each byte."""
    return [byte_ids(dialect, by_id)[bytes([byte])] for byte in text.encode()]


def tokens(dialect, text, by_id=True):
    """The tokens of a text: markers that are tokens as one, the rest as bytes."""
    known = markers(dialect) if by_id else []
    ids = []
    while text:
        marker = next((marker for marker in known if text.startswith(marker)), None)
        delta = marker or text[0]
        ids += [tokenizer(dialect, by_id).id_of(marker)] if marker else spelled(dialect, delta, by_id)
        text = text[len(delta) :]
    return ids


def written(dialect, calls, content=""):
    """The text of a model that makes these calls, each (name, arguments)."""
    names = [name for name, _ in calls]
    texts = [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]
    match dialect:
        case "deepseek_v3":
            parts = [
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
                for name, text in zip(names, texts, strict=True)
            ]
            return f"{content}<｜tool▁calls▁begin｜>{chr(10).join(parts)}<｜tool▁calls▁end｜>"
        case "deepseek_v31":
            parts = [
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
                for name, text in zip(names, texts, strict=True)
            ]
            return f"{content}<｜tool▁calls▁begin｜>{''.join(parts)}<｜tool▁calls▁end｜>"
        case "deepseek_v32" | "deepseek_v4":
            block = "function_calls" if dialect == "deepseek_v32" else "tool_calls"
            parts = [f'<｜DSML｜invoke name="{name}">\n{_parameters(args)}\n</｜DSML｜invoke>' for name, args in calls]
            return f"{content}\n\n<｜DSML｜{block}>\n{chr(10).join(parts)}\n</｜DSML｜{block}>"
        case "kimi_k2":
            parts = [
                f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
                for i, (name, text) in enumerate(zip(names, texts, strict=True))
            ]
            return f"{content}<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"
        case "glm45" | "glm47":
            line = "\n" if dialect == "glm45" else ""
            parts = [
                f"<tool_call>{name}{line}{line.join(_glm(k, v) for k, v in args.items())}{line}</tool_call>"
                for name, args in calls
            ]
            return f"{content}{line.join(parts)}"
    raise AssertionError(dialect)


def _parameters(arguments):
    return "\n".join(
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>"
        for key, value in arguments.items()
    )


def _glm(key, value):
    text = value if isinstance(value, str) else json.dumps(value)
    return f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>"


def parser(dialect, tools=TOOLS, prompt="<｜Assistant｜></think>", reasoning="deepseek_v3", by_id=True):
    """A parser whose ids are numbers."""
    parsers = Parsers(tokenizer(dialect, by_id), None, reasoning, dialect)
    made = parsers.parser(parsers.start(prompt), tools)
    assert isinstance(made, AnswerParser)
    ids = iter(range(10**9))
    made._new_id = lambda: f"call_{next(ids)}"
    return made


class Answer:
    """The output for tokens that are pushed in parts of `sizes`, then the rest; `finish` is the engine's reason."""

    def __init__(self, dialect, ids, sizes=(), sampling=GREEDY, finish="stop", by_id=True, eos=True, **settings):
        known = tokenizer(dialect, by_id)
        stream = OutputProcessor(known, sampling, parser(dialect, by_id=by_id, **settings))
        ids = [*ids, known.eos_token_id] if finish == "stop" and eos else list(ids)
        self.deltas, self.num_tokens, self.num_reasoning_tokens, start = [], 0, 0, 0
        for size in [*sizes, len(ids) + 1]:
            part = ids[start : start + size]
            start += len(part)
            last = start == len(ids)
            delta = stream.push(part, finish if last else None, ids[-1] if last and finish == "stop" else None)
            assert merge_deltas(delta.deltas) == delta.deltas
            self.deltas += delta.deltas
            self.num_tokens += delta.num_tokens
            self.num_reasoning_tokens += delta.num_reasoning_tokens
            if delta.finish_reason is not None:
                break
        self.deltas = merge_deltas(self.deltas)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_dropped = delta.num_dropped_calls

    def __eq__(self, other):
        return vars(self) == vars(other)

    def __repr__(self):
        return repr(vars(self))

    @property
    def content(self):
        return "".join(delta.text for delta in self.deltas if isinstance(delta, TextDelta))

    @property
    def reasoning(self):
        return "".join(delta.text for delta in self.deltas if isinstance(delta, ReasoningDelta))

    @property
    def calls(self):
        """(name, arguments as text) of each call."""
        return [(call.name, self.arguments(call.index)) for call in self.deltas if isinstance(call, ToolCallStart)]

    def arguments(self, index):
        parts = [p.text for p in self.deltas if isinstance(p, ToolArgumentsDelta) and p.index == index]
        return "".join(parts)

    @property
    def shown(self):
        """All text that a client gets."""

        return "".join(p.name + p.id if isinstance(p, ToolCallStart) else p.text for p in self.deltas)
