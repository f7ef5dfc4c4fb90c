"""The texts of a checkpoint's message encoder, `encoding/encoding_*.py`, for chat templates of DeepSeek-V3.2 and V4.

A model was trained with these texts, so its prompts need them to the character. The file is parsed, and never imported
or run: only assignments of constant strings count, and of mappings from string to string.
"""

import ast
import string
from collections.abc import Iterable, Mapping
from pathlib import Path

from dsv3.files import open_regular

Constants = Mapping[str, str | Mapping[str, str]]
_MAX_BYTES = _MAX_CHARS = 2**20


class EncoderFileError(ValueError):
    """The encoder file cannot be read or is no Python, or a template in it lacks a gap."""


class _NotConstant(Exception):
    """An expression is not a constant string, or a mapping of these."""


def read_constants(path: Path) -> Constants:
    """Returns the constants that an encoder file assigns, by name; none without a file.

    A constant is a string, a sum of strings, an f-string or `"...".format(name=...)` of constants, or a mapping of
    strings. Any other assignment is left out, and takes back an earlier one of the same name.

    Raises:
      EncoderFileError: the file cannot be read, is no Python, or is longer than 1 MiB, or makes a string that is.
    """
    if not path.is_file():
        return {}
    try:
        with open_regular(path) as file:
            source = file.read(_MAX_BYTES + 1)
        if len(source) > _MAX_BYTES:
            raise EncoderFileError(f"{path}: is longer than {_MAX_BYTES} bytes")
        body = ast.parse(source).body
    except OSError as error:
        raise EncoderFileError(f"{path}: cannot be read: {error.strerror}") from None
    except EncoderFileError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise EncoderFileError(f"{path}: cannot be parsed: {error}") from None
    known: dict[str, str | Mapping[str, str]] = {}
    for statement in body:
        try:
            _assign(statement, known)
        except EncoderFileError as error:
            raise EncoderFileError(f"{path}: line {statement.lineno}: {error}") from None
    return known


def _assign(statement: ast.stmt, known: dict[str, str | Mapping[str, str]]) -> None:
    """Applies one statement to the `known` constants."""
    match statement:
        case ast.Assign(targets=targets, value=value):
            pass
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            targets = [target]
        case ast.AugAssign(target=ast.Name() as target, op=operator, value=added):
            targets, value = [target], ast.BinOp(target, operator, added)
        case _:
            return
    try:
        found = _mapping(value, known) if isinstance(value, ast.Dict) else _string(value, known)
    except (_NotConstant, RecursionError):
        found = None
    for name in (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)):
        known.pop(name, None)
    if found is not None:
        known |= {target.id: found for target in targets if isinstance(target, ast.Name)}


def _mapping(node: ast.Dict, known: Constants) -> dict[str, str]:
    found = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:  # **other
            raise _NotConstant
        found[_string(key, known)] = _string(value, known)
    return found


def _string(node: ast.expr, known: Constants) -> str:
    """Returns the string that an expression of constants makes; raises _NotConstant for any other expression."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.Name(id=name):
            found = known.get(name)
            if isinstance(found, str):
                return found
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _joined([_string(left, known), _string(right, known)])
        case ast.JoinedStr(values=parts):
            return _joined(_string(part, known) for part in parts)
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            return _string(value, known)
        case ast.Call(func=ast.Attribute(value=template, attr="format"), args=[], keywords=keywords):
            return _filled(
                _string(template, known), {each.arg: _string(each.value, known) for each in keywords if each.arg}
            )
    raise _NotConstant


def _filled(template: str, values: Constants) -> str:
    """Fills the gaps {name} of a template, as `str.format` does; raises _NotConstant for any other gap."""
    parts: list[str] = []
    try:
        for text, name, form, conversion in string.Formatter().parse(template):
            parts.append(text)
            if name is not None:
                value = values.get(name)
                if not isinstance(value, str) or form or conversion:
                    raise _NotConstant(name)
                parts.append(value)
    except ValueError as error:  # a lone brace
        raise _NotConstant(str(error)) from None
    return _joined(parts)


def _joined(parts: Iterable[str]) -> str:
    """Joins texts; raises EncoderFileError for more than 1 MiB of them, before it builds the whole."""
    found, count = [], 0
    for part in parts:
        count += len(part)
        if count > _MAX_CHARS:
            raise EncoderFileError(f"a string has more than {_MAX_CHARS} characters")
        found.append(part)
    return "".join(found)


def around_gap(constants: Constants, name: str, gap: str) -> tuple[str, str] | None:
    """Returns the text before and after the gap {gap} of a template; None where the file has no such template.

    The template's other gaps are filled with constants of the same file.

    Raises:
      EncoderFileError: the template lacks the gap, has it twice, or has one that no constant fills.
    """
    template = constants.get(name)
    if not isinstance(template, str):
        return None
    try:
        text = _filled(template, {**constants, gap: "\0"})
    except _NotConstant as error:
        raise EncoderFileError(f"{name} has the gap {str(error)!r}, which no constant of the file fills") from None
    if text.count("\0") != 1:
        raise EncoderFileError(f"{name} has the gap {gap!r} {text.count(chr(0))} times, not once")
    head, _, tail = text.partition("\0")
    return head, tail
