"""Text from a model on disk, a run's, a checkpoint's or another system's: its tokenizer, and prompts to go on from."""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megalith.config import TransformerConfig
from megalith.data.special_tokens import t5_tokens
from megalith.data.stop_strings import StopStrings
from megalith.data.tokenizer import TextStream, Tokenizer
from megalith.errors import CheckpointError, ConfigError, DataError
from megalith.models import generation, t5_generation
from megalith.models.foreign import ForeignModel, foreign_model
from megalith.models.gpt_model import GPTModel
from megalith.models.kinds import MODELS
from megalith.models.sampling import Sampling
from megalith.models.t5_model import T5Model
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.inference_linear import inference_linear
from megalith.parallel.parameters import refill_buffers_, state_tensors
from megalith.storage import Store, open_store
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.inference import load_model
from megalith.training.process_group import choose_device
from megalith.training.run_folder import find_tokenizer, open_run
from megalith.training.tasks.weights import load_weights

__all__ = ["TextGenerator", "TextSource", "check_prompt", "in_order", "read_prompt", "read_prompts", "stream_text"]

log = logging.getLogger(__name__)

Writer = GPTModel | T5Model

_LONGEST_PROMPT = 1 << 20  # bytes


@dataclass(frozen=True)
class TextSource:
    """A model on disk that writes text: all but its weights, which take long to load.

    Attributes:
        load_model: reads them.
        longest: [tokens] the length that it was trained on; of a T5, that of what its encoder reads.
    """

    config: TransformerConfig
    tokenizer: Tokenizer
    longest: int
    load_model: Callable[[], Writer]

    @property
    def answers(self) -> bool:
        """Whether it answers a prompt, as a T5 does, rather than go on with it."""
        return self.config.kind == "t5"

    @classmethod
    def open(
        cls, source: str | Path, tokenizer: str | Path | None = None, eod: str | int | None = None
    ) -> "TextSource":
        """That of ``source``, a run, a checkpoint, or a ``foreign_model``.

        Args:
            tokenizer: path of a tokenizer.json, for a source that has none; ``eod`` is its token that ends a document,
                as in ``Tokenizer``.

        Raises as ``open_run``, ``foreign_model`` and ``find_tokenizer`` do, ConfigError for an encoder, and DataError
        for a tokenizer that gives ids for which the model has no row, or, beside a T5, lacks its special tokens.
        """
        store = open_store(source)
        folder = foreign_model(store)
        opened = _open_run(store, tokenizer, eod) if folder is None else _open_foreign(folder, tokenizer, eod)
        cls._check_writes(source, opened.config)
        assert opened.config.vocab_size is not None, "a run keeps its resolved settings, and a folder says it"
        opened.tokenizer.check_fits(str(source), opened.config.vocab_size)
        if opened.answers:
            t5_tokens(opened.tokenizer)
        return opened

    @staticmethod
    def _check_writes(source: str | Path, config: TransformerConfig) -> None:
        """Raises ConfigError for a model that writes no text."""
        if config.kind == "bert":
            raise ConfigError(
                f"{source} must be a GPT or a T5 to write text; it is a model.bert: megalith eval measures what it "
                "fills in"
            )

    def encode(self, prompts: Sequence[str], *, special_tokens: bool = False) -> list[list[int]]:
        """The ids of each prompt, as ``Tokenizer.encode_prompts`` gives them; those of a T5 end as its texts do.

        Raises ConfigError as ``check_prompt``, and for one that has no tokens of its own, or leaves no room for more.
        """
        for prompt in prompts:
            check_prompt(prompt)
        encoded = self.tokenizer.encode_prompts(prompts, special_tokens=special_tokens)
        assert self.config.vocab_size is not None, "open has checked the tokenizer against it"
        if beyond := [id for ids in encoded for id in ids if id >= self.config.vocab_size]:
            raise ConfigError(
                f"the prompt spells {self.tokenizer.decode(beyond[:1])!r}, token {beyond[0]}, and the model reads ids "
                f"below {self.config.vocab_size}; leave it out of the prompt"
            )
        learned = self.config.position_embedding_type == "learned_absolute"
        for ids in encoded:
            num_tokens = len(ids) if len(ids) > len(self.tokenizer.begin) else 0  # of the text itself
            generation.check_prompt_length(num_tokens, self.config.max_position_embeddings if learned else None)
        if not self.answers:
            return encoded
        if not special_tokens and any("<extra_id_" in prompt for prompt in prompts):
            log.warning("the prompt spells sentinels, <extra_id_0> ..., as text; --special-tokens reads them as such")
        return [[*ids, t5_tokens(self.tokenizer).end] for ids in encoded]


@dataclass(frozen=True)
class TextGenerator:
    """A model that goes on with texts, or answers them, and where it is from."""

    model: Writer
    source: TextSource

    @classmethod
    def load(
        cls, source: str | Path, tokenizer: str | Path | None = None, eod: str | int | None = None
    ) -> "TextGenerator":
        """That of ``source``. Raises as ``TextSource.open`` and ``TextSource.load_model`` do."""
        opened = TextSource.open(source, tokenizer, eod)
        return cls(opened.load_model(), opened)

    def generate(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        *,
        sampling: Sampling,
        seeds: Sequence[int],
        stop: Sequence[str] = (),
        special_tokens: bool = False,
    ) -> list[str]:
        """What the model adds to each of ``prompts``, or answers; args and errors are those of ``stream``."""
        texts = [""] * len(prompts)
        drawn = self.stream(
            prompts, max_new_tokens, sampling=sampling, seeds=seeds, stop=stop, special_tokens=special_tokens
        )
        for pieces in drawn:
            texts = [text + (piece or "") for text, piece in zip(texts, pieces, strict=True)]
        return texts

    def stream(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        *,
        sampling: Sampling,
        seeds: Sequence[int],
        stop: Sequence[str] = (),
        special_tokens: bool = False,
    ) -> Generator[list[str | None], None, None]:
        """What the model adds to each of ``prompts``, or answers, in whole characters, as soon as they are drawn.

        Each list has a piece for each prompt, empty if none is ready, and None after the end of its text.

        Args:
            seeds: one a prompt; a text is the same alone and with others, up to rounding.
            stop: a text ends before the first of these strings.
            special_tokens: read those that a prompt spells, as ``TextSource.encode``.

        Raises ConfigError, at the call, as ``models.generation.stream`` and ``TextSource.encode``, and for an empty
        stop string. A text that may grow longer than the rows that the model was trained on is told in the log.
        """
        encoded = self.source.encode(prompts, special_tokens=special_tokens)
        self._tell_of_length(max(map(len, encoded), default=0), max_new_tokens)
        return stream_text(
            self.model,
            self.source.tokenizer,
            encoded,
            max_new_tokens,
            sampling=sampling,
            seeds=seeds,
            stop=stop,
        )

    def _tell_of_length(self, prompt: int, max_new_tokens: int) -> None:
        """A line of the log where rotary positions go on past those of training, where learned ones would end."""
        longest, learned = self.source.longest, self.source.config.position_embedding_type == "learned_absolute"
        if self.source.answers:
            if prompt > longest:
                log.warning(
                    "the prompt has %d tokens, and the encoder was trained on rows of %d: beyond those it usually gets "
                    "worse; to stay within, shorten it",
                    prompt,
                    longest,
                )
            return
        if learned or prompt + max_new_tokens <= longest:
            return
        room = f"generate at most {longest - prompt} tokens" if prompt < longest else f"shorten the prompt ({prompt})"
        log.warning(
            "the text may come to %d tokens and the model was trained on rows of %d: beyond those it usually gets "
            "worse; to stay within, %s",
            prompt + max_new_tokens,
            longest,
            room,
        )


def stream_text(
    model: Writer,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling,
    seeds: Sequence[int],
    stop: Sequence[str] = (),
) -> Generator[list[str | None], None, None]:
    """``TextGenerator.stream`` for prompts of token ids."""
    # an answer is a text of its own
    texts = [_Text(tokenizer, () if isinstance(model, T5Model) else ids, stop) for ids in prompts]
    how: dict[str, Any] = {"sampling": sampling, "seeds": seeds, "end_tokens": tokenizer.ends}
    how["stop"] = lambda row, _: texts[row].stopped
    if isinstance(model, T5Model):
        start = t5_tokens(tokenizer).padding
        return _pieces(t5_generation.stream(model, prompts, max_new_tokens, start_token=start, **how), texts)
    return _pieces(generation.stream(model, prompts, max_new_tokens, **how), texts)


def in_order(openings: Sequence[str], pieces: Iterator[Sequence[str | None]]) -> Iterator[str]:
    """Texts of ``TextGenerator.stream`` one after the other, for a terminal: what is known of them, as soon as it is.

    The first that has not ended grows as it is drawn; those behind it wait. Each begins with its one of ``openings``
    and ends with a line feed.
    """
    waiting, ended = [""] * len(openings), [False] * len(openings)
    current = 0
    yield openings[0]
    for drawn in pieces:
        waiting = [text + (piece or "") for text, piece in zip(waiting, drawn, strict=True)]
        ended = [piece is None for piece in drawn]
        while True:
            if waiting[current]:
                yield waiting[current]
                waiting[current] = ""
            if not ended[current] or current + 1 == len(openings):
                break
            current += 1
            yield "\n" + openings[current]
    for row in range(current + 1, len(openings)):
        yield f"\n{openings[row]}{waiting[row]}"
    yield "\n"


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


def read_prompts(path: str, standard_input: BinaryIO) -> list[str]:
    """The prompts in the file ``path``, one a line, or in ``standard_input`` for ``-``.

    Raises ConfigError as ``read_prompt``, and for a line that is empty, or none.
    """
    lines = [line.removesuffix("\r") for line in read_prompt(path, standard_input).removesuffix("\n").split("\n")]
    for number, line in enumerate(lines, 1):
        if not line:
            raise ConfigError(f"each line of {path} must be a prompt; line {number} is empty; leave it out")
    return lines


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


class _Text:
    """Tokens on their way to pieces of text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._characters, self._until = TextStream(tokenizer, prompt), StopStrings(stop)
        self._ended = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._until.found

    def piece(self, token: int | None) -> str | None:
        """The text that is ready with ``token``; with None, at the end of the text, what is left, and then None."""
        if token is not None:
            return self._until.add(self._characters.add(token))
        if self._ended:
            return None
        self._ended = True
        return self._until.add(self._characters.end()) + self._until.end()


def _pieces(tokens: Iterator[Sequence[int | None]], texts: Sequence[_Text]) -> Generator[list[str | None], None, None]:
    for drawn in tokens:
        yield [text.piece(token) for text, token in zip(texts, drawn, strict=True)]
    yield [text.piece(None) for text in texts]


def _open_run(store: Store, tokenizer: str | Path | None, eod: str | int | None) -> TextSource:
    checkpoint, folder, config = open_run(store)
    found = find_tokenizer(folder, config, tokenizer, eod)

    def load() -> Writer:
        model = load_model(checkpoint).model
        if not isinstance(model, GPTModel | T5Model):
            raise CheckpointError(f"{store} holds a {type(model).__name__}, which writes no text; name a GPT run")
        return model

    return TextSource(config.model, found, config.data.seq_length, load)


def _open_foreign(folder: ForeignModel, tokenizer: str | Path | None, eod: str | int | None) -> TextSource:
    if tokenizer is None:
        found = folder.tokenizer(eod)
    else:
        end_of_document = eod if eod is not None else next(iter(folder.end_tokens), None)
        found = Tokenizer.load(tokenizer, end_of_document, ends=folder.end_tokens)
    if found is None:
        raise DataError(f"{folder.store} has no tokenizer.json; give --tokenizer PATH")
    return TextSource(folder.config, found, folder.num_positions, lambda: _foreign_weights(folder))


def _foreign_weights(folder: ForeignModel) -> Writer:
    """The model of ``folder`` in evaluation mode, in the dtype of its files."""
    dtype = getattr(torch, folder.weights.dtype)
    with torch.device("meta"):
        model = MODELS[folder.config.kind](
            folder.config, BuildOptions(ProcessGroupCollection.single(), dtype, matrix_product=inference_linear)
        )
    assert isinstance(model, GPTModel | T5Model), "TextSource has refused an encoder"
    model.to_empty(device=choose_device())
    refill_buffers_(model)
    load_weights(folder.store, {name: tensor.detach() for name, tensor in state_tensors(model).items()})
    return model.eval()
