"""subspan hubs: variables that are highly connected in every population of a table."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def hubs(
    data: Annotated[Path, typer.Argument(help="A csv, tsv or parquet file: rows are samples, columns variables.")],
    group: Annotated[str | None, typer.Option(help="Column that names each row's population.")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Column to leave out; may be repeated.")] = None,
    components: Annotated[
        str, typer.Option(help="Number of directions, or sqrt/2, sqrt, 1.5sqrt, ratio, ratio/5.")
    ] = "sqrt",
    rule: Annotated[str, typer.Option(help="2sd, gap, or top (with --top).")] = "2sd",
    c: Annotated[float, typer.Option("-c", help="Standard deviations above the mean, for 2sd.")] = 2.0,
    top: Annotated[int | None, typer.Option(help="Take this many hubs (implies --rule top).")] = None,
    nonparanormal: Annotated[bool, typer.Option("--nonparanormal", help="Normal scores of ranks.")] = False,
    covariance: Annotated[bool, typer.Option("--covariance", help="Keep variances; correlations otherwise.")] = False,
    threshold: Annotated[float | None, typer.Option(help="Zero correlations below this quantile, such as 0.7.")] = None,
    screen: Annotated[str | None, typer.Option(help="union or intersection: keep 3n/4 variables.")] = None,
    shrinkage: Annotated[str | None, typer.Option(help="ledoit_wolf or oas.")] = None,
    stability: Annotated[int, typer.Option(help="Count selections in this many half-samples.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the half-samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for hubs.csv and report.html.")] = Path("runs/hubs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Find hub variables, common to the populations of DATA and in single ones."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    from subspan.structure.hubs.report import analyse_table

    options: dict[str, Any] = {
        "n_components": int(components) if components.isdigit() else components,
        "rule": "top" if top is not None else rule,
        "n_hubs": top,
        "c": c,
        "nonparanormal": nonparanormal,
        "correlation": not covariance,
        "threshold": threshold,
        "screen": screen,
        "shrinkage": shrinkage,
    }
    console = Console(stderr=True)
    with Progress(console=console, disable=not (stability and console.is_terminal)) as bar:
        task = bar.add_task("half-samples", total=stability)
        found = analyse_table(
            data,
            group=group,
            drop=drop or (),
            stability=stability,
            random_state=seed,
            out=out,
            progress=lambda done, total: bar.update(task, completed=done),
            **options,
        )
    summary: dict[str, Any] = found.summary() | {"table": str(out / "hubs.csv"), "report": str(out / "report.html")}
    for warning in found.warnings:
        console.print(Text(f"note: {warning}", style="yellow"))
    if as_json:
        print(json.dumps(summary))
        return
    for population in summary["populations"]:
        print(f"population {population['name']}: {population['samples']} samples, weight {population['weight']:.2f}")
    for i, (name, influence) in enumerate(zip(summary["hubs"], summary["influence"], strict=True)):
        chosen = f"  in {summary['selected'][i]:.0%} of half-samples" if summary["selected"] else ""
        print(f"hub {name}  influence {influence:.3f}{chosen}")
    if not summary["hubs"]:
        print("no variable is a hub by this rule")
    for name, only in summary["individual"].items():
        print(f"only in {name}: {' '.join(only) or 'none'}")
    print(f"table:  {summary['table']}\nreport: {summary['report']}")
