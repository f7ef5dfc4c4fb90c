"""The bundled model's byte-level BPE tokenizer: special tokens, chat template, training and configuration file."""

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from dsv3.text.dialects import DIALECTS

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
SPECIAL_TOKENS = (BOS, EOS, PAD, USER, ASSISTANT)
"""Special tokens; a token's index here is its id."""
BOS_ID, EOS_ID, PAD_ID, USER_ID, ASSISTANT_ID = range(len(SPECIAL_TOKENS))

# A line break and the following indentation are one piece, so a statement begins with the same token at every depth.
# Underscores belong to names.
PIECES = r"\n+ *| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"

_DIALECT = DIALECTS["deepseek_v3"]
# The preamble with the tools ends with a line feed, which `{%-` strips if jinja has not.
CHAT_TEMPLATE = (
    (_DIALECT.preamble or "")
    + """\
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif -%}
{%- macro content(message) -%}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['role'] != 'assistant' -%}
{{- raise_exception('the content of a message of the role ' + message['role'] + ' must be a text') -}}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- for message in messages if message['role'] == 'system' -%}
{{- content(message) -}}
{%- endfor -%}
{%- set told = namespace(results=false) -%}
{%- for message in messages if message['role'] != 'system' -%}
{%- if told.results and message['role'] != 'tool' -%}
{{- '<｜tool▁outputs▁end｜>' -}}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{- '<｜User｜>' + content(message) -}}
{%- elif message['role'] == 'assistant' -%}
{{- ('' if told.results else '<｜Assistant｜>') + content(message) -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' -}}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' -}}
{{- arguments if arguments is string else arguments | tojson -}}
{{- '\\n```<｜tool▁call▁end｜>' -}}
{{- '<｜tool▁calls▁end｜>' if loop.last -}}
{%- endfor -%}
{{- eos_token -}}
{%- elif message['role'] == 'tool' -%}
{{- '\\n' if told.results else '<｜tool▁outputs▁begin｜>' -}}
{{- '<｜tool▁output▁begin｜>' + content(message) + '<｜tool▁output▁end｜>' -}}
{%- else -%}
{{- raise_exception('this model knows the roles system, user, assistant and tool, not ' + message['role']) -}}
{%- endif -%}
{%- set told.results = message['role'] == 'tool' -%}
{%- endfor -%}
{{- '<｜tool▁outputs▁end｜>' if told.results -}}
{%- if add_generation_prompt and not told.results -%}
{{- '<｜Assistant｜>' -}}
{%- endif -%}"""
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of exactly `vocab_size` ids; special tokens come first.

    Raises ValueError if the text is too short for that many ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}; give more text")
    return tokenizer


def _post_processor() -> processors.Sequence:
    """Returns the post-processor that adds bos with special tokens.

    This runtime uses `add_bos_token`, which transformers ignores for this class of tokenizers.
    """
    begin = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)])
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])


def tokenizer_config(model_max_length: int) -> dict[str, Any]:
    """Returns `tokenizer_config.json`: plain prompts get bos by `add_bos_token`, chats by the template."""
    token = {"__type": "AddedToken", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": {**token, "content": BOS},
        "eos_token": {**token, "content": EOS},
        "pad_token": {**token, "content": PAD},
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }


def encode_chat(tokenizer: Tokenizer, question: str, answer: str) -> list[int]:
    """Returns the ids of a conversation of one turn, equal to the rendered template."""
    return [
        BOS_ID,
        USER_ID,
        *tokenizer.encode(question, add_special_tokens=False).ids,
        ASSISTANT_ID,
        *tokenizer.encode(answer, add_special_tokens=False).ids,
        EOS_ID,
    ]
