"""subspan assets: which offline models and data are installed, and how to get the rest."""

import json
from typing import Annotated

import typer


def assets(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the offline models and data, and how to get what is missing."""
    from subspan.data import ASSETS

    places = {name: asset.locate() for name, asset in ASSETS.items()}
    if as_json:
        found = [
            {
                "name": f"asset:{name}",
                "kind": asset.kind,
                "about": asset.about,
                "path": str(places[name]) if places[name] else None,
                "install": asset.install_command,
            }
            for name, asset in ASSETS.items()
        ]
        print(json.dumps({"assets": found}))
        return
    for name, asset in ASSETS.items():
        print(f"asset:{name}\n  {asset.about}")
        print("  installed" if places[name] else f"  missing; get it with: {asset.install_command}")
