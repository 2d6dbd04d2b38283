"""subspan tune: fine-tune a Hugging Face model, with a low-rank adapter unless told otherwise."""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

console = Console(stderr=True)


class Terminal:
    """Draws a run: a bar where someone watches, plain lines where the output is a file."""

    def __init__(self) -> None:
        self.began = self.spoke = time.perf_counter()
        self.bar: Any = None
        self.task: Any = None
        self.figures: dict[str, float] = {}

    def say(self, text: str) -> None:
        self._close()
        self.spoke = time.perf_counter()
        seconds = int(self.spoke - self.began)
        console.print(f"[dim]{seconds // 60:2d}:{seconds % 60:02d}[/dim]  {text}", highlight=False)

    def progress(self, step: int, total: int, figures: dict[str, float]) -> None:
        self.figures |= figures
        shown = "  ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        if console.is_terminal:
            self._advance("training", step, total, shown)
        elif figures:
            self.say(f"step {step}/{total}  {shown}")

    def evaluated(self, done: int, total: int) -> None:
        if console.is_terminal:
            self._advance("scoring", done, total, "")
        elif time.perf_counter() - self.spoke > 10:
            self.say(f"scored {done}/{total}")

    def _advance(self, what: str, done: int, total: int, shown: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if self.bar is not None and self.what != what:
            self._close()
        if self.bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[shown]}"), console=console)
            self.task, self.what = self.bar.add_task(what, total=total, shown=shown), what
            self.bar.start()
        self.bar.update(self.task, completed=done, total=total, shown=shown)
        if done == total:
            self._close()

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def tune(
    config: Annotated[Path | None, typer.Argument(help="A YAML file.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key, dotted; may be repeated.")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="Sets max_steps, the length of the run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sizes, memory and steps; train nothing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing a run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of CONFIG, for editors.")] = False,
) -> None:
    """Fine-tune a Hugging Face model with a low-rank adapter, as CONFIG says."""
    if schema:
        from subspan.tune.config import Config

        print(json.dumps(Config.model_json_schema(), indent=2))
        return
    if config is None:
        raise typer.BadParameter("name a configuration file (--schema prints what it may hold)", param_hint="CONFIG")
    # Bars that libraries draw by themselves would cut through ours; tqdm reads this when it is first imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    first = os.environ.get("RANK", "0") == "0"  # of several processes under a launcher, one speaks
    display = Terminal() if first else None
    if display:
        display.say(f"subspan tune {config}")
    from subspan.tune import config as configuration

    overrides = list(set_ or [])
    if max_steps is not None:
        overrides.append(f"max_steps={max_steps}")
    resolved = configuration.load(config, overrides)
    if dry_run:
        from subspan.tune import plan

        facts = plan(resolved)
        if as_json:
            print(json.dumps(facts))
        else:
            for name, value in facts.items():
                print(f"{name.replace('_', ' '):24} {value:,}" if isinstance(value, int) else f"{name:24} {value}")
        return
    from subspan.tune import tune as run

    summary = run(resolved, fresh=fresh, display=display)
    if not first:
        return
    if as_json:
        print(json.dumps(summary))
        return
    if "continual" in summary:
        from subspan.tune.continual import lines

        print("\n".join(lines(summary["continual"])))
    for name, value in summary["after"].items():
        print(f"{name}: {summary['before'][name]:.4f} before, {value:.4f} after")
    kind = "adapter" if resolved.adapter else "model"
    print(f"{kind + ':':8} {resolved.output / kind}")
    print(f"report:  {resolved.output / 'report.html'}")
