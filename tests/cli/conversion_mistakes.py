"""A table of user mistakes with Hugging Face models; and malicious folders."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from megalith.config import TransformerConfig
from megalith.models import hf
from tests.cli.mistakes import Mistake, finished_run, tokenizer, train
from tests.program import here
from tests.tiny_run import LLAMA, write_dataset

__all__ = ["CONVERSION_MISTAKES"]

_CONFIG = TransformerConfig(**LLAMA)
_NORM = "model.norm.weight"
_NO_RUN = r"none does not exist; give the folder of a run or of one of its checkpoints\n$"
_NO_MODEL = r"none does not exist; give the folder .* checkpoints, or a Hugging Face or Megatron folder\n$"

Tensors = dict[str, torch.Tensor]


def model_folder(folder: Path, change: Callable[[Tensors], object] = len, **fields: object) -> Path:
    """A Llama in ``folder/hf``; ``change`` modifies its tensors, ``fields`` those of its config.json."""
    path = folder / "hf"
    path.mkdir()
    described = hf.LLAMA.config_to_hf(_CONFIG, max_position_embeddings=16, dtype="float32", eos_token_id=None)
    (path / "config.json").write_text(json.dumps(described | fields))
    tensors = {name: torch.ones(shape) for name, shape in hf.parameter_shapes(_CONFIG).items()}
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def convert(change: Callable[[Tensors], object] = len, **fields: object) -> Mistake:
    return lambda folder: ["convert", "import", model_folder(folder, change, **fields), "--out", folder / "new"]


def in_shards(weight_map: dict[str, str], *files: str) -> Mistake:
    """An index over ``files``, each of which contains only the last norm."""

    def mistake(folder: Path) -> list[object]:
        arguments = convert()(folder)
        (folder / "hf" / "model.safetensors").unlink()
        for file in files:
            save_file({_NORM: torch.ones(32)}, folder / "hf" / file)
        (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return arguments

    return mistake


def only_a_pickle(folder: Path) -> list[object]:
    arguments = convert()(folder)
    (folder / "hf" / "model.safetensors").rename(folder / "hf" / "pytorch_model.bin")
    return arguments


def out_is_there(folder: Path) -> list[object]:
    (folder / "new").mkdir()
    (folder / "new" / "mine").write_text("mine")
    return convert()(folder)


def tokenizer_without_an_end(folder: Path) -> list[object]:
    return [*with_tokenizer(folder), "--eod", "<none>"]


def with_tokenizer(folder: Path) -> list[object]:
    arguments = convert()(folder)
    tokenizer(folder, 270, "hf/tokenizer.json")
    return arguments


def tokenizer_that_is_none(folder: Path) -> list[object]:
    arguments = convert()(folder)
    (folder / "hf" / "tokenizer.json").write_text("{}")
    return arguments


def no_family_has_it(folder: Path) -> list[object]:
    assert here(*train(folder, "train.steps=1", "model.hidden_dropout=0.1")).code == 0
    return ["convert", "export", folder / "run", "--out", folder / "new"]


def export(*arguments: object) -> Mistake:
    def mistake(folder: Path) -> list[object]:
        finished_run(folder)
        return ["convert", "export", folder / "run", "--out", folder / "new", *arguments]

    return mistake


def train_from(*overrides: str) -> Mistake:
    def mistake(folder: Path) -> list[object]:
        write_dataset(folder / "text")
        more = [f"data.train={folder / 'text'}", f"run={folder / 'run'}", "train.steps=1", *overrides]
        return ["train", "--from", model_folder(folder), *more]

    return mistake


def train_from_another_tokenizer(folder: Path) -> list[object]:
    arguments = train_from()(folder)
    tokenizer(folder, 262, "hf/tokenizer.json")
    write_dataset(folder / "made", tokenizer=tokenizer(folder, 270, "ours.json"))
    return [*arguments, f"data.train={folder / 'made'}", "model.vocab_size=270"]


# like MISTAKES: what is wrong: (the command, what the message must say)
CONVERSION_MISTAKES: dict[str, tuple[Mistake, str]] = {
    "import: no folder": (lambda f: ["convert", "import", f / "none", "--out", f / "new"], r"none/config\.json"),
    "import: an architecture that we do not have": (convert(model_type="mamba"), "model_type of llama, mistral"),
    "import: a field that changes the network": (convert(sliding_window=8), "sliding_window"),
    "import: a config of another shape": (convert(hidden_size=64), r"must be \[61, 64\]; got \[61, 32\]"),
    "import: a config of sizes that no machine has": (
        convert(hidden_size=2**31 - 8, head_dim=2**20, num_hidden_layers=10_000),
        r"with 10,000 layers must have at least one tensor for each; found only \d+; does config",
    ),
    "import: a tensor is missing": (convert(lambda tensors: tensors.pop(_NORM)), rf"missing: {_NORM}"),
    "import: a tensor too many": (convert(lambda tensors: tensors.update(x=torch.ones(1))), r"unexpected: x \[1\]"),
    "import: integers for weights": (
        convert(lambda tensors: tensors.update({_NORM: torch.ones(32, dtype=torch.int32)})),
        rf"must have one of the dtypes F64, F32, BF16, F16; {_NORM} is I32",
    ),
    "import: a tied head that is another": (
        convert(lambda tensors: tensors["lm_head.weight"].zero_(), tie_word_embeddings=True),
        r"lm_head\.weight must equal model\.embed_tokens\.weight",
    ),
    "import: only a pickle": (only_a_pickle, r"pytorch_model\.bin, but pickle files are never read"),
    "import: a shard outside of the folder": (in_shards({_NORM: "../x.safetensors"}), r"names '\.\./x\.safetensors'"),
    "import: a shard by an absolute path": (in_shards({_NORM: "/dev/zero"}), "names '/dev/zero'"),
    "import: a tensor in two shards": (
        in_shards({_NORM: "a.safetensors", "x": "b.safetensors"}, "a.safetensors", "b.safetensors"),
        rf"b\.safetensors and .* must list the same tensors; only one of them has: {_NORM}, x",
    ),
    "import: a shard that is not there": (in_shards({_NORM: "a.safetensors"}), r"a\.safetensors: No such file"),
    "import: a folder that is there": (out_is_there, "new already exists and will not be overwritten"),
    "import: a tokenizer that is none": (tokenizer_that_is_none, r"tokenizer\.json"),
    "import: a tokenizer of more tokens than the model": (
        with_tokenizer,
        r"tokenizer\.json must have ids below 61, .*; text gives ids up to 269 .*; use the tokenizer\.json",
    ),
    "import: a token that the tokenizer has not": (tokenizer_without_an_end, "--eod"),
    "export: no run": (lambda f: ["convert", "export", f / "none", "--out", f / "new"], _NO_RUN),
    "export: a dtype that there is not": (export("--dtype", "int8"), "the dtype must be one of float64"),
    "export: a model that no family has": (no_family_has_it, r"(?s)LlamaForCausalLM cannot.*hidden_dropout"),
    "prove: no run": (lambda f: ["convert", "prove", f / "none", model_folder(f)], _NO_RUN),
    "--from nothing": (lambda f: ["train", "--from", f / "none", "data.train=x"], _NO_MODEL),
    "generate: nothing": (lambda f: ["generate", f / "none", "--prompt", "a"], _NO_MODEL),
    "generate: no model": (lambda f: ["generate", f, "--prompt", "a"], "nor a checkpoint, nor a Hugging Face or Megat"),
    "eval: no run": (lambda f: ["eval", f, "--data", "x"], "neither a run .* nor a checkpoint; give one of them"),
    "eval: a folder of Hugging Face": (
        lambda f: ["eval", model_folder(f), "--data", "x"],
        "hf is a model of Hugging Face or Megatron, .*make it a run with megalith convert import .*hf --out RUN",
    ),
    "--from and a recipe that is not there": (
        lambda f: ["train", "lama-4m", "--from", model_folder(f)],
        "there is no recipe lama-4m",
    ),
    "--from with another shape": (train_from("model.num_layers=3"), "layers.2"),
    "--from with data of another tokenizer": (train_from_another_tokenizer, "a different tokenizer than the model of"),
}
