"""Hugging Face folders that do not fit or are malicious: every family refuses each with one message.

Nothing is written or changed, and it takes little memory and time, whatever sizes the folder claims.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import tokenizers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megalith.errors import MegalithError
from megalith.models.hf import detect, open_folder
from tests.cli.hostile_files import VALUES, bounded
from tests.program import here
from tests.sampling import sampled
from tests.training.tasks.conversion.folders import write_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    "deepseek v3",
    "deepseek v2",
    "mixtral",
    "qwen3 of experts",
    "gpt-oss",
    "roformer",
)
MOST = 384 << 20  # bytes of address space that a refusal may use; a thread of tokenizers reserves 64 MiB
CONFIG, INDEX, TOKENIZER = "config.json", "model.safetensors.index.json", "tokenizer.json"
GENERATION = "generation_config.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A sharded folder of each family, created at first use."""
    made = tmp_path_factory.mktemp("sound")

    def folder(family):
        if not (made / family).exists():
            write_folder(made / family, family, max_shard_size="10KB")
        return made / family

    return folder


def rewrite(path, **changed):
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def config(**changed):
    return lambda folder: rewrite(folder / CONFIG, **changed)


def size(setting, value):
    """Changes the field of config.json from which our ``setting`` is read."""

    def damage(folder):
        fields = detect(json.loads((folder / CONFIG).read_text())).sizes
        [name] = (theirs for theirs, ours in fields.items() if ours == setting)
        rewrite(folder / CONFIG, layer_types=None, **{name: value})  # its length would no longer match

    return damage


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def tensors(change):
    """Replaces the first shard; the index lists what is in it."""

    def damage(folder):
        shard = shards(folder)[0]
        content = load_file(shard)
        change(content, next(iter(content)))
        save_file(content, shard, {"format": "pt"})
        listed = json.loads((folder / INDEX).read_text())["weight_map"]
        listed = {name: file for name, file in listed.items() if file != shard.name}
        rewrite(folder / INDEX, weight_map=listed | dict.fromkeys(content, shard.name))

    return damage


def header(change):
    """Replaces the first shard's header and keeps the bytes after it."""

    def damage(folder):
        shard = shards(folder)[0]
        content = shard.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        text = change(json.loads(content[8:end]))
        text = text if isinstance(text, bytes) else json.dumps(text).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return damage


def first_entry(**fields):
    def change(entries):
        key = next(key for key in entries if key != "__metadata__")
        return entries | {key: entries[key] | fields}

    return header(change)


def all_at_the_same_bytes(entries):
    first = next(entry for key, entry in entries.items() if key != "__metadata__")
    return entries | {"another": first}


def point_to(shard):
    def damage(folder):
        listed = json.loads((folder / INDEX).read_text())["weight_map"]
        rewrite(folder / INDEX, weight_map=listed | {next(iter(listed)): shard})

    return damage


def a_tensor_in_two_shards(folder):
    first, second = shards(folder)[:2]
    with safe_open(first, "pt") as content:
        key = next(iter(content.keys()))
        save_file({key: content.get_tensor(key), **load_file(second)}, second, {"format": "pt"})


def only_pickles(folder):
    for shard in shards(folder):
        shard.rename(shard.with_suffix(".bin"))
    (folder / INDEX).unlink()


def larger_tokenizer(folder):
    made = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    made.add_tokens([f"word{number}" for number in range(9)])
    made.save(str(folder / TOKENIZER))


def content(file, text):
    return lambda folder: (folder / file).write_bytes(text)


def long(file):
    """Makes a file hundreds of megabytes long; sparse, so that it takes no disk space."""

    def damage(folder):
        (folder / file).touch()  # the folder of an encoder has no generation_config.json
        os.truncate(folder / file, 300 << 20)

    return damage


NESTED = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
# what is wrong: (how to break a valid folder, what the message must say)
ATTACKS = {
    "an architecture that we do not have": (config(model_type="mamba"), "must have a model_type of llama, mistral"),
    "code for its architecture": (
        config(model_type="x", auto_map={"AutoModelForCausalLM": "evil.Model"}),
        "must have a model_type of llama, mistral",
    ),
    "a field that we do not know": (config(logit_bias_of_mine=0.5), "logit_bias_of_mine"),
    "a tensor is missing": (tensors(lambda found, key: found.pop(key)), "missing: "),
    "a tensor too many": (tensors(lambda found, key: found.update(x=found[key].clone())), r"unexpected: .*x \["),
    "a tensor of another shape": (
        tensors(lambda found, key: found.update({key: found[key].new_ones(3, 5)})),
        r"wrong shape: .*; got \[3, 5\]",
    ),
    "a tensor of integers": (tensors(lambda found, key: found.update({key: found[key].int()})), "is I32"),
    "a tokenizer of more tokens": (larger_tokenizer, r"tokenizer\.json must have ids below 271"),
    "an end that the tokenizer does not have": (config(eos_token_id=5000), "must have an end-of-document token, 5000"),
    "a tokenizer nested 100,000 deep": (content(TOKENIZER, NESTED), r"tokenizer\.json must be a tokenizer\.json"),
    "a tokenizer of 300 MB": (long(TOKENIZER), r"tokenizer\.json must be a tokenizer\.json"),
    "a shard above the folder": (point_to("../x.safetensors"), r"in its own folder; it names '\.\./x\.safetensors'"),
    "a shard by an absolute path": (point_to("/dev/zero"), "in its own folder; it names '/dev/zero'"),
    "a shard that is the folder": (point_to(".."), r"in its own folder; it names '\.\.'|Is a directory|not a regular"),
    "a shard that is not there": (point_to("a.safetensors"), r"a\.safetensors: No such file"),
    "a tensor in two shards": (a_tensor_in_two_shards, "must list the same tensors; only one of them has: "),
    "two tensors in the same bytes": (header(all_at_the_same_bytes), "must begin at byte"),
    "only pickles": (only_pickles, r"\.bin, but pickle files are never read"),
    "a pickle by the name of a shard": (
        lambda folder: shards(folder)[0].write_bytes(b"\x80\x04cos\nsystem\n(S'exit 3'\ntR." + b"\0" * 99),
        "cannot be read as safetensors",
    ),
    "a shape that no memory holds": (
        first_entry(shape=[2**40, 2**40]),
        "data_offsets span .* bytes, which does not match",
    ),
    "a shape below nothing": (first_entry(shape=[-1, -32]), "shape and data_offsets must be non-negative integers"),
    "offsets that are no numbers": (first_entry(data_offsets=["0", 8]), "cannot be read as safetensors"),
    "a header of 2^63 bytes": (
        lambda folder: shards(folder)[0].write_bytes(bytes(7) + b"\x80" + bytes(99)),
        "its header must fit in the file .*; got 9,223,372,036,854,775,808",
    ),
    "a header nested 100,000 deep": (header(lambda _: NESTED), "cannot be read as safetensors"),
    "a thousand million layers": (size("num_layers", 10**9), "num_layers"),
    "a width that no machine has": (size("hidden_size", 2**62), "hidden_size|wrong shape"),
    "a vocabulary that no machine has": (size("vocab_size", 2**30), "wrong shape: .*embed|wrong shape: .*wte"),
    "no heads": (size("num_attention_heads", 0), "num_attention_heads"),
    "a width that is text": (size("hidden_size", "32"), "must be an integer; got '32'"),
    "layers that are a list": (size("num_layers", [2]), r"must be an integer; got \[2\]"),
    "a config of 300 MB": (long(CONFIG), r"config\.json has 314,572,800 bytes; the limit is"),
    "a generation config of 300 MB": (
        long(GENERATION),
        r"generation_config\.json has 314,572,800 bytes; the limit is",
    ),
    "an index of 300 MB": (long(INDEX), r"index\.json has 314,572,800 bytes; the limit is"),
    "a config nested 100,000 deep": (content(CONFIG, NESTED), r"config\.json is not JSON"),
    "a generation config nested 100,000 deep": (content(GENERATION, NESTED), r"generation_config\.json is not JSON"),
    "an index nested 100,000 deep": (content(INDEX, NESTED), r"index\.json is not JSON"),
    "an index that maps to lists": (content(INDEX, b'{"weight_map": {"a": ["b"]}}'), "must have a weight_map"),
}


def state_of(folder):
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize(("family", "attack"), sampled([(family, attack) for family in FAMILIES for attack in ATTACKS]))
def test_a_folder_that_does_not_fit_is_one_message_and_nothing_is_written(family, attack, sound, tmp_path):
    folder = Path(shutil.copytree(sound(family), tmp_path / "hf"))
    damage, says = ATTACKS[attack]
    damage(folder)
    before = state_of(tmp_path)
    with bounded(MOST):
        found = here("convert", "import", folder, "--out", tmp_path / "new", "--no-proof")
    assert (found.code, found.out) == (2, ""), found
    assert found.err.startswith("error: ")
    assert len(found.err) < 10_000
    assert "Traceback" not in found.err
    assert re.search(says, found.err), found.err
    assert state_of(tmp_path) == before


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family == "gemma3" else pytest.mark.slow) for family in FAMILIES]
)
def test_any_value_in_any_field_of_a_config_is_read_or_refused(family, sound, tmp_path):
    folder = Path(shutil.copytree(sound(family), tmp_path / "hf"))
    given = json.loads((folder / CONFIG).read_text())
    described = detect(given)
    refusals = []
    with bounded(MOST, seconds=60.0):
        for field in {*given, *described.sizes, *described.fields, "rope_scaling", "rope_parameters", "layer_types"}:
            for value in VALUES:
                (folder / CONFIG).write_text(json.dumps(given | {field: value}), errors="surrogatepass")
                try:
                    open_folder(folder)
                except MegalithError as error:
                    refusals.append(str(error))
    assert len(refusals) > 300
    assert max(map(len, refusals)) < 10_000


def test_a_prompt_longer_than_learned_positions_is_refused_before_the_model_is_loaded(sound, monkeypatch):
    monkeypatch.setattr("megalith.training.tasks.generation._foreign_weights", None)
    found = here("generate", sound("gpt2"), "--prompt", "qx" * 400)
    assert (found.code, found.out) == (2, "")
    assert "the prompt must be shorter than" in found.err
