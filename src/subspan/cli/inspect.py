"""subspan inspect: what a model's matrices say, as a page."""

import json
from pathlib import Path
from typing import Annotated

import typer


def inspect(
    model: Annotated[str, typer.Argument(help="Model folder, asset, hub name, adapter folder or run folder of tune.")],
    data: Annotated[
        str | None, typer.Option(help="Labelled texts: predict and measure a classifier's curvature.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Base model of an adapter whose folder does not tell.")] = None,
    out: Annotated[Path, typer.Option(help="The page; a .json file lies beside it.")] = Path("inspection.html"),
    layers: Annotated[
        list[str] | None, typer.Option(help="A layer whose curvature is looked at (default: all).")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Column with the texts.")] = None,
    label: Annotated[str | None, typer.Option(help="Column with the labels.")] = None,
    rows: Annotated[int, typer.Option(help="Rows that are read, as many of each class.")] = 128,
    max_length: Annotated[int, typer.Option(help="Tokens of a row.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Rows at a time.")] = 16,
    measure: Annotated[int, typer.Option(help="Lanczos steps per layer; 0 predicts only.")] = 20,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of going on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Spectra, effective ranks, optimiser fingerprint and update subspace of MODEL; with data also its curvature."""
    from subspan.cli.progress import progress_bars

    with progress_bars() as (console, advance):
        from subspan.inspect import inspect as run

        facts = run(
            model,
            data,
            base=base,
            out=out,
            layers=layers or None,
            text=text,
            label=label,
            rows=rows,
            max_length=max_length,
            batch_size=batch_size,
            measure=measure,
            resume=not fresh,
            say=lambda said: console.print(said, style="dim", highlight=False),
            progress=advance,
        )
    files = {"html": str(out), "json": str(out.with_suffix(".json"))}
    if as_json:
        print(json.dumps(facts | {"files": files}))
        return
    for note in facts["notes"]:
        print(note)
    if found := facts.get("curvature"):
        print(f"{'first eigenvalue':<52} {'measured':>10} {'predicted':>10} {'means only':>10} {'trace share':>11}")
        for layer in found["layers"]:
            top = f"{layer['measured']['eigenvalues'][0]:.4g}" if layer["measured"] else "-"
            figures = (layer["eigenvalues"][0], layer["eigenvalues_means"][0])
            share = layer["trace_ratio"]
            print(
                f"{layer['layer'][-52:]:<52} {top:>10} {figures[0]:>10.4g} {figures[1]:>10.4g} "
                f"{'-' if share is None else f'{share:.3f}':>11}"
            )
    print(f"report: {files['html']} {files['json']}")
