"""Real data that lies beside the project and never in it."""

from pathlib import Path

from subspan.errors import MissingAsset

FOLDER = Path("shared", "data")


def shared_file(name: str) -> Path:
    """A file of ``shared/data``, looked for in the working folder, beside this checkout, and in all folders above both.

    Raises:
        MissingAsset: it is in none of them.
    """
    homes = (Path.cwd(), *Path.cwd().parents, *Path(__file__).parents)
    found = next((path for home in homes if (path := home / FOLDER / name).exists()), None)
    if found is None:
        raise MissingAsset(f"there is no {FOLDER / name} here, beside the checkout or above: put the file there")
    return found
