"""The README's and the documentation's Python blocks run as they are written."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.findall((ROOT / page).read_text(encoding="utf-8")), 1)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs_as_written(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert block.strip()
    exec(compile(block, "block", "exec"), {"__name__": "block"})


def test_the_readme_has_a_block_for_every_room():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rooms = {p.name for p in (ROOT / "src" / "subspan").iterdir() if (p / "__init__.py").exists()} - {"cli"}
    assert rooms == {room for room in rooms if re.search(rf"from subspan\.{room} import", text)}
