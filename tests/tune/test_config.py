"""The configuration: what is refused is refused with one sentence that names the key and the remedy."""

import pytest
import yaml

from subspan.errors import ConfigError
from subspan.tune.config import Config, dump, load, parse

MINIMAL = {"model": "asset:minilm", "data": {"source": "asset:reviews"}, "output": "runs/x"}


def test_minimal_configuration_round_trips_through_yaml(tmp_path):
    config = parse(MINIMAL)
    path = tmp_path / "c.yaml"
    path.write_text(dump(config))
    assert load(path) == config


def test_examples_are_valid_and_differ_in_privacy():
    reviews, private = load("examples/reviews.yaml"), load("examples/reviews_private.yaml")
    assert (reviews.init, reviews.optimizer, reviews.privacy) == ("fisher", "muon", None)
    assert private.privacy is not None
    assert (private.privacy.epsilon, private.privacy.delta, private.privacy.method) == (8.0, 1e-5, "prism")
    large = load("examples/math_gemma_private.yaml")
    assert (large.adapter.r, large.batch_size, large.max_steps, large.lr) == (16, 64, 300, 3e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimiser": "muon"}, ["unknown key 'optimiser'", "did you mean 'optimizer'"]),
        ({"data": {"source": "x", "txet": "a"}}, ["unknown key in data: 'txet'", "did you mean 'text'"]),
        ({"privacy": {"epsilom": 3}}, ["unknown key in privacy: 'epsilom'", "did you mean 'epsilon'"]),
        ({"privacy": {"epsilon": -1}}, ["privacy.epsilon", "greater than 0", "-1"]),
        ({"init": "fischer"}, ["unknown init 'fischer'", "did you mean 'fisher'"]),
        ({"batch_size": 10, "accumulate": 3}, ["accumulate=3", "batch_size=10"]),
        ({"task": "causal-lm", "prompt": "no place"}, ["{text}"]),
        ({"max_steps": 0}, ["max_steps"]),
        ({"task": "causal-lm", "head_lr": 0.1}, ["head_lr=0.1", "no head"]),
    ],
)
def test_wrong_keys_and_values_are_named(change, words):
    with pytest.raises(ConfigError) as error:
        parse(MINIMAL | change)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"init": "fisher", "privacy": {"method": "naive"}}, ["fisher", "breaks the privacy guarantee", "data.public"]),
        ({"init": "eva", "privacy": {"method": "ffa"}}, ["eva", "breaks the privacy guarantee"]),
        ({"init": "pissa", "privacy": {"method": "prism"}}, ["prism brings its own start"]),
        ({"optimizer": "muon", "privacy": {"method": "prism"}}, ["prism is an optimiser itself"]),
        ({"optimizer": "muon", "privacy": {"method": "ffa"}}, ["ffa"]),
        ({"adapter": {"dora": True}, "privacy": {"method": "naive"}}, ["dora"]),
        ({"init": "fisher", "fisher": {"preserve": "zero_b", "mode": "score"}}, ["zero_b", "mode: eigen"]),
        ({"accumulate": 2, "privacy": {}}, ["physical_batch"]),
    ],
)
def test_combinations_that_make_no_sense_are_refused_with_the_reason(change, words):
    with pytest.raises(ConfigError) as error:
        parse(MINIMAL | change)
    for word in words:
        assert word in str(error.value)


def test_a_data_dependent_start_is_allowed_under_privacy_on_public_rows():
    config = parse(
        MINIMAL
        | {"init": "fisher", "privacy": {"method": "naive"}, "data": {"source": "asset:reviews", "public": True}}
    )
    assert config.data.public


def test_overrides_reach_nested_keys_and_reject_unknown_ones(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    config = load(path, ["adapter.r=4", "lr=1e-3", "privacy.epsilon=3", "max_steps=7"])
    assert (config.adapter.r, config.lr, config.max_steps) == (4, 1e-3, 7)
    assert config.privacy is not None
    assert config.privacy.epsilon == 3
    with pytest.raises(ConfigError, match=r"unknown key in adapter: 'rnak'"):
        load(path, ["adapter.rnak=4"])
    with pytest.raises(ConfigError, match="key=value"):
        load(path, ["adapter.r"])
    with pytest.raises(ConfigError, match="model is not a section"):
        load(path, ["model.name=x"])


@pytest.mark.parametrize(("text", "words"), [("a: [1", "not valid YAML"), ("- 1", "must hold keys and values")])
def test_a_malformed_file_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(path)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load("nowhere.yaml")


def test_the_json_schema_lists_every_key_for_editors():
    schema = Config.model_json_schema()
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["additionalProperties"] is False


def test_overrides_that_are_no_yaml_are_text_where_text_belongs(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("model: m\ntask: causal-lm\ndata: {source: d.csv}\noutput: out\nprivacy: prism\n")
    assert load(path, ["prompt={text} {rating}"]).prompt == "{text} {rating}"
    assert load(path, ["prompt={text}"]).prompt == "{text}"
    assert load(path, ["system=null"]).system is None
    assert load(path, ["privacy.twin=false"]).privacy.twin is False
    with pytest.raises(ConfigError, match=r"--set lr: '\[1' is not valid YAML"):
        load(path, ["lr=[1"])
    with pytest.raises(ConfigError, match="is a folder"):
        load(tmp_path)
    path.write_bytes(b"model: \xff\xfe")
    with pytest.raises(ConfigError, match=r"a\.yaml is not UTF-8"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "say {text}"}, "a classifier reads the text alone"),
        ({"system": "be brief"}, "a classifier reads the text alone"),
        ({"privacy": "naive", "max_grad_norm": 0.5}, "privacy.clip"),
    ],
)
def test_what_would_be_ignored_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        parse({"model": "m", "data": {"source": "d"}, "output": "o"} | changes)


def test_a_resolved_configuration_reads_back_as_itself(tmp_path):
    for changes in ({}, {"optimizer": "lozo"}, {"privacy": "naive"}, {"task": "causal-lm"}, {"adapter": None}):
        config = parse({"model": "m", "data": {"source": "d"}, "output": "o"} | changes)
        path = tmp_path / "resolved.yaml"
        path.write_text(dump(config))
        assert load(path) == config
