"""subspan grow: a wider checkpoint that computes the same."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def grow(
    model: Annotated[str, typer.Argument(help='"asset:..." name, local folder, .gguf file or hub name.')],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    factor: Annotated[int, typer.Option(help="Times the width, and the number of heads.")] = 2,
    ffn_factor: Annotated[
        float | None, typer.Option(help="Times the feed-forward width; a fraction clones single units.")
    ] = None,
    noise_db: Annotated[float, typer.Option(help="Signal-to-noise ratio of what breaks the clones' symmetry.")] = 40.0,
    exact: Annotated[bool, typer.Option("--exact", help="No noise: clones that no optimiser can part.")] = False,
    scheme: Annotated[str, typer.Option(help="clone or diagonal.")] = "clone",
    keep_tie: Annotated[bool, typer.Option("--keep-tie", help="A tied head stays tied to the embedding.")] = False,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ... (default: the model's own).")] = None,
    shard_mb: Annotated[int, typer.Option(help="Megabytes of a file: what a kill can cost.")] = 1024,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not load the result and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Write to OUT a wider checkpoint of MODEL with the same outputs. After a kill, the same command goes on."""
    from rich.progress import DownloadColumn

    from subspan.cli.progress import progress_bars

    def line(_: str, done: int, total: int) -> str:
        return f"wrote {done / 2**20:.0f} of {total / 2**20:.0f} MiB"

    with progress_bars(line, DownloadColumn()) as (console, advance):
        from subspan.resize import axis_text, grow_checkpoint

        def table(lines: list[dict[str, Any]]) -> None:
            if not as_json:
                console.print(axis_text(lines), style="dim", highlight=False, soft_wrap=True)

        summary = grow_checkpoint(
            model,
            out,
            factor,
            ffn_factor,
            scheme=scheme,
            noise_db=None if exact else noise_db,
            untie=not keep_tie,
            seed=seed,
            dtype=dtype,
            shard_bytes=shard_mb * 2**20,
            verify=not no_verify,
            table=table,
            progress=lambda done, total: advance("tensors", done, total),
        )
    if as_json:
        print(json.dumps(summary.as_dict()))
        return
    before, after = (f"{n / 1e6:.1f} M" for n in summary.parameters)
    print(f"{before} parameters became {after}, {summary.bytes / 2**20:.0f} MiB in {summary.shards} files")
    if summary.resumed:
        print(f"{summary.resumed} of the files were there from an earlier run")
    if summary.max_rel_err is not None:
        print(f"outputs, loaded again: {summary.max_rel_err:.1e} of the largest differ at most")
    print(f"checkpoint: {summary.out}")
