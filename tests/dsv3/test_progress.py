"""The bar of notebooks, on a screen that moves to a line's beginning and erases nothing, as JupyterLab does."""

import io

from dsv3.progress import notebook_bar


def shown(text):
    """Returns the lines that such a screen shows at the end."""
    lines = []
    for line in text.split("\n"):
        row = ""
        for piece in line.split("\r"):
            row = piece + row[len(piece) :]
        lines.append(row)
    return lines


def test_a_shorter_line_leaves_nothing_of_a_longer_one(monkeypatch):
    monkeypatch.setattr("dsv3.progress._PAUSE_S", 0.0)
    out = io.StringIO()
    with notebook_bar("compiling", out) as update:
        update(0, 28, "a program with a long name")
        update(14, 28, "short")
        update(28, 28, "done")
    [line, rest] = shown(out.getvalue())
    assert line.rstrip().startswith("compiling: done [####################] 28/28 0:") and rest == ""
    assert line.count("/") == 1 and "\x1b" not in out.getvalue()


def test_the_last_state_is_shown_however_fast_it_came(monkeypatch):
    monkeypatch.setattr("dsv3.progress._PAUSE_S", 1e9)
    out = io.StringIO()
    with notebook_bar("generating", out) as update:
        for done in range(401):
            update(done, 400, f"{400 - done} left")
    assert "400/400" in shown(out.getvalue())[0] and out.getvalue().count("\r") == 1
    out = io.StringIO()
    with notebook_bar("generating", out):
        pass
    assert out.getvalue() == ""
