"""Constants of encoder files: parsed, never run."""

import pytest

from dsv3.text.encoder_file import EncoderFileError, around_gap, read_constants
from tests.dsv3.text import encoders


def constants(tmp_path, text):
    return read_constants(encoders.write(tmp_path, "encoding_x.py", text))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('"a" "b"', "ab"),
        ('"a" + ("b" + KNOWN)', "abk"),
        ('f"<{KNOWN}>{{}}"', "<k>{}"),
        ('"<{x}>{{y}}".format(x=KNOWN + "!")', "<k!>{y}"),
        ('{"a": "b", KNOWN: "c" + KNOWN}', {"a": "b", "k": "ck"}),
        ("{}", {}),
        ("1", None),
        ('b"a"', None),
        ("UNKNOWN", None),
        ("open('/etc/passwd').read()", None),
        ('__import__("os").getcwd()', None),
        ('"a" * 1000', None),
        ('"a".upper()', None),
        ('"{0}".format(KNOWN)', None),
        ('"{x}{y}".format(x=KNOWN)', None),
        ('"{x!r}".format(x=KNOWN)', None),
        ('"{x.y}".format(x=KNOWN)', None),
        ('"{x:>9}".format(x=KNOWN)', None),
        ('"{x".format(x=KNOWN)', None),
        ('"{x}".format(**{"x": "y"})', None),
        ('f"{KNOWN!r}"', None),
        ('f"{KNOWN:>9}"', None),
        ('{**{"a": "b"}}', None),
        ('{"a": 1}', None),
    ],
)
def test_values(tmp_path, expression, expected):
    found = constants(tmp_path, f'KNOWN = "k"\nX = "before"\nX: str = {expression}\n')
    assert found == {"KNOWN": "k"} | ({} if expected is None else {"X": expected})


def test_the_last_assignment_counts(tmp_path):
    found = constants(tmp_path, 'A = B = "x"\nA += "y"\nB, C = "z", "z"\nD = "d"\nD += f()\nE = "e"\nE[0] = "f"\n')
    assert found == {"A": "xy"}


def test_files_that_cannot_be_read(tmp_path):
    assert read_constants(tmp_path / "missing.py") == {}
    for text, word in [
        ("def f(:", "cannot be parsed"),
        ("A = " + "+".join(["'a'"] * 10_000), "cannot be parsed"),
        ("x = '" + "a" * 2**20 + "'", "longer than"),
        ("A = '" + "a" * 10**5 + "'\n" + "A = A + A\n" * 40, "line 5: a string has more than"),
        ("A = '" + "a" * 10**5 + "'\nB = f'" + "{A}" * 10**5 + "'", "line 2: a string has more than"),
        ("A = '" + "a" * 10**5 + "'\nB = '" + "{x}" * 10**5 + "'.format(x=A)", "line 2: a string has more than"),
    ]:
        with pytest.raises(EncoderFileError, match=f"encoding_x.py: .*{word}"):
            constants(tmp_path, text)
    path = encoders.write(tmp_path, "encoding_x.py", "")
    path.write_bytes(b"\xff\0")
    with pytest.raises(EncoderFileError, match="cannot be parsed"):
        read_constants(path)


def test_templates_are_filled_but_for_one_gap():
    known = {"a": "A", "t": "{a} {{b}} {gap} {a}", "m": {"gap": "x"}}
    assert around_gap(known, "t", "gap") == ("A {b} ", " A")
    assert around_gap(known, "missing", "gap") is None
    assert around_gap(known, "m", "gap") is None
    for template, word in [("{b}{gap}", "'b'"), ("{m}{gap}", "'m'"), ("none", "0 times"), ("{gap}{gap}", "2 times")]:
        with pytest.raises(EncoderFileError, match=f"t has the gap .*{word}"):
            around_gap(known | {"t": template}, "t", "gap")
