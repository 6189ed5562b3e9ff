"""Text from a trained run: its model, its tokenizer, and a prompt."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megalith.data.tokenizer import TextStream, Tokenizer
from megalith.errors import CheckpointError, ConfigError, DataError
from megalith.models.generation import Sampling, stream
from megalith.models.gpt_model import GPTModel
from megalith.training.inference import load_model
from megalith.training.run_folder import find_tokenizer, open_run

__all__ = ["TextGenerator", "check_prompt", "read_prompt"]

_LONGEST_PROMPT = 1 << 20  # bytes


@dataclass(frozen=True)
class TextGenerator:
    """A model that goes on with a text, and the tokenizer that it was trained with."""

    model: GPTModel
    tokenizer: Tokenizer

    @classmethod
    def load(
        cls, source: str | Path, tokenizer: str | Path | None = None, eod: str | int | None = None
    ) -> "TextGenerator":
        """That of ``source``, a run or a checkpoint; ``tokenizer`` and ``eod`` as in ``find_tokenizer``.

        Raises as ``load_model`` and ``find_tokenizer`` do, CheckpointError for a model that does not write text, and
        DataError for a tokenizer that has more entries than the model.
        """
        checkpoint, folder, config = open_run(source)
        found = find_tokenizer(folder, config, tokenizer, eod)
        vocab_size = config.model.vocab_size
        assert vocab_size is not None, "a run keeps its resolved settings"
        if found.vocab_size > vocab_size:
            raise DataError(
                f"{found.name} has {found.vocab_size} entries and the model of {source} {vocab_size}; give the "
                "tokenizer that it was trained with"
            )
        model = load_model(checkpoint).model
        if not isinstance(model, GPTModel):
            raise CheckpointError(f"{source} holds a {type(model).__name__}, which writes no text; name a GPT run")
        return cls(model, found)

    def stream(self, prompt: str, max_new_tokens: int, *, sampling: Sampling, seed: int) -> Iterator[str]:
        """What the model adds to ``prompt``, in whole characters, as soon as they are drawn.

        Raises ConfigError, at the call, as ``models.generation.stream`` and ``check_prompt``.
        """
        check_prompt(prompt)
        before = self.tokenizer.encode(prompt)
        end = self.tokenizer.eod
        tokens = stream(self.model, before, max_new_tokens, sampling=sampling, seed=seed, end_token=end)
        return _decoded(tokens, TextStream(self.tokenizer, before))


def check_prompt(prompt: str) -> None:
    """Raises ConfigError unless ``prompt`` is text, and some."""
    if not prompt:
        raise ConfigError("the prompt is empty; give some text to go on from")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the prompt must be text in UTF-8; character {error.start} is {prompt[error.start]!r}, half of a "
            "surrogate pair, which also stands for bytes of a command line that are not UTF-8"
        ) from error


def read_prompt(path: str, standard_input: BinaryIO) -> str:
    """The text in the file ``path``, or in ``standard_input`` for ``-``, as it stands.

    Raises ConfigError if it cannot be read, is not UTF-8, or is longer than 1 MiB.
    """
    try:
        with nullcontext(standard_input) if path == "-" else Path(path).open("rb") as file:
            content = file.read(_LONGEST_PROMPT + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the prompt in {path!r} cannot be read: {reason}; check the path") from error
    if len(content) > _LONGEST_PROMPT:
        raise ConfigError(f"the prompt in {path} must have at most {_LONGEST_PROMPT:,} bytes; it has more; shorten it")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the prompt in {path} must be text in UTF-8; byte {error.start} is not; convert it"
        ) from error


def _decoded(tokens: Iterator[int], text: TextStream) -> Iterator[str]:
    for token in tokens:
        if piece := text.add(token):
            yield piece
    if piece := text.end():
        yield piece
