"""Checkpoints written tensor by tensor: the same as growing in memory, and what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from subspan.cli import app
from subspan.errors import DataError
from subspan.resize import expand_width, grow_checkpoint
from subspan.resize.width import checkpoint
from subspan.resize.width.axes import Growth
from subspan.resize.width.plan import plan
from tests.resize.width_models import network, seeded

tf.logging.set_verbosity_error()
tf.logging.disable_progress_bar()


@pytest.fixture
def llama(tmp_path):
    network("qwen3-tied").save_pretrained(tmp_path / "seed")
    return str(tmp_path / "seed")


def run(*args):
    return CliRunner().invoke(app, ["grow", *map(str, args)], catch_exceptions=True)


@pytest.mark.parametrize(
    ("name", "untie"),
    [("qwen3-tied", True), ("qwen3-tied", False), ("gpt2", True), ("mixtral", True), ("opt-post-norm", True),
     ("bert-mlm", True), ("vit", True)],
)  # fmt: skip
def test_a_streamed_checkpoint_is_what_growing_in_memory_gives(name, untie, tmp_path):
    model = network(name)
    model.save_pretrained(tmp_path / "seed")
    if name == "vit":
        tf.ViTImageProcessor().save_pretrained(tmp_path / "seed")
    summary = grow_checkpoint(str(tmp_path / "seed"), tmp_path / "big", untie=untie, noise_db=None, shard_bytes=2000)
    assert (tmp_path / "big" / "preprocessor_config.json").exists() is (name == "vit")
    assert summary.max_rel_err <= 1e-5
    again = type(model).from_pretrained(tmp_path / "big")
    big, report = expand_width(model, 2, untie=untie, noise_db=None)
    for key, x in big.state_dict().items():
        assert torch.equal(x, again.state_dict()[key]), key
    assert summary.parameters == tuple(sum(p.numel() for p in net.parameters()) for net in (model, big))
    assert summary.axis_table == report.axis_table
    assert summary.shards > 1
    index = json.loads((tmp_path / "big" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == summary.bytes
    files = list((tmp_path / "big").glob("*.safetensors"))
    assert set(index["weight_map"].values()) == {p.name for p in files}
    assert all(int.from_bytes(p.read_bytes()[:8], "little") % 8 == 0 for p in files)  # headers, so tensors are aligned
    assert not (tmp_path / "big" / checkpoint.PLAN).exists()


def test_files_are_filled_up_to_the_limit_and_never_empty():
    shards = checkpoint._shards(plan(network("qwen3-tied"), Growth.of(2)), 5000)
    sizes = [sum(shard.values()) for shard in shards]
    assert max(sizes) > 5000  # the first, the embedding's, comes before all others
    assert all(shard and (size <= 5000 or len(shard) == 1) for shard, size in zip(shards, sizes, strict=True))
    assert all(a + next(iter(shard.values())) > 5000 for a, shard in zip(sizes, shards[1:], strict=False))


def test_half_precision_stays_and_can_be_asked_for(llama, tmp_path):
    grow_checkpoint(llama, tmp_path / "half", dtype="bfloat16")
    assert tf.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16
    summary = grow_checkpoint(str(tmp_path / "half"), tmp_path / "again", 3)
    assert tf.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto").dtype == torch.bfloat16
    assert summary.max_rel_err <= 3e-2
    assert summary.shards == 1
    assert (tmp_path / "again" / "model.safetensors").exists()


def test_what_was_written_whole_is_kept_and_the_rest_made(llama, tmp_path, monkeypatch):
    out, written = tmp_path / "big", []

    def stop(done, total):
        written.append(done)
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grow_checkpoint(llama, out, shard_bytes=5000, progress=stop)
    assert not out.exists()
    partial = tmp_path / "big.partial"
    with pytest.raises((OSError, ValueError)):  # a half-written folder is no model
        tf.AutoModelForCausalLM.from_pretrained(partial)
    kept = {p.name: p.stat().st_mtime_ns for p in partial.glob("*.safetensors")}
    assert kept
    (partial / ".model-00009.x.part").write_text("left by a kill")
    with pytest.raises(DataError, match="other options"):
        grow_checkpoint(llama, out, 3, shard_bytes=5000)
    summary = grow_checkpoint(llama, out, shard_bytes=5000)
    assert summary.resumed == len(kept)
    assert kept.items() <= {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors")}.items()
    assert not list(out.glob(".*"))
    assert not partial.exists()
    whole = grow_checkpoint(llama, tmp_path / "whole", shard_bytes=5000)
    for name in kept:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert whole.resumed == 0


def test_another_seed_does_not_go_on(llama, tmp_path):
    def stop(done, total):
        if done >= at * total:
            raise KeyboardInterrupt

    for at in (0.0, 0.5):  # before anything is written nothing is lost, so another growth may begin
        with pytest.raises(KeyboardInterrupt):
            grow_checkpoint(llama, tmp_path / "big", 2 if at else 3, shard_bytes=5000, progress=stop)
    model = network("qwen3-tied")
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(llama)
    with pytest.raises(DataError, match="another seed"):
        grow_checkpoint(llama, tmp_path / "big", shard_bytes=5000)


def test_a_seed_that_lacks_a_tensor_is_not_made_up(llama, tmp_path):
    file = tmp_path / "seed" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(DataError, match=r"lacks 1 of .*model\.layers\.0\.mlp\.up_proj\.weight"):
        grow_checkpoint(llama, tmp_path / "big")


def test_a_configuration_that_names_no_class_gets_one(llama, tmp_path):
    config = tmp_path / "seed" / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({k: v for k, v in said.items() if k != "architectures"}))
    grow_checkpoint(llama, tmp_path / "big")
    assert json.loads((tmp_path / "big" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


class TestVerb:
    def test_prints_the_table_and_what_came_of_it(self, llama, tmp_path):
        found = run(llama, tmp_path / "big", "--ffn-factor", 3, "--keep-tie")
        assert found.exit_code == 0, found.output
        assert "model.layers.*.mlp.down_proj.weight" in found.stderr
        assert "residual x2 <- ffn x3" in found.stderr
        assert "loaded again" in found.stdout
        found = run(llama, tmp_path / "other", "--exact", "--no-verify", "--json")
        summary = json.loads(found.stdout.strip().splitlines()[-1])
        assert summary["max_rel_err"] is None
        assert {line["noise_db"] for line in summary["axis_table"]} == {None}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--factor", 1], "at least 2"), (["--noise-db", "nan"], "noise_db"), (["--scheme", "zero"], "scheme must"),
            (["--dtype", "float13"], "float13"), (["--dtype", "float8_e4m3fn"], "float8"), (["--factor", 10**6], "GiB"),
            (["--scheme", "diagonal", "--ffn-factor", 3], "diagonal"),
        ],
    )  # fmt: skip
    def test_what_a_user_can_put_right_is_one_sentence_and_status_2(self, llama, tmp_path, options, message):
        found = run(llama, tmp_path / "big", *options)
        assert found.exit_code == 2
        (line,) = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
        assert message in line
        assert not (tmp_path / "big").exists()

    def test_folders_that_are_taken_and_models_that_are_none(self, llama, tmp_path):
        (tmp_path / "big").mkdir()
        assert "exists already" in run(llama, tmp_path / "big").stderr
        (tmp_path / "new.partial").mkdir()
        (tmp_path / "new.partial" / "mine.txt").write_text("x")
        assert "no unfinished growth" in run(llama, tmp_path / "new").stderr
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        assert "exists already" in run(llama, tmp_path / "link").stderr
        assert "exists already" in run(llama, ".").stderr
        for name in ("nowhere/", tmp_path):
            found = run(name, tmp_path / "other")
            assert found.exit_code == 2
            assert "error: " in found.stderr


_GROW = """
import sys
from subspan.resize import grow_checkpoint
from subspan.tune.memory import PeakMemory  # ru_maxrss would count the process that started this one
summary = grow_checkpoint("asset:minilm", sys.argv[1], shard_bytes=2**24)
peak = PeakMemory().mebibytes() * 2**20
print(summary.bytes, summary.resumed, peak, summary.max_rel_err)
"""


@pytest.mark.slow
def test_minilm_grows_after_a_kill_within_the_memory_of_its_result(tmp_path):
    """A real process on a real model, killed outright; then the rest. SmolLM2-135M is the benchmark's."""
    command = [sys.executable, "-c", _GROW, str(tmp_path / "big")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if len(list((tmp_path / "big.partial").glob("model-*.safetensors"))) >= 3:
            break
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "big").exists()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    size, resumed, peak, error = done.stdout.split()
    assert int(resumed) >= 3
    assert float(peak) < 3 * int(size)
    assert float(error) <= 2e-5
    big = tf.AutoConfig.from_pretrained(tmp_path / "big")
    assert (big.hidden_size, big.num_attention_heads, big.intermediate_size) == (768, 24, 3072)
    files = list((tmp_path / "big").glob("*.safetensors"))
    assert sum(f.stat().st_size for f in files) == pytest.approx(int(size), rel=1e-3)
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "big")("Wider.").input_ids


@pytest.mark.slow
def test_a_compiled_network_is_unwrapped():
    model = network("llama")
    big, report = expand_width(torch.compile(model), 2, generator=seeded())
    assert type(big) is type(model)
    assert report.max_rel_err <= 2e-5
