"""subspan facilities: prototypes kept under a stream of inserts and deletes."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def facilities(
    stream: Annotated[
        str, typer.Argument(help="A csv, tsv or parquet file, or - for csv lines on standard input.", metavar="STREAM")
    ],
    places: Annotated[
        Path | None,
        typer.Option("--facilities", help="Table of places, with an optional column price (default: see --first)."),
    ] = None,
    first: Annotated[int, typer.Option(help="Without a table, the first so many inserted rows are the places.")] = 200,
    price: Annotated[float | None, typer.Option(help="Price of opening a facility, where the table has none.")] = None,
    window: Annotated[int | None, typer.Option(help="Delete the oldest client beyond this many.")] = None,
    kappa: Annotated[float, typer.Option(help="Level base: nearer to 1 costs less, further moves less.")] = 1.2,
    slack: Annotated[int, typer.Option(help="Above 1: open only what is kappa^(slack - 1) times better.")] = 1,
    oracle: Annotated[str, typer.Option(help="counters, hash or exact.")] = "counters",
    seed: Annotated[int, typer.Option(help="Of the hash oracle.")] = 0,
    every: Annotated[int, typer.Option(help="Save the state and a line of metrics after so many rows.")] = 5000,
    out: Annotated[Path, typer.Option(help="Folder for the results and the state.")] = Path("runs/facilities"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over instead of continuing the run in the folder.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Keep facilities open for the clients of STREAM while they come and go.

    Columns: op (insert, delete or price), id, weight, price (for op price), all optional; the others are coordinates.
    """
    from rich.console import Console
    from rich.live import Live

    from subspan.structure.facility.stream import StreamConfig, run_stream

    options: dict[str, Any] = {"kappa": kappa, "slack": slack, "oracle": oracle, "random_state": seed}
    table = None if places is None else str(places)
    config = StreamConfig(source=stream, facilities=table, first=first, price=price, window=window, options=options)
    console = Console(stderr=True)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=8) as live:
            summary = run_stream(
                config, out=out, every=every, fresh=fresh, progress=lambda standing: live.update(_view(standing))
            )
    else:
        summary = run_stream(config, out=out, every=every, fresh=fresh)
    if as_json:
        print(json.dumps(summary))
        return
    moves, rows = summary["client_moves"], summary["rows"]
    print(f"{rows} rows: {summary['clients']} clients at {summary['open']} open facilities")
    print(f"cost {summary['cost']:.6g}, proven within {summary['proven_ratio']:.3f} times the optimum")
    print(
        f"{moves} clients moved ({moves / max(1, rows):.3g} a row), {summary['facility_moves']} openings and closings"
    )
    print(f"facilities: {out / 'facilities.csv'}\nclients:    {out / 'clients.csv'}")


def _view(standing: Any) -> Any:
    """The live view: how things stand now."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = max(1, standing.rows)
    for name, value in (
        ("rows", f"{standing.rows:,}"),
        ("clients", f"{standing.clients:,}"),
        ("open facilities", f"{standing.open:,}"),
        ("cost", f"{standing.cost:,.6g}"),
        ("clients moved", f"{standing.client_moves:,} ({standing.client_moves / rows:.3g} a row)"),
        ("openings and closings", f"{standing.facility_moves:,}"),
        ("microseconds a row", f"{1e6 * standing.seconds / rows:,.0f}"),
    ):
        table.add_row(name, value)
    return table
