"""How far a long command is: bars on a terminal, a line at each tenth elsewhere; on stderr."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[str, int, int | None], None]


@contextmanager
def progress_bars(
    line: Callable[[str, int, int], str] = "{} {}/{}".format, *columns: Any
) -> Iterator[tuple["Console", Advance]]:
    """Yield the console, and a function to call with what is done, how much of it, and of how much (or None).

    Bars that libraries draw by themselves would cut through: import what computes inside of this.

    Args:
        line: what is printed of these three where there is no terminal.
        columns: of a bar, in place of "done/total".
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    amount = columns or (MofNCompleteColumn(),)
    shown = (TextColumn("{task.description}"), BarColumn(), *amount, TimeElapsedColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    said: dict[str, int] = {}
    with Progress(*shown, console=console, disable=not console.is_terminal) as bar:

        def advance(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=None)
            bar.update(tasks[what], completed=done, total=total)
            if not console.is_terminal and total and done * 10 // total > said.get(what, 0):
                said[what] = done * 10 // total
                console.print(line(what, done, total), highlight=False)

        yield console, advance
