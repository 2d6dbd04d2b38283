"""subspan claims: re-measure the claims."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

app = typer.Typer(help="Re-measure the claims of the methods against their peers.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of the results.")]


@app.command("list")
def list_claims(
    names: Annotated[bool, typer.Option("--names", help="Print the slugs only, one a line.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the claims."""
    from subspan.claims import claim_slugs, load_claim

    if names:
        print("\n".join(claim_slugs()))
        return
    found = [load_claim(slug) for slug in claim_slugs()]
    if as_json:
        print(json.dumps({"claims": [{"slug": c.slug, "title": c.title, "source": c.source} for c in found]}))
        return
    _print_table(["slug", "title", "source"], [[claim.slug, claim.title, claim.source] for claim in found])


@app.command()
def run(
    slug: Annotated[str, typer.Argument(help="Which claim; `subspan claims list` shows all.")],
    smoke: Annotated[bool, typer.Option("--smoke", help="The same path in seconds; proves nothing.")] = False,
    seeds: Annotated[int | None, typer.Option(help="How many seeds (default: the claim's own).")] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes of one thread (default: one per core).")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what an earlier run finished.")] = False,
    backend: Annotated[Literal["loky", "ray"], typer.Option(help="Local processes, or a Ray cluster.")] = "loky",
    runs: Runs = Path("runs/claims"),
    as_json: AsJson = False,
) -> None:
    """Run a claim's sweep and judge its statements. An interrupted sweep is resumed by the same command."""
    from subspan.claims import load_claim, run_claim

    outcome = run_claim(
        load_claim(slug), smoke=smoke, seeds=seeds, jobs=jobs, fresh=fresh, backend=backend, folder=runs
    )
    if as_json:
        print(json.dumps(outcome))
        return
    _print_table(
        ["statement", "measured", "required", "verdict"],
        [
            [
                line["text"],
                line["problem"] if line["measured"] is None else f"{line['measured']:.4g}",
                f"{line['relation']} {line['required']:.4g}",
                "holds" if line["holds"] else "does not hold",
            ]
            for line in outcome["statements"]
        ],
    )
    print(f"{len(outcome['seeds'])} seeds, {outcome['seconds']:.1f} s; every method's numbers: subspan claims report")
    if smoke:
        print("Smoke run: the path works, the numbers prove nothing.")


@app.command()
def report(
    output: Annotated[Path | None, typer.Option(help="The page (default: report.html in the folder).")] = None,
    runs: Runs = Path("runs/claims"),
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page with the verdicts, peers and plots of every claim that has results."""
    from subspan.claims import write_report

    path, slugs = write_report(runs, output)
    print(json.dumps({"report": str(path), "claims": slugs}) if as_json else f"{path} shows {', '.join(slugs)}")


def _print_table(columns: list[str], rows: list[list[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
