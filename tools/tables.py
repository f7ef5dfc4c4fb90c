"""The style of tables that tools print."""

from rich import box
from rich.table import Table


def make_table(title: str, *columns: str) -> Table:
    """Returns an empty table; all columns but the first are right-aligned, and empty names print no header."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.show_header = any(columns)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
