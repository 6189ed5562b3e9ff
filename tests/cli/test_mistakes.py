"""What people get wrong: each mistake is one message with the way out, exit code 2, and nothing changed on disk."""

import hashlib
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalith.data.tokenizer import train_byte_level_bpe
from tests.checkpoint.manifests import replace_listed
from tests.program import Ended, here, start, start_torchrun, wait_for_steps
from tests.rank_pool import ranks
from tests.tiny_run import settings, write_dataset

Mistake = Callable[[Path], list[object]]


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below ``folder`` by the hash of its content."""
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


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_changes_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")  # as on a machine without a compiler
    mistake, says = MISTAKES[name]
    arguments = mistake(tmp_path)
    before = snapshot(tmp_path)
    found = here(*arguments)
    assert found.code == 2, found
    assert found.err.startswith("error: ")
    assert "Traceback" not in found.err
    assert re.search(says, found.err), found.err
    after = snapshot(tmp_path)
    lock = str(tmp_path / "run" / ".lock")
    assert {path: digest for path, digest in after.items() if path != lock} == {
        path: digest for path, digest in before.items() if path != lock
    }


def test_under_torchrun_every_rank_ends_with_code_2_and_one_has_the_message(tmp_path):
    arguments = train(tmp_path, "model.num_attention_heads=5", "parallel.tensor=2")
    _, err = start_torchrun(2, *arguments).communicate(timeout=60)
    assert err.count("error: ") == 1
    assert "num_attention_heads" in err
    assert "exitcode  : 2" in err  # torchrun's own exit code is 1, whatever a rank's was
    assert not (tmp_path / "run").exists()


def train_as_a_program(*arguments: object) -> Ended:
    return start(*arguments, "--nproc", 2).ended()


def train_on_ranks_of_the_pool(*arguments: object) -> Ended:
    """The same without the seconds that a program takes to start: what each of its ranks runs."""
    first, second = ranks(2, here, *arguments)
    return Ended(first.code if first.code == second.code else -1, first.out + second.out, first.err + second.err)


@pytest.mark.parametrize("run", [train_on_ranks_of_the_pool, pytest.param(train_as_a_program, marks=pytest.mark.slow)])
def test_what_only_ranks_can_find_ends_all_of_them_with_code_2(run, tmp_path):
    arguments = [*other_shape(tmp_path), "parallel.tensor=2"]
    before = snapshot(tmp_path / "run" / "checkpoints")
    found = run(*arguments)
    assert found.code == 2, found
    assert found.err.count("error: ") == 1
    assert "layers.2" in found.err
    assert snapshot(tmp_path / "run" / "checkpoints") == before


def test_a_second_run_in_one_folder_is_refused_and_the_first_goes_on(tmp_path):
    arguments = train(tmp_path, train={"steps": 100000, "log_every": 1})
    first = start(*arguments)
    wait_for_steps(first, tmp_path / "run", 2)
    second = here(*arguments)
    assert second.code == 2, second
    assert "already has a run in it" in second.err
    assert f'"pid": {first.pid}' in second.err
    assert first.code is None
    first.send_signal(signal.SIGTERM)
    assert first.ended().code == 75


def here_with_files_up_to(size: int, *arguments: object) -> Ended:
    """``here``, refused by the system what goes past ``size`` bytes of a file, as a full disk would."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        return here(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_full_disk_ends_the_run_with_earlier_checkpoints_as_they_were(tmp_path):
    arguments = train(tmp_path, train={"steps": 2}, checkpoint={"every": 1})
    assert here(*arguments, "train.steps=1").code == 0
    before = snapshot(tmp_path / "run" / "checkpoints")
    [found] = ranks(1, here_with_files_up_to, 64 * 1024, *arguments)  # bytes: below a checkpoint, above the metrics
    assert found.code == 2, found
    assert "step 2 is not saved, earlier checkpoints are as they were" in found.err
    assert snapshot(tmp_path / "run" / "checkpoints") == before


def failing_loader(error: str) -> list[str]:
    """Lines that make rank 1 fail to read its second batch."""
    return [
        "import os",
        "from megalith.data.loader import StepLoader",
        "from megalith.errors import DataError",
        "read = StepLoader.batch",
        "def batch(self, consumed, *sizes):",
        f"    if consumed and os.environ['RANK'] == '1': raise {error}('this part cannot be read')",
        "    return read(self, consumed, *sizes)",
        "StepLoader.batch = batch",
    ]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        pytest.param("DataError", 2, "error: rank 1: this part cannot be read\n", marks=pytest.mark.slow),
        ("KeyError", 1, "rank 1 failed:\nTraceback"),
    ],
)
def test_data_that_one_rank_cannot_read_end_the_run_at_once_with_its_message(error, code, message, tmp_path):
    arguments = [*train(tmp_path, "parallel.shard=2", train={"log_every": 1}), "--nproc", 2]
    found = start(*arguments, first=failing_loader(error)).ended(timeout=60)
    assert found.code == code, found
    assert message in found.err
    assert found.err.count("Traceback") == (error == "KeyError")
    assert found.err.count("error: ") == 1 or error == "KeyError"


def failing_evaluation(rank: int, action: str) -> list[str]:
    """Lines that make ``rank`` do ``action`` where it would evaluate."""
    return [
        "import os",
        "from megalith.errors import DataError",
        "from megalith.training import callbacks",
        "evaluate = callbacks.evaluate",
        "def fail(*args, **kwargs):",
        f"    if os.environ['RANK'] == '{rank}': {action}",
        "    return evaluate(*args, **kwargs)",
        "callbacks.evaluate = fail",
    ]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_error_of_one_rank_alone_is_told_by_its_number_and_gives_the_exit_code(rank, tmp_path):
    prefix = tmp_path / "text"
    arguments = train(tmp_path, "parallel.shard=2", train={"eval_every": 1}, data={"valid": str(prefix)})
    fault = failing_evaluation(rank, "raise DataError('the held-out text cannot be read')")
    found = start(*arguments, "--nproc", 2, first=fault).ended(timeout=60)
    assert found.code == 2, found
    assert found.err.endswith(f"error: rank {rank}: the held-out text cannot be read\n")


def test_input_that_one_rank_alone_cannot_see_ends_all_with_code_2(tmp_path):
    arguments = [*train(tmp_path), "parallel.shard=2", "--nproc", 2]
    blind = [
        "import os",
        "from megalith.data import indexed_dataset",
        "read = indexed_dataset.read_index",
        "def index(store, name):",
        "    return read(store / 'elsewhere' if os.environ.get('RANK') == '1' else store, name)",
        "indexed_dataset.read_index = index",
    ]
    found = start(*arguments, first=blind).ended(timeout=60)
    assert found.code == 2, found
    assert found.err.count("error: ") == 1
    assert "error: rank 1: " in found.err
