"""subspan audit: a risk score for each training row."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def audit(
    model: Annotated[str, typer.Argument(help='"asset:..." name, local folder or hub name of a chat model.')],
    data: Annotated[str, typer.Argument(help="Rows with messages, or a prompt's and an answer's column.")],
    danger: Annotated[str, typer.Option(help="Adapter folder, checkpoint, or file of dangerous rows.")],
    safety: Annotated[str, typer.Option(help="The same, of safe rows (or a file of pairs: prompt, chosen, rejected).")],
    init: Annotated[
        str | None, typer.Option(help="Adapter at which gradients are taken (default: trained on 64 of the rows).")
    ] = None,
    state: Annotated[str, typer.Option(help="shared: what is poisoned; paper: what erodes refusals; zero.")] = "shared",
    init_steps: Annotated[int, typer.Option(min=1, help="Steps of that training.")] = 50,
    out: Annotated[Path, typer.Option(help="A .parquet or .csv file; the other, .json and .html lie beside.")] = Path(
        "scores.parquet"
    ),
    top: Annotated[int, typer.Option(min=0, help="List this many of the riskiest rows.")] = 20,
    metric: Annotated[str, typer.Option(help="cosine, global, projection, dot or l2.")] = "cosine",
    update: Annotated[str, typer.Option(help="lora, or full: a step on the weights themselves.")] = "lora",
    prompt: Annotated[str | None, typer.Option(help="Column with the prompt.")] = None,
    answer: Annotated[str | None, typer.Option(help="Column with the answer.")] = None,
    last_turn_only: Annotated[bool, typer.Option("--last-turn-only", help="Count the last answer only.")] = False,
    max_length: Annotated[int, typer.Option(help="Tokens of a row.")] = 1024,
    batch_tokens: Annotated[
        int, typer.Option(help="Tokens of a forward pass: memory, and rows lost to a kill.")
    ] = 1024,
    probe: Annotated[str | None, typer.Option(help="File of safe answers: do the directions steer the model?")] = None,
    show_text: Annotated[bool, typer.Option("--show-text", help="Show what the riskiest rows say.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of going on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Rank the rows of DATA by how far a step on each moves MODEL along danger minus along safety."""
    from subspan.cli.progress import progress_bars

    with progress_bars() as (console, advance):
        from subspan.safety import audit as run

        table = run(
            model,
            data,
            danger,
            safety,
            init=init,
            state=state,
            init_steps=init_steps,
            out=out,
            probe=probe,
            top=top,
            show_text=show_text,
            resume=not fresh,
            say=lambda text: console.print(text, style="dim", highlight=False),
            progress=lambda done, total: advance("rows scored", done, total),
            metric=metric,
            update=update,
            prompt=prompt,
            answer=answer,
            last_turn_only=last_turn_only,
            max_length=max_length,
            batch_tokens=batch_tokens,
        )
    files = {k: str(out.with_suffix(f".{k}")) for k in ("parquet", "csv", "json", "html")}
    names = ("row", "score", "danger", "safety", "loss", "grad_norm")
    listed = [{n: table[n][i].item() for n in names} for i in table.ranking[:top]]
    unscored = [{"row": int(table["row"][i]), "reason": r} for i, r in enumerate(table["reason"]) if r]
    summary: dict[str, Any] = {"rows": len(table), "unscored": unscored, "top": listed, "files": files}
    if as_json:
        print(json.dumps(summary))
        return
    print(f"{'row':>8} " + " ".join(f"{n:>10}" for n in names[1:]))
    for line in listed:
        print(f"{line['row']:>8} " + " ".join(f"{line[n]:>10.4g}" for n in names[1:]))
    if unscored:
        print(f"{len(unscored)} rows have no score, the first is row {unscored[0]['row']}: {unscored[0]['reason']}")
    print(f"scores: {files['parquet']} {files['csv']}\nreport: {files['html']}")
