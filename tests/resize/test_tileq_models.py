"""TileQ on transformers' own mixture-of-experts classes, on checkpoints, and from the command line."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from subspan.cli import app
from subspan.errors import DataError, NonFinite, TargetError
from subspan.resize import (
    TileQExperts,
    calibration_batches,
    compress_checkpoint,
    load_compressed,
    load_report,
    quantize_moe,
    save_compressed,
)
from tests.resize.tileq_problems import small
from tests.tune.conftest import tokenizer

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    "n_routed_experts": 6, "n_group": 1, "topk_group": 1,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "Qwen3Moe": {
        "moe_intermediate_size": 64,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "DeepseekV2": LATENT | {"q_lora_rank": None, "topk_method": "greedy"},
    "DeepseekV3": LATENT | {"q_lora_rank": 16},
}


def model_of(family: str, seed: int = 0):
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**SHAPE | FAMILIES[family])
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def tokens(count: int = 4, rows: int = 2, length: int = 24, seed: int = 0) -> list[torch.Tensor]:
    return list(torch.randint(3, 60, (count, rows, length), generator=torch.Generator().manual_seed(seed)))


def learn(model, steps: int) -> None:
    """On Python source, a byte per token, so that experts and router have some structure."""
    from subspan.claims.tileq import source_text

    text = source_text()[:200_000] % 64
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model.train()
    for _ in range(steps):
        start = torch.randint(len(text) - 48, (16, 1), generator=generator)
        x = text[start + torch.arange(48)]
        optimizer.zero_grad()
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
    model.eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Mixtral in shards, per expert as on the hub, with a tokenizer and some text."""
    folder = tmp_path_factory.mktemp("mixtral")
    model = model_of("Mixtral")
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(folder, max_shard_size="60KB")
    tokenizer(chat=False).save_pretrained(folder)
    (folder.parent / "text.txt").write_text(" ".join(f"w{i % 37 % 40}" for i in range(400)))
    return folder


def run(*args):
    return CliRunner().invoke(app, ["compress", *map(str, args)])


def test_what_cannot_work_leaves_nothing_in_the_way(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="group_size 48 does not divide"):
        compress_checkpoint(checkpoint, tmp_path / "out", tokens(1), small(group_size=48))
    assert not (tmp_path / "out").exists()
    # nor does a run that wrote no layer, whatever inputs it was given
    inputs = {"inputs_embeds": torch.full((1, 3, 32), torch.nan).bfloat16(), "use_cache": False}
    with pytest.raises(NonFinite, match="an input of expert"):
        compress_checkpoint(checkpoint, tmp_path / "out", [inputs], small())
    assert (tmp_path / "out" / "run.json").is_file()
    rounded = small(quantizer="rtn", rank=0)
    done = compress_checkpoint(checkpoint, tmp_path / "out", None, rounded)
    assert len(done.layers) == 2
    # one that did is gone on with as it was, or started over
    other = small(quantizer="rtn", rank=0, bits=2)
    for batches, config in ((tokens(1), rounded), (None, other)):
        with pytest.raises(DataError, match=r"another model, calibration or configuration.*--fresh"):
            compress_checkpoint(checkpoint, tmp_path / "out", batches, config)
    again = compress_checkpoint(checkpoint, tmp_path / "out", None, other, fresh=True)
    assert again.bits["residual"] == pytest.approx(2)


def shards(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.safetensors"))}


# ---- one family


@pytest.mark.slow
def test_only_experts_change():
    model, x = model_of("Qwen2Moe"), tokens()
    before = {n: p.clone() for n, p in model.named_parameters()}
    report = quantize_moe(model, x, small())
    assert [layer.name for layer in report.layers] == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    assert all(isinstance(layer.mlp.experts, TileQExperts) for layer in model.model.layers)
    left = dict(model.named_parameters())
    assert set(before) - set(left) == {
        f"model.layers.{i}.mlp.experts.{p}" for i in (0, 1) for p in ("gate_up_proj", "down_proj")
    }
    assert all(torch.equal(before[n], p) for n, p in left.items())  # routers, attention and shared experts


def test_a_checkpoint_in_shards_is_compressed_layer_by_layer_to_the_same_bytes(checkpoint, tmp_path):
    x = tokens()
    model = model_of("Mixtral")
    report = quantize_moe(model, x, small())
    save_compressed(model, report, tmp_path / "whole")
    done = []
    streamed = compress_checkpoint(checkpoint, tmp_path / "out", x, small(), progress=lambda *step: done.append(step))
    assert done == [(1, 2), (2, 2)]
    assert streamed == report == load_report(tmp_path / "out")[1]
    one, other = (
        {n: t for f in sorted((tmp_path / p).glob("*.safetensors")) for n, t in load_file(f).items()}
        for p in ("whole", "out")
    )
    assert set(one) == set(other)
    assert all(torch.equal(one[n].view(torch.uint8), other[n].view(torch.uint8)) for n in one)
    loaded = load_compressed(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(x[0]).logits, model(x[0]).logits)
        generated = loaded.generate(x[0][:1, :4], max_new_tokens=4, do_sample=False)
    assert generated.shape == (1, 8)
    assert loaded.generation_config.eos_token_id == [2, 7]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    # a folder that is done is read, not written
    stamp = (tmp_path / "out" / "layer-00000.safetensors").stat().st_mtime_ns
    assert compress_checkpoint(checkpoint, tmp_path / "out", x, small()) == report
    assert (tmp_path / "out" / "layer-00000.safetensors").stat().st_mtime_ns == stamp
    # one that lost a layer gets it back
    last = tmp_path / "out" / "layer-00001.safetensors"
    before = last.read_bytes()
    last.unlink()  # the loaded model maps the file
    last.write_bytes(before[:99])
    with pytest.raises(DataError, match=r"layer-00001.safetensors is torn"):
        load_compressed(tmp_path / "out")
    last.unlink()
    compress_checkpoint(checkpoint, tmp_path / "out", x, small())
    assert last.read_bytes() == before
    assert (tmp_path / "out" / "layer-00000.safetensors").stat().st_mtime_ns == stamp
    assert load_report(tmp_path / "out")[1] == report
    # what is saved over another compression is whole, and no run goes on with it
    (tmp_path / "out" / "layer-00007.safetensors").write_bytes(before)
    save_compressed(loaded, report, tmp_path / "out")
    assert load_compressed(tmp_path / "out").generation_config.eos_token_id == [2, 7]
    with pytest.raises(DataError, match="holds no run of this command"):
        compress_checkpoint(checkpoint, tmp_path / "out", x, small())
    with pytest.raises(ValueError, match="compressed experts already"):
        compress_checkpoint(tmp_path / "out", tmp_path / "twice", x, small())
    with pytest.raises(ValueError, match="the report is of another"):
        save_compressed(model_of("Mixtral"), report, tmp_path / "wrong")


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_and_ends_in_the_same_bytes(checkpoint, tmp_path):
    x = tokens()
    compress_checkpoint(checkpoint, tmp_path / "whole", x, small())

    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    with pytest.raises(Stop):
        compress_checkpoint(checkpoint, tmp_path / "cut", x, small(), progress=stop)
    assert sorted(shards(tmp_path / "cut")) == ["layer-00000.safetensors", "rest.safetensors"]
    with pytest.raises(DataError, match="no finished compression"):
        load_compressed(tmp_path / "cut")
    with pytest.raises(DataError, match="another model, calibration or configuration"):
        compress_checkpoint(checkpoint, tmp_path / "cut", x, small(bits=2))
    done = []
    compress_checkpoint(checkpoint, tmp_path / "cut", x, small(), progress=lambda *step: done.append(step))
    assert shards(tmp_path / "cut") == shards(tmp_path / "whole")
    assert (tmp_path / "cut" / "tileq.json").read_text() == (tmp_path / "whole" / "tileq.json").read_text()
    other = compress_checkpoint(checkpoint, tmp_path / "cut", x, small(bits=2), fresh=True)
    assert other.bits["residual"] == pytest.approx(2)


def test_folders_that_are_no_checkpoint_are_refused(checkpoint, tmp_path):
    x = tokens(1)
    with pytest.raises(DataError, match="no model folder: it holds no config"):
        compress_checkpoint(tmp_path, tmp_path / "out", x, small())
    with pytest.raises(ValueError, match="holds the original"):
        compress_checkpoint(checkpoint, checkpoint, x, small())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="no empty folder and holds no run"):
        compress_checkpoint(checkpoint, tmp_path / "mine", x, small())
    with pytest.raises(DataError, match=r"letter.txt is no empty folder"):
        compress_checkpoint(checkpoint, tmp_path / "mine" / "letter.txt", x, small())
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    (tmp_path / "short").mkdir()
    for file in checkpoint.glob("*.json"):
        (tmp_path / "short" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(DataError, match=r"lacks model-00001-of"):
        compress_checkpoint(tmp_path / "short", tmp_path / "out", x, small())
    (tmp_path / "short" / "model.safetensors.index.json").unlink()
    tensors = {n: t for file in checkpoint.glob("*.safetensors") for n, t in load_file(file).items()}
    for lost in ("model.layers.1.input_layernorm.weight", "lm_head.weight"):
        save_file({n: t for n, t in tensors.items() if n != lost}, tmp_path / "short" / "model.safetensors")
        with pytest.raises(DataError, match=f"short lacks {lost}"):
            compress_checkpoint(tmp_path / "short", tmp_path / lost, x, small())
    whole = (tmp_path / "short" / "model.safetensors").read_bytes()
    (tmp_path / "short" / "model.safetensors").write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"model.safetensors is torn"):
        compress_checkpoint(tmp_path / "short", tmp_path / "torn", x, small())
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "llama")
    with pytest.raises(TargetError, match=r"LlamaForCausalLM has no experts.*LlamaMLP"):
        compress_checkpoint(tmp_path / "llama", tmp_path / "out", x, small())


@pytest.mark.slow
def test_calibration_text_is_set_end_to_end(checkpoint, tmp_path):
    text = checkpoint.parent / "text.txt"
    found = calibration_batches(checkpoint, text, samples=5, length=16, batch=2)
    assert [b.shape for b in found] == [(2, 16), (2, 16), (1, 16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"said": f"w{i} w{i}"}) + "\n" for i in range(40)))
    rows = calibration_batches(checkpoint, tmp_path / "rows.jsonl", column="said", samples=99, length=30)
    assert rows[0].shape == (4, 30)  # two words and an end, 40 times
    assert rows[0][0, :6].tolist()[2::3] == [2, 2]
    assert calibration_batches(checkpoint, text, length=9999)[0].shape[1] == SHAPE["max_position_embeddings"]
    (tmp_path / "short.txt").write_text("w1 w2")
    with pytest.raises(DataError, match="less than one window of 64"):
        calibration_batches(checkpoint, tmp_path / "short.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"bytes.txt is not UTF-8 text"):
        calibration_batches(checkpoint, tmp_path / "bytes.txt")
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        calibration_batches(tmp_path / "nowhere", text)
    with pytest.raises(DataError, match="no tokenizer loads"):
        calibration_batches(tmp_path, text)


# ---- the command


@pytest.mark.slow
def test_the_command_writes_a_model_and_says_what_it_costs(checkpoint, tmp_path):
    args = [checkpoint, tmp_path / "out", "--data", checkpoint.parent / "text.txt", "--samples", 8, "--length", 24]
    args += ["--group-size", 32, "--rank", 4, "--set", "placement=index", "--set", "grid=[2, 2]"]
    first = run(*args)
    assert first.exit_code == 0, first.output
    assert "layer 2/2" in first.stderr
    assert "bits per weight" in first.stdout
    assert "residual         2.0000" in first.stdout
    config, report = load_report(tmp_path / "out")
    assert (config.grid, config.rank, len(report.layers)) == ((2, 2), 4, 2)
    again = run(*args, "--json")
    assert json.loads(again.stdout)["bytes"] == report.nbytes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "'gptq' needs calibration batches"),
        (["--bits", "7", "--quantizer", "rtn"], "bits must be one of"),
        (["--quantizer", "rtn", "--set", "colour=red"], "--set colour=red: give KEY=VALUE; keys are bits, rank"),
        (["--quantizer", "rtn", "--group-size", "48"], "which group_size 48 does not divide"),
        (["--data", "nowhere.txt"], "there is no file nowhere.txt"),
        (["--data", "nowhere.txt", "--length", "0"], "length and batch must be at least 1, got 128, 0 and 8"),
    ],
)
def test_what_a_user_can_put_right_is_one_sentence_and_status_2(checkpoint, tmp_path, args, message):
    found = run(checkpoint, tmp_path / "out", *args)
    assert found.exit_code == 2
    errors = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


# ---- slow: every family, real text, a killed process


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_trained_compressed_streamed_and_loaded(family, tmp_path):
    model = model_of(family)
    learn(model, 60)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    x = tokens()
    with torch.no_grad():
        before = model(x[0]).logits
        report = quantize_moe(model, x, small(bits=4, placement="best"))
        after = model(x[0]).logits
        assert float((after - before).norm() / before.norm()) < 0.15
        compress_checkpoint(tmp_path / "model", tmp_path / "out", x, small(bits=4, placement="best"))
        assert torch.equal(load_compressed(tmp_path / "out")(x[0]).logits, after)
    dense = {"DeepseekV2": 1, "DeepseekV3": 1}.get(family, 2)  # the first layer of DeepSeek's has no experts
    assert len(report.layers) == dense


@pytest.mark.slow
def test_a_killed_process_goes_on_behind_its_last_layer(tmp_path):
    """A real process on a deeper model, killed outright once it has written a layer."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **SHAPE | FAMILIES["Mixtral"] | {"num_hidden_layers": 10, "num_local_experts": 16}
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="200KB")
    tokenizer(chat=False).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * i % 40}" for i in range(3000)))
    command = [sys.executable, "-m", "subspan", "compress", "model", "out", "--data", "text.txt", "--samples", "16"]
    command += ["--length", "64", "--group-size", "32", "--rank", "8", "--json"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (tmp_path / "out" / "layer-00001.safetensors").is_file():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("layer-*.safetensors")}
    assert 2 <= len(kept) < 10
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["layers"]) == 10
    assert all((tmp_path / "out" / n).stat().st_mtime_ns == stamp for n, stamp in kept.items())
    whole = [*command[:4], "model", "whole", *command[6:]]
    subprocess.run(whole, cwd=tmp_path, capture_output=True, check=True)
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")


@pytest.mark.slow
def test_memory_stays_below_the_model_when_it_is_streamed(tmp_path):
    """A checkpoint of 200 MB in 16 layers: a process that compresses it never holds more than a few layers."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16, "num_local_experts": 8}
    config = MixtralConfig(**SHAPE | wide, architectures=["MixtralForCausalLM"])
    config.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(64, 256), "model.norm.weight": torch.ones(256)}
    tensors["lm_head.weight"] = torch.randn(64, 256)
    layer = MixtralDecoderLayer(config, 0)
    shared = {n: p for n, p in layer.state_dict().items() if ".experts." not in n}
    for i in range(16):
        names = {f"model.layers.{i}.{n.replace('mlp.', 'block_sparse_moe.')}": p.clone() for n, p in shared.items()}
        for e in range(8):
            for w, size in (("w1", (512, 256)), ("w3", (512, 256)), ("w2", (256, 512))):
                names[f"model.layers.{i}.block_sparse_moe.experts.{e}.{w}.weight"] = 0.02 * torch.randn(size)
        tensors |= names
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    code = (
        "import torch; from subspan.resize import compress_checkpoint, TileQConfig;"
        "from subspan.resize.tileq.checkpoint import skeleton; import transformers.models.mixtral.modeling_mixtral;"
        "skeleton(__import__('pathlib').Path('model')); from sklearn.cluster import KMeans;"
        "from subspan.tune.memory import PeakMemory; memory = PeakMemory(); memory.reset();"
        "before = memory.mebibytes();"
        "compress_checkpoint('model', 'out', None, TileQConfig(quantizer='rtn', placement='index', rank=8));"
        "print((memory.mebibytes() - before) * 2**20)"
    )
    # glibc keeps freed chunks below 32 MiB to itself, in pieces; expert tensors of real models are larger than these.
    given_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=given_back, capture_output=True, text=True, check=True
    )
    assert size > 2e8
    assert 0 < float(done.stdout.split()[-1]) < 0.5 * size
