"""subspan compress: mixture-of-experts checkpoints in 2 to 4 bits per expert weight."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def compress(
    model: Annotated[str, typer.Argument(help="Local folder of a mixture-of-experts model, in safetensors.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    data: Annotated[
        str | None, typer.Option(help='Calibration text: a file, "asset:..." or hub data set (not with rtn).')
    ] = None,
    text: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    bits: Annotated[int, typer.Option(help="Bits of a residual weight: 2, 3, 4 or 8.")] = 2,
    rank: Annotated[int, typer.Option(help="Rank of the shared factors; 0 for none.")] = 32,
    quantizer: Annotated[str, typer.Option(help="gptq, gptvq, diag or rtn.")] = "gptq",
    group_size: Annotated[int, typer.Option(help="Weights that share a scale.")] = 128,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other key of TileQConfig.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Calibration windows.")] = 128,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 2048,
    batch: Annotated[int, typer.Option(help="Windows of a forward pass.")] = 8,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of going on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Compress the experts of MODEL layer by layer, each calibrated behind the compressed ones, into OUT."""
    import yaml

    from subspan.cli.progress import progress_bars

    keys: dict[str, Any] = {"bits": bits, "rank": rank, "quantizer": quantizer, "group_size": group_size}
    with progress_bars() as (_, advance):
        from subspan.resize import TileQConfig, calibration_batches, compress_checkpoint

        for pair in set_ or []:
            key, sign, value = pair.partition("=")
            if not sign or key not in TileQConfig.__dataclass_fields__:
                known = ", ".join(TileQConfig.__dataclass_fields__)
                raise ValueError(f"--set {pair}: give KEY=VALUE; keys are {known}")
            keys[key] = yaml.safe_load(value)
        config = TileQConfig.from_json(keys)
        batches = None
        if data is not None:
            batches = calibration_batches(model, data, column=text, samples=samples, length=length, batch=batch)
        report = compress_checkpoint(
            model, out, batches, config, fresh=fresh, progress=lambda done, total: advance("layer", done, total)
        )
    if as_json:
        print(json.dumps(report.to_json()))
        return
    print(f"{report.weights:,} expert weights in {report.nbytes:,} bytes: {report.bits_per_weight:.3f} bits per weight")
    for term, cost in report.bits.items():
        print(f"  {term:14} {cost:8.4f}")
    print(f"{'layer':40} {'projection':10} {'bits':>6} {'error':>7} {'placement':>10} {'unrouted':>8} {'dropped':>8}")
    for row in report.rows():
        error = "" if row["output_error"] is None else f"{row['output_error']:.4f}"
        print(
            f"{row['layer']:40} {row['projection']:10} {row['bits_per_weight']:6.3f} {error:>7} "
            f"{row['placement'] or '':>10} {row['unrouted']:>8} {row['dropped']:>8}"
        )
    print(f"model: {out} (subspan.resize.load_compressed)")
