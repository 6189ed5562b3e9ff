"""Loading a run's settings from files, recipes, mappings and overrides, and writing them."""

import copy
import os
import pickle

import pytest
import yaml

from megalith.config import (
    AdamWConfig,
    EvaluationConfig,
    OptimConfig,
    RopeConfig,
    RunConfig,
    TransformerConfig,
    as_tree,
    dump_yaml,
    load_run,
    read_tree,
)
from megalith.config.dotted import leaves
from megalith.config.settings_tree import applied
from megalith.config.yaml_text import write_override
from megalith.errors import ConfigError
from tests.config.mistakes import LEARNED, SGD, VALID, WSD

# runs that differ in which fields have an effect
RUNS = {
    "plain": {},
    "learned positions": LEARNED | {"model.activation": "gelu", "model.normalization": "LayerNorm"},
    "preset": {"model": {"preset": "gpt2-124m", "hidden_dropout": 0.0}},
    "preset without its positions": {"model": {"preset": "gpt2-124m", "position_embedding_type": "rope"}},
    "WSD": WSD | {"optim.min_lr": 1e-5},
    "constant": {"optim.schedule": "constant"},
    "inverse square root": {"optim.schedule": "inverse-square-root", "optim.warmup_steps": 7},
    "weight decay ramp": {"optim.weight_decay_ramp.schedule": "linear", "optim.weight_decay_ramp.end": 0.3},
    "batch sizes": {"train.batch_size_schedule": "0:16 1K:24", "train.global_batch_size": None},
    "float16": {"precision.dtype": "float16", "precision.loss_scale.initial": 1024},
    "evaluation": {"train.evaluation.every": 10, "train.evaluation.samples": 5, "data.valid": "held out"},
    "sgd": SGD | {"optim.sgd.momentum": 0.9, "optim.sgd.nesterov": True},
    "overrides": {"optim.overrides": [{"match": "*.bias", "wd_mult": 0.0}, {"match": "lm_head.*", "max_lr": 1e-4}]},
    "experimental": {"train.compile": True, "experimental": ["compile"]},
    "odd text": {"run": "1e5", "load": "no", "data.train": "null", "data.valid": "12:30", "data.tokenizer": "ü: #x"},
}


@pytest.fixture(params=RUNS.values(), ids=RUNS)
def config(request) -> RunConfig:
    return load_run(applied(VALID, request.param))


def test_yaml_reads_back_as_the_same_run(config, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(config), "utf-8")
    again = load_run(path)
    assert again == config
    assert dump_yaml(again) == dump_yaml(config)


def test_any_yaml_reader_reads_the_same_values(config):
    assert yaml.safe_load(dump_yaml(config)) == as_tree(config)


def test_named_validation_sets_keep_their_order_in_yaml_and_in_an_override():
    sets = {"web": "a b", "code-2": "12:30", "all": "ü: #x"}
    config = load_run(applied(VALID, {"data.valid": sets}))
    again = load_run(yaml.safe_load(dump_yaml(config)))
    overridden = load_run(VALID, [write_override("data.valid", sets)])
    assert config == again == overridden
    assert hash(config) == hash(again) == hash(overridden)
    assert [list(each.data.valid_sets.items()) for each in (again, overridden)] == [list(sets.items())] * 2


def test_overrides_alone_spell_the_same_run(config):
    tree = as_tree(config)
    assert load_run({}, [write_override(name, value) for name, value in leaves(tree)]) == config


def test_python_objects_spell_the_same_run(config):
    groups = {name: config.__dict__[name] for name in RunConfig.model_fields}
    assert load_run(groups) == config
    assert RunConfig(**groups) == config
    assert hash(RunConfig(**groups)) == hash(config)


def test_defaults_that_follow_other_fields_are_worked_out():
    config = load_run(VALID)
    assert config.model.num_query_groups == 4
    assert config.model.kv_channels == 8
    assert config.model.ffn_hidden_size == 256  # 8/3 * 96
    assert config.model.max_position_embeddings is None
    assert config.optim.decay_steps == 100
    assert (config.model.rope, config.optim.adamw) == (RopeConfig(base=10000.0), AdamWConfig())
    assert (config.optim.sgd, config.optim.wsd, config.precision.loss_scale) == (None, None, None)
    learned = load_run(applied(VALID, LEARNED | {"model.activation": "gelu"}))
    assert (learned.model.max_position_embeddings, learned.model.ffn_hidden_size) == (64, 384)
    assert load_run(applied(VALID, RUNS["batch sizes"])).train.global_batch_size == 24


def test_overrides_take_numbers_lists_null_and_text():
    changes = [
        "optim.lr=3e-4",
        "optim.adamw.betas=[0.8, 9e-1]",
        "train.steps=1_000",
        "optim.decay_steps=null",
        "load=",
        "run=2024",
        "data.valid = a=b",
        'optim.overrides=[{match: "*", wd_mult: 0}]',
        "optim.lr=2e-4",  # the later one wins
    ]
    config = load_run(VALID | {"load": "elsewhere"}, changes)
    assert (config.optim.lr, config.optim.adamw.betas, config.train.steps) == (2e-4, (0.8, 0.9), 1000)
    assert (config.optim.decay_steps, config.load, config.run, config.data.valid) == (1000, None, "2024", "a=b")
    assert [(group.match, group.wd_mult) for group in config.optim.overrides] == [("*", 0.0)]


def test_a_nested_group_is_taken_out_by_null_and_set_field_by_field():
    evaluated = {"data.valid": "held_out", "train.evaluation.every": 5, "train.evaluation.samples": 7}
    tree = applied(VALID, evaluated)
    assert load_run(tree, ["train.evaluation.samples=null"]).train.evaluation == EvaluationConfig(every=5)
    assert load_run(tree, ["train.evaluation=null"]).train.evaluation is None
    assert load_run(VALID, ["model.rope.base=500"]).model.rope == RopeConfig(base=500.0)


def test_a_field_of_a_group_beside_a_preset_overrides_that_field_alone():
    assert TransformerConfig(preset="llama3-8b").rope == RopeConfig(base=500000.0)
    assert TransformerConfig(preset="llama3-8b", rope={"base": 1e6}).rope == RopeConfig(base=1e6)
    learned = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 64}
    assert TransformerConfig(preset="llama3-8b", **learned).rope is None


def test_null_puts_a_field_of_a_recipe_back_to_its_default():
    assert load_run("llama-4m").optim.min_lr == 2e-4
    assert load_run("llama-4m", ["optim.min_lr=null", "optim.schedule=constant"]).optim.min_lr == 0.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", r"must look like optim.lr=3e-4; got 'optim.lr'"),
        ("=3", r"must look like"),
        ("optim.warmup=3", r"there is no setting optim.warmup; did you mean optim.warmup_steps\?"),
        ("train.lr=3", r"did you mean optim.lr\?"),
        ("optim={lr: 3}", r"optim is a group; override one of its fields: name, lr"),
        ("optim.adamw={eps: 1}", r"optim.adamw is a group; override one of its fields: betas, eps"),
        ("optim=null", r"optim is a group; override one of its fields: name, lr"),
        ("optim.adamw.epsilon=1", r"there is no setting optim.adamw.epsilon; did you mean optim.adamw.eps\?"),
        ("optim.overrides.0.max_lr=3", r"there is no setting optim.overrides.0.max_lr"),
        ("optim.adamw.betas=[0.9", r"the value of override 'optim.adamw.betas=\[0.9' cannot be read as YAML"),
        ("optim.lr=fast", r"optim.lr must be a number; got 'fast'"),
    ],
)
def test_an_override_that_cannot_be_read_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        load_run(VALID, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- model", r"must hold groups of settings"),
        ("", r"must hold groups of settings"),
        ("model: [1", r"run.yaml cannot be read as YAML: .* line 1"),
        ("train:\n  steps: 1\n  steps: 2", r"'steps' is given twice"),
        ("model: &a {}\n? [1]\n: 2", r"cannot be read as YAML"),
        (b"\xff\xfe\x00", r"run.yaml cannot be read as YAML: byte 0 is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        load_run(str(path))


def test_unknown_overrides_wrong_types_and_broken_rules_are_told_together():
    changes = ["optim.lr=-1", "train.steps=x", "foo=1", "optim", "optim.eps=1", "optim.adamw.eps=2", "model.rope=3"]
    with pytest.raises(ConfigError) as refusal:
        load_run(VALID | {"bar": 2}, [*changes, "model.num_attention_heads=20"])
    first, *lines = str(refusal.value).splitlines()
    assert first == "8 settings are invalid:"
    for wanted in (
        "optim.lr must be above 0",
        "train.steps must be an integer; got 'x'",
        "there is no setting foo",
        "must look like optim.lr=3e-4; got 'optim'",
        "optim.eps is now optim.adamw.eps, and both are given",
        "model.rope is a group",
        "there is no setting bar",
        "hidden_size (96) must be divisible by model.num_attention_heads (20)",
    ):
        assert sum(wanted in line for line in lines) == 1, wanted


def test_of_thousands_of_mistakes_the_first_are_told_and_the_rest_counted():
    with pytest.raises(ConfigError) as refusal:
        load_run(VALID | {f"key{number}": 1 for number in range(500)})
    lines = str(refusal.value).splitlines()
    assert (lines[0], len(lines), lines[-1]) == ("500 settings are invalid:", 52, "  and 450 more")


def test_values_by_name_are_overridden_one_by_one():
    both = ["data.train={web: a, code: b}", "data.weights={web: 1, code: 2}"]
    data = load_run("llama-4m", [*both, "data.train.web=c", "data.weights.code=5", "data.valid.held_out=d"]).data
    assert (data.train, data.weights) == ({"web": "c", "code": "b"}, {"web": 1, "code": 5})
    assert data.valid == {"held_out": "d"}
    again = load_run("llama-4m", ["data.train.a=x", "data.train.b=y", "data.train.c=z", "data.train.b=null"]).data
    assert again.train == {"a": "x", "c": "z"}
    with pytest.raises(ConfigError, match=r"data.train=x has no names; give all values by name: data.train='{NAME: "):
        load_run("llama-4m", ["data.train=x", "data.train.web=y"])
    with pytest.raises(ConfigError, match=r"there is no setting run.web"):
        load_run("llama-4m", ["run.web=y"])


@pytest.mark.parametrize("name", ["run", "load", "data.train", "data.valid", "data.tokenizer"])
def test_a_path_that_no_file_can_have_is_refused(name):
    with pytest.raises(ConfigError, match=rf"{name} must not contain a NUL character"):
        load_run(applied(VALID, {name: "a\0b"}))
    with pytest.raises(ConfigError, match=rf"{name} must be text in UTF-8; got 'a\\ud800'"):
        load_run(applied(VALID, {name: "a\ud800"}))


@pytest.mark.parametrize("name", ["model.hidden_size", "train.global_batch_size", "parallel.shard", "train.steps"])
@pytest.mark.parametrize("value", [2**63, 10**99])
def test_a_number_that_nothing_can_have_is_refused_at_once(name, value):
    with pytest.raises(ConfigError, match=rf"{name} must be at most (2147483647|9223372036854775807)"):
        load_run(applied(VALID, {name: value}))


def make_fifo(path):
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_fifo, "it is a FIFO, not a regular file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"#" * 300_000), "it has 300,000 bytes; the limit is 262,144"),
    ],
)
def test_what_is_no_file_of_settings_is_refused_without_opening_it(make, message, tmp_path):
    make(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=message):
        load_run(str(tmp_path / "run.yaml"))


def test_a_file_or_recipe_that_is_not_there_is_refused_with_the_recipes_that_are():
    with pytest.raises(ConfigError, match=r"there is no recipe lama-4m; .* gpt2-124m, llama-28m, llama-4m"):
        load_run("lama-4m")
    with pytest.raises(
        ConfigError,
        match=r"cannot be read from nowhere.yaml: .*available recipes: bert-tiny, classification-tiny, ",
    ):
        load_run("nowhere.yaml")


def test_the_source_is_not_changed():
    tree = copy.deepcopy(VALID)
    load_run(tree, ["optim.lr=1", "run=x"])
    assert tree == VALID
    assert read_tree(tree)["optim"] is not tree["optim"]


def test_a_run_built_in_python_keeps_the_same_rules():
    model = TransformerConfig(preset="llama-4m")
    parts = {"data": {"seq_length": 64}, "train": {"steps": 5, "global_batch_size": 3, "micro_batch_size": 1}}
    with pytest.raises(ValueError, match=r"optim.min_lr \(2.0\) must be at most optim.lr \(1.0\)"):
        RunConfig(model=model, optim=OptimConfig(lr=1.0, min_lr=2.0), **parts)
    assert RunConfig(model=model, optim=OptimConfig(lr=1.0), **parts).optim.decay_steps == 5


def test_a_copy_is_an_equal_run_of_its_own():
    config = load_run(VALID)
    assert copy.deepcopy(config) == copy.copy(config) == pickle.loads(pickle.dumps(config)) == config
    assert RunConfig.model_validate(config) == config
    resolved = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 512})})
    assert (resolved.model.vocab_size, resolved.model.num_layers, config.model.vocab_size) == (512, 4, None)
    assert resolved != config


def test_settings_are_frozen():
    config = load_run(VALID)
    with pytest.raises(ValueError, match="frozen"):
        config.optim.lr = 1.0
    with pytest.raises(ValueError, match="frozen"):
        config.run = "elsewhere"
