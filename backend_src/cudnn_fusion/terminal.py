"""What tools print: lines and tables of text as it is, expected errors as a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cudnn_fusion.plan import moment

console = Console(highlight=False)
WIDE = Console(highlight=False, width=max(console.width, 150))


def say(text: str) -> None:
    """A line that is not wrapped, so that commands and paths in it can be copied."""
    console.print(text, markup=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Cells are text as it is, never rich's markup."""
    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    WIDE.print(table)


def number(value: float | None, form: str) -> str:
    """The number, or a dash where it was not measured."""
    return "-" if value is None else format(value, form)


def age(made_at: str, now: datetime) -> str:
    """How long ago, in the largest whole unit: ``3 d``, ``5 h``, ``0 min``; a dash where it is not known."""
    if not made_at:
        return "-"
    minutes = max(0, int((now - moment(made_at)).total_seconds() // 60))
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // (24 * 60)} d"


@contextmanager
def in_words(*expected: type[Exception]) -> Iterator[None]:
    """Expected errors as a sentence and exit code 1."""
    try:
        yield
    except expected as error:
        Console(stderr=True, highlight=False).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error
