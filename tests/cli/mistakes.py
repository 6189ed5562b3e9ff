"""A table of user mistakes: the command, and what the message must say."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from megalith.data.tokenizer import train_byte_level_bpe
from tests.checkpoint.manifests import replace_listed
from tests.program import here
from tests.tiny_run import settings, write_dataset

__all__ = ["MISTAKES", "Mistake", "finished_run", "other_shape", "snapshot", "text", "tokenizer", "train"]

Mistake = Callable[[Path], list[object]]


def snapshot(folder: Path) -> dict[str, str]:
    """The hash of every file below ``folder``."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def train(folder: Path, *overrides: str, **groups: Any) -> list[object]:
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings(folder, **groups)))
    return ["train", path, *overrides]


def cut_short(folder: Path, suffix: str, size: int) -> list[object]:
    arguments = train(folder)
    file = folder / f"text{suffix}"
    file.write_bytes(file.read_bytes()[:size])
    return arguments


def garbage_index(folder: Path) -> list[object]:
    arguments = train(folder)
    (folder / "text.idx").write_bytes(b"PK\x03\x04" * 20)
    return arguments


def tokenizer(folder: Path, size: int, name: str) -> Path:
    path = folder / name
    train_byte_level_bpe(["some words to merge, some more words"] * 9, size).save(path)
    return path


def other_tokenizer(folder: Path) -> list[object]:
    ours, theirs = tokenizer(folder, 270, "ours.json"), tokenizer(folder, 262, "theirs.json")
    write_dataset(folder / "made", tokenizer=ours)
    return train(folder, f"data.tokenizer={theirs}", data={"train": str(folder / "made")}, model={"vocab_size": 270})


def two_tokenizers(folder: Path) -> list[object]:
    ours, theirs = tokenizer(folder, 270, "ours.json"), tokenizer(folder, 262, "theirs.json")
    data = {
        "train": write_dataset(folder / "a", tokenizer=ours),
        "valid": write_dataset(folder / "b", tokenizer=theirs),
    }
    return train(folder, data=data, model={"vocab_size": 270})


def unknown_vocabulary(folder: Path) -> list[object]:
    arguments = train(folder, "model.vocab_size=null")
    (folder / "text.json").unlink()
    return arguments


def finished_run(folder: Path) -> None:
    """A run of one step in ``folder / "run"``."""
    assert here(*train(folder, "train.steps=1")).code == 0


def other_shape(folder: Path) -> list[object]:
    finished_run(folder)
    return train(folder, "train.steps=2", "model.num_layers=3")


def other_seed(folder: Path) -> list[object]:
    finished_run(folder)
    return train(folder, "train.steps=2", "train.seed=7")


def never_resume(folder: Path) -> list[object]:
    finished_run(folder)
    return train(folder, "resume=never")


def load_a_run(folder: Path) -> list[object]:
    finished_run(folder)
    return train(folder, f"load={folder / 'run'}", f"run={folder / 'other'}")


def flipped_byte(folder: Path) -> list[object]:
    finished_run(folder)
    [step] = (folder / "run" / "checkpoints").glob("step-*")
    [shard] = step.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    return ["eval", step, "--data", folder / "text"]


def pickle_in_checkpoint(folder: Path) -> list[object]:
    finished_run(folder)
    [step] = (folder / "run" / "checkpoints").glob("step-*")
    replace_listed(step, "weights.pt", b"\x80\x02}q\x00.")
    return ["eval", step, "--data", folder / "text"]


def eval_without_data(folder: Path) -> list[object]:
    finished_run(folder)
    return ["eval", folder / "run"]


def run_is_a_file(folder: Path) -> list[object]:
    (folder / "taken").write_text("mine")
    return train(folder, f"run={folder / 'taken'}")


def text(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def prepared_twice(folder: Path) -> list[object]:
    first, second = text(folder, "a.txt", b"one text " * 50), text(folder, "b.txt", b"another " * 50)
    assert here("data", "prepare", first, "--out", folder / "p", "--vocab-size", 280).code == 0
    return ["data", "prepare", second, "--out", folder / "p", "--vocab-size", 280]


# what is wrong: (the command, what the message must say)
MISTAKES: dict[str, tuple[Mistake, str]] = {
    "no recipe": (lambda _: ["train"], "llama-4m"),
    "a recipe that is not there": (lambda _: ["train", "lama-4m"], "llama-4m"),
    "a settings file that is not there": (lambda f: ["train", f / "none.yaml"], "none.yaml"),
    "a settings file that is no YAML": (lambda f: ["train", text(f, "x.yaml", b"a: [1")], "x.yaml"),
    "an unknown key": (lambda f: train(f, "optim.learning_rate=1"), "optim.lr"),
    "a key of another group": (lambda f: train(f, "train.lr=1"), "optim.lr"),
    "an unknown key in the file": (lambda f: train(f, train={"step": 3}), "train.steps"),
    "a value of the wrong type": (lambda f: train(f, "train.steps=many"), "train.steps"),
    "heads that do not divide the hidden size": (
        lambda f: train(f, "model.num_attention_heads=5"),
        "num_attention_heads",
    ),
    "groups that do not divide the heads": (lambda f: train(f, "model.num_query_groups=3"), "num_query_groups"),
    "tensor = 0": (lambda f: train(f, "parallel.tensor=0"), "parallel.tensor"),
    "tensor does not divide the heads": (lambda f: [*train(f, "parallel.tensor=3"), "--nproc", 3], "parallel.tensor"),
    "a world that is no product": (lambda f: [*train(f, "parallel.tensor=2"), "--nproc", 3], "number of ranks"),
    "sequence parallel without tensor parallel": (lambda f: train(f, "parallel.sequence=true"), "parallel.sequence"),
    "a batch that ranks cannot share": (lambda f: [*train(f, "train.micro_batch_size=3")], "global_batch_size"),
    "a stage of the schedule that ranks cannot share": (
        lambda f: train(f, "train.batch_size_schedule=0:8 100:9", "train.global_batch_size=null"),
        "batch_size_schedule",
    ),
    "a minimum above the rate": (lambda f: train(f, "optim.schedule=cosine", "optim.min_lr=1"), "optim.min_lr"),
    "a setting without effect": (
        lambda f: train(f, "precision.loss_scale.hysteresis=3"),
        "precision.loss_scale.hysteresis",
    ),
    "a setting without effect, by the name of an earlier version": (
        lambda f: train(f, "precision.hysteresis=3"),
        "precision.loss_scale.hysteresis",
    ),
    "an experimental feature without its switch": (lambda f: train(f, "train.compile=true"), "experimental"),
    "compiling without a compiler": (
        lambda f: train(f, "train.compile=true", "experimental=[compile]"),
        r"C\+\+ compiler.*CXX",
    ),
    "too few positions": (
        lambda f: train(f, "model.position_embedding_type=learned_absolute", "model.max_position_embeddings=8"),
        "max_position_embeddings",
    ),
    "no data": (lambda f: train(f, "data.train=null"), "megalith data prepare"),
    "data that are not there": (lambda f: train(f, f"data.train={f / 'none'}"), r"none\.idx"),
    "a .bin cut short": (lambda f: cut_short(f, ".bin", 100), r"text\.bin"),
    "an .idx cut short": (lambda f: cut_short(f, ".idx", 50), r"text\.idx"),
    "an .idx that is none": (garbage_index, r"text\.idx"),
    "a tokenizer that is not there": (lambda f: train(f, f"data.tokenizer={f / 'none.json'}"), r"none\.json"),
    "another tokenizer than the data's": (other_tokenizer, "--tokenizer"),
    "two datasets of two tokenizers": (two_tokenizers, "different tokenizers"),
    "a vocabulary that is too small": (lambda f: train(f, "model.vocab_size=50"), "61"),
    "a vocabulary that nobody knows": (unknown_vocabulary, "model.vocab_size"),
    "a run folder that is a file": (run_is_a_file, "run="),
    "resume=never over a run": (never_resume, "resume=auto"),
    "a checkpoint of another shape": (other_shape, "num_layers|layers.2"),
    "a checkpoint of another seed": (other_seed, "train.seed=1234"),
    "load of a run's folder": (load_a_run, r"load=.*step-00000001"),
    "load of nothing": (lambda f: train(f, f"load={f / 'none'}"), "load"),
    "a flipped byte": (flipped_byte, r"shard-00000-of-00001\.safetensors"),
    "a pickle in a checkpoint": (pickle_in_checkpoint, r"weights\.pt"),
    "evaluation without data": (eval_without_data, "--data"),
    "evaluation of nothing": (lambda f: ["eval", f / "none"], "none"),
    "generation from nothing": (lambda f: ["generate", f / "none", "--prompt", "x"], "none"),
    "prepare: a file that is not there": (
        lambda f: ["data", "prepare", f / "none.txt", "--out", f / "p", "--vocab-size", 300],
        r"none\.txt",
    ),
    "prepare: a line that is no JSON": (
        lambda f: [
            *("data", "prepare", text(f, "d.jsonl", b'{"text": "a"}\n{oops\n'), "--out", f / "p", "--vocab-size", 300)
        ],
        r"d\.jsonl.*2",
    ),
    "prepare: a document without the key": (
        lambda f: [*("data", "prepare", text(f, "d.jsonl", b'{"body": "a"}\n'), "--out", f / "p", "--vocab-size", 300)],
        "--key",
    ),
    "prepare: bytes that are no text": (
        lambda f: ["data", "prepare", text(f, "d.txt", b"\xff\xfe\x00bad"), "--out", f / "p", "--vocab-size", 300],
        r"d\.txt",
    ),
    "prepare: other data under the same name": (prepared_twice, "--out"),
    "demo: a folder that is there": (lambda f: ["demo", "--out", f], "new folder"),
}
