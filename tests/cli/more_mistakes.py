"""More user mistakes: values of single settings, arguments, paths, and launcher variables."""

import os
from pathlib import Path

from tests.cli.mistakes import Mistake, text, tokenizer, train
from tests.tiny_run import write_dataset

__all__ = ["ENVIRONMENTS", "MORE_MISTAKES"]


def override(*overrides: str) -> Mistake:
    return lambda folder: train(folder, *overrides)


def settings_file(content: bytes) -> Mistake:
    return lambda folder: ["train", text(folder, "mine.yaml", content)]


def prepare(*arguments: object, document: bytes = b"some words " * 50) -> Mistake:
    return lambda folder: ["data", "prepare", text(folder, "d.txt", document), "--out", folder / "p", *arguments]


def fifo(folder: Path, name: str) -> Path:
    os.mkfifo(folder / name)
    return folder / name


def rewritten_as_floats(folder: Path) -> Path:
    """Rewrites the dataset of ``folder`` so that its .idx declares float32 tokens."""
    write_dataset(folder / "float")
    index = bytearray((folder / "float.idx").read_bytes())
    num_sequences = int.from_bytes(index[18:26], "little")
    index[17] = 7
    at = 34 + 4 * num_sequences
    for number in range(num_sequences):  # offsets, with four bytes per token
        begin = int.from_bytes(index[at + 8 * number : at + 8 * number + 8], "little")
        index[at + 8 * number : at + 8 * number + 8] = (2 * begin).to_bytes(8, "little")
    (folder / "float.idx").write_bytes(index)
    (folder / "float.bin").write_bytes((folder / "float.bin").read_bytes() * 2)
    (folder / "float.json").unlink()
    return folder / "float"


def word_level(folder: Path) -> list[object]:
    """A tokenizer without a token for unknown words."""
    content = (
        b'{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,'
        b'"pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,'
        b'"model": {"type": "WordLevel", "vocab": {"</s>": 0, "some": 1}, "unk_token": "<unk>"}}'
    )
    path = text(folder, "words.json", content)
    return [*prepare("--tokenizer", path)(folder)]


def without_end(folder: Path) -> list[object]:
    return [*prepare("--tokenizer", tokenizer(folder, 270, "t.json"), "--eod", "<none>")(folder)]


def on_two_ranks(folder: Path, *overrides: str) -> list[object]:
    return [*train(folder, *overrides), "--nproc", 2]


def logs_are_a_file(folder: Path) -> list[object]:
    (folder / "run").mkdir()
    (folder / "run" / "logs").write_text("mine")
    return on_two_ranks(folder)


def log_is_a_folder(folder: Path) -> list[object]:
    (folder / "run" / "logs" / "rank-0.log").mkdir(parents=True)
    return on_two_ranks(folder)


LONG = "x" * 300
HUGE = "9" * 5000
BIG = ("model.hidden_size=32768", "model.num_layers=400", "model.num_attention_heads=128", "model.num_query_groups=8")

# like MISTAKES: what is wrong: (the command, what the message must say)
MORE_MISTAKES: dict[str, tuple[Mistake, str]] = {
    # three at once
    "a range, a type and a name": (override("optim.lr=-1", "train.steps=x", "foo=1"), r"3 settings(.|\n)*foo"),
    "the same, the range": (override("optim.lr=-1", "train.steps=x", "foo=1"), r"optim.lr must be above 0"),
    "the same, the type": (override("optim.lr=-1", "train.steps=x", "foo=1"), r"train.steps must be an integer"),
    # names of other programs
    **{
        f"{name} of other programs": (override(f"{name}=1"), rf"did you mean {meant}\?")
        for name, meant in {
            "optim.learning_rate": "optim.lr",
            "train.batch_size": "train.global_batch_size",
            "model.n_layer": "model.num_layers",
            "model.rms_norm_eps": "model.layernorm_epsilon",
            "train.max_steps": "train.steps",
            "optim.max_grad_norm": "optim.clip_norm",
            "model.num_key_value_heads": "model.num_query_groups",
            "parallel.tp": "parallel.tensor",
            "checkpoint.save_interval": "checkpoint.every",
        }.items()
    },
    # values of single settings
    **{
        setting[:60]: (override(setting), says)
        for setting, says in {
            "train.seed=9223372036854775808": "train.seed must be below 9223372036854775808",
            "train.seed=-1": "train.seed must be at least 0",
            "train.seed=1.5": "train.seed must be an integer",
            "train.steps=0": "train.steps must be at least 1",
            "train.steps=1e3": "train.steps must be an integer; got 1000.0; use train.steps=1000",
            "train.steps=99999999999999999999": "train.steps must be at most",
            "train.steps=null": "train.steps is missing",
            "train.micro_batch_size=0": "train.micro_batch_size must be at least 1",
            "train.micro_batch_size=2147483648": "train.micro_batch_size must be at most 2147483647",
            "train.global_batch_size=-8": "train.global_batch_size must be at least 1",
            "train.log_every=0": "train.log_every must be at least 1",
            "train.time_limit=0": "train.time_limit must be above 0",
            "train.time_limit=.inf": "train.time_limit must be finite",
            "train.nonfinite=ignore": "train.nonfinite must be 'raise' or 'skip'",
            "train.recompute=all": "train.recompute must be",
            "train.evaluation.every=1": "needs data.valid",
            "train.generation.every=5": "train.generation.prompts is missing",
            "train.generation.prompts=Once": "train.generation.prompts must be a list",
            "train.generation.prompts=[]": "train.generation.prompts must have at least 1 entry",
            'train.generation.prompts=["\\ud800"]': "train.generation.prompts",
            "train.generation.temperature=-1": "temperature must be at least 0",
            "train.batch_size_schedule=soon": "train.batch_size_schedule must be stages",
            f"train.batch_size_schedule=0:{HUGE}": "train.batch_size_schedule must be stages",
            "optim.lr=0": "optim.lr must be above 0",
            "optim.lr=.nan": "optim.lr must be",
            "optim.lr=1e999": "optim.lr must be finite",
            "optim.lr=fast": "optim.lr must be a number; got 'fast'",
            "optim.lr=[0.1]": r"optim.lr must be a number; got \[0.1\]",
            "optim.name=lion": "optim.name must be 'adamw' or 'sgd'",
            "optim.adamw.betas=[0.9]": r"optim.adamw.betas\[1\] must be given",
            "optim.adamw.betas=[0.9, 1.0]": r"optim.adamw.betas\[1\] must be below 1",
            "optim.overrides=[{}]": r"optim.overrides\[0\]",
            "optim.overrides=x": "optim.overrides must be a list",
            "optim.warmup_steps=100": "optim.warmup_steps",
            "model.num_layers=0": "model.num_layers must be at least 1",
            "model.num_layers=100000000": "model.num_layers must be at most 10000",
            "model.hidden_size=1000000000000000000": "model.hidden_size must be at most 2147483647",
            "model.hidden_dropout=1": "model.hidden_dropout must be below 1",
            "model.preset=llama-5b": "model.preset must be one of",
            "model.activation=swish": "model.activation must be 'swiglu'",
            "model.rope.base=0": "model.rope.base must be above 1",
            "data.seq_length=0": "data.seq_length must be at least 1",
            "data.train=''": "data.train must not be empty",
            "data={}": "data is a group; override one of its fields",
            "parallel.shard=0": "parallel.shard must be at least 1, or -1",
            "parallel.tensor=1000000": "parallel.tensor",
            "precision.dtype=int8": "precision.dtype must be",
            "checkpoint.keep=0": "checkpoint.keep must be at least 1",
            "resume=maybe": "resume must be 'auto' or 'never'",
            "run=''": "run must not be empty",
            "experimental=[teleport]": "'teleport' is not a feature",
            f"train.steps={HUGE}": "an integer of 5,000 digits",
            "train.steps=" + "[" * 300: "more than 20 levels",
            "optim.lr=[1": "cannot be read as YAML",
            "optim.lr": "must look like optim.lr=3e-4",
            "optim.lr=!!python/name:os.system": "could not determine a constructor",
        }.items()
    },
    # text that no file has
    "a NUL in a path": (override('run="a\\0b"'), "run must not contain a NUL"),
    "half of a surrogate pair in a setting": (override('run="\\ud800"'), "run|unacceptable character"),
    "half of a surrogate pair in an argument": (override("run=\udcff"), "unacceptable character"),
    "half of a surrogate pair in a recipe's name": (lambda _: ["train", "\udcff"], "there is no recipe"),
    "a run's folder of 300 characters": (lambda f: train(f, f"run={f / ('x' * 300)}"), "too long.*shorter name"),
    "a dataset of 300 characters": (lambda f: train(f, f"data.train={f / ('x' * 300)}"), "too long"),
    "a tokenizer of 300 characters": (lambda f: train(f, f"data.tokenizer={f / ('x' * 300)}"), "too long"),
    "a checkpoint of 300 characters": (lambda f: train(f, f"load={f / ('x' * 300)}"), "too long.*shorter name"),
    "a settings file of 300 characters": (lambda f: ["train", f / f"{'x' * 300}.yaml"], "too long"),
    "a settings file that is a folder": (lambda f: ["train", f"{f}/"], "folder without a config.yaml"),
    "a URL of a store that is not there": (override("data.train=s3://bucket/text"), "s3"),
    # files of settings
    "a settings file that is empty": (settings_file(b""), "must hold groups of settings"),
    "a settings file of a list": (settings_file(b"- a\n- b\n"), "must hold groups of settings"),
    "a settings file in another encoding": (settings_file("run: ü".encode("latin-1")), "byte 5 is not UTF-8"),
    "a settings file of two documents": (settings_file(b"a: 1\n---\nb: 2\n"), "single document"),
    "a key twice": (settings_file(b"optim:\n  lr: 1\n  lr: 2\n"), "'lr' is given twice"),
    "a group that is a number": (settings_file(b"optim: 3\n"), "optim must be a group of settings; got 3"),
    "an alias that contains itself": (settings_file(b"optim: &a {lr: *a}\n"), "contains it"),
    "a tag of another language": (settings_file(b"run: !ruby/object:Gem {}\n"), "could not determine a constructor"),
    # the launcher and the machine
    "--nproc 0": (lambda f: [*train(f), "--nproc", 0], "--nproc must be at least 1"),
    "--nproc -3": (lambda f: [*train(f), "--nproc", -3], "--nproc must be at least 1"),
    "--nproc 1000000": (lambda f: [*train(f), "--nproc", 10**6], r"1000000\) is more than fits.*TB.*GB"),
    "a model larger than the memory": (override(*BIG), r"does not fit: .* take .*TB on this machine.* has [\d.]+GB"),
    "a model larger than the memory of two ranks": (
        lambda f: [*train(f, *BIG), "--nproc", 2],
        r"TB on the 2 ranks of this machine",
    ),
    "--nproc 2 into a folder that no one makes": (
        lambda f: on_two_ranks(f, "run=/proc/x"),
        r"/proc/x\S*: No such file",
    ),
    "--nproc 2 below a device": (lambda f: on_two_ranks(f, "run=/dev/null/x"), "/dev/null/x.*(choose another|check)"),
    "--nproc 2, and the logs are a file": (logs_are_a_file, "cannot write .*rank-0.log: .*choose another folder"),
    "--nproc 2, and a log is a folder": (log_is_a_folder, "cannot write .*rank-0.log: Is a directory"),
    # what is written
    "prepare: --out of 300 characters": (
        lambda f: ["data", "prepare", text(f, "d.txt", b"some words"), "--out", f / LONG, "--vocab-size", 300],
        "cannot write .*too long; choose a shorter name",
    ),
    "demo: --out of 300 characters": (lambda f: ["demo", "--out", f / LONG], "too long; choose a shorter name"),
    "report: --out that is empty": (lambda f: ["report", f, "--out", ""], r"--out \(\.\) must be the path of a file"),
    "eval: --data that is empty": (lambda f: ["eval", f, "--data", ""], "--data is empty; give the PREFIX"),
    # data
    "a dataset of floats": (
        lambda f: train(f, f"data.train={rewritten_as_floats(f)}"),
        r"^error: data\.train: .*integer token ids.*float32.*\n\Z",  # once
    ),
    "a held-out dataset that is not there": (override("data.valid=nowhere"), r"data.valid: nowhere\.idx"),
    "a dataset by its file": (lambda f: train(f, f"data.train={f / 'text.bin'}"), r"leave out the \.bin"),
    "an index that is a FIFO": (lambda f: train(f, f"data.train={fifo(f, 'q.idx').with_suffix('')}"), "a FIFO"),
    "a tokenizer that is a FIFO": (lambda f: train(f, f"data.tokenizer={fifo(f, 'q')}"), "a FIFO"),
    "a tokenizer that is a device": (override("data.tokenizer=/dev/zero"), "a device"),
    "a tokenizer that is a folder": (lambda f: train(f, f"data.tokenizer={f}"), "directory"),
    "a tokenizer that is none": (lambda f: train(f, f"data.tokenizer={text(f, 't.json', b'{}')}"), r"t\.json must be"),
    # preparing data
    "prepare: no tokenizer": (prepare(), "--tokenizer PATH .* or --vocab-size"),
    "prepare: two tokenizers": (prepare("--tokenizer", "t.json", "--vocab-size", 300), "either --tokenizer"),
    "prepare: a vocabulary without room for bytes": (prepare("--vocab-size", 100), "at least 257"),
    "prepare: a vocabulary below 0": (prepare("--vocab-size", -5), "at least 257"),
    "prepare: a vocabulary of 10**12": (prepare("--vocab-size", 10**12), "at most 16,777,216"),
    "prepare: a vocabulary of 10**30": (prepare("--vocab-size", 10**30), "at most 16,777,216"),
    "prepare: a share above 1": (prepare("--vocab-size", 300, "--valid", 1.5), "--valid must be"),
    "prepare: a share that is no number": (prepare("--vocab-size", 300, "--valid", "nan"), "--valid must be"),
    "prepare: an end that the tokenizer has not": (without_end, "<none>"),
    "prepare: a tokenizer without unknown words": (word_level, "unk_token.*--vocab-size"),
    "prepare: no text": (prepare("--vocab-size", 300, document=b""), "must contain text"),
    "prepare: a FIFO": (lambda f: ["data", "prepare", fifo(f, "q"), "--out", f / "p", "--vocab-size", 300], "else"),
    "prepare: a device": (lambda f: ["data", "prepare", "/dev/zero", "--out", f / "p", "--vocab-size", 300], "else"),
    "prepare: a name of 300 characters": (
        lambda f: ["data", "prepare", f / ("x" * 300), "--out", f / "p", "--vocab-size", 300],
        "too long",
    ),
    "prepare: a folder to write": (lambda f: [*prepare("--vocab-size", 300)(f)[:4], f, "--vocab-size", 300], "prefix"),
    "prepare: the same file twice": (lambda f: [*prepare("--vocab-size", 300)(f), f / "d.txt"], "given twice"),
    "prepare: an archive": (
        lambda f: ["data", "prepare", text(f, "d.zip", b"PK"), "--out", f / "p", "--vocab-size", 300],
        "packed",
    ),
    # recipes
    "recipes: a name that is none": (lambda _: ["recipes", "show", "lama-4m"], "did you mean llama-4m"),
    "recipes: a file that is there": (
        lambda f: ["recipes", "copy", "llama-4m", text(f, "mine.yaml", b"")],
        "mine.yaml already exists and is not overwritten",
    ),
    "recipes: a file that would be taken for a recipe": (
        lambda f: ["recipes", "copy", "llama-4m", f / "mine"],
        r"must end in \.yaml",
    ),
    "recipes: a folder that is not there": (
        lambda f: ["recipes", "copy", "llama-4m", f / "none" / "mine.yaml"],
        "cannot write",
    ),
}

# variables of other launchers, or forgotten ones: (the variables, what the message must say)
ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    ({"RANK": "0"}, "WORLD_SIZE is not set"),
    ({"RANK": "", "WORLD_SIZE": "1"}, "RANK must be an integer from 0 to 2147483647; got ''"),
    ({"RANK": "x", "WORLD_SIZE": "1"}, "RANK must be an integer from 0 to 2147483647; got 'x'"),
    ({"RANK": "-1", "WORLD_SIZE": "1"}, "RANK must be an integer from 0 to 2147483647; got '-1'"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK \(2\) must be below WORLD_SIZE \(2\)"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE must be an integer from 1 to 2147483647"),
    ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE must be an integer from 1 to 2147483647; got 'two'"),
    ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE must be an integer from 1 to 2147483647"),
    ({"RANK": "0", "WORLD_SIZE": "²"}, "WORLD_SIZE must be"),
    ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK must be"),
    ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK .* below LOCAL_WORLD"),
    ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR is not set; MASTER_PORT is not set"),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "MASTER_PORT must be a port"),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "70000"}, "MASTER_PORT must be"),
]
