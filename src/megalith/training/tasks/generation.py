"""Generates text with a model on disk (a run, a checkpoint or a foreign model) and its tokenizer, from prompts."""

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
    """A text-generating model on disk, without its weights, which take long to load.

    Attributes:
        load_model: loads the weights.
        longest: [tokens] the length that it was trained on; for a T5, the length of the encoder's input.
    """

    config: TransformerConfig
    tokenizer: Tokenizer
    longest: int
    load_model: Callable[[], Writer]

    @property
    def answers(self) -> bool:
        """Whether the model answers a prompt, as a T5 does, instead of continuing it."""
        return self.config.kind == "t5"

    @classmethod
    def open(
        cls,
        source: str | Path,
        tokenizer: str | Path | None = None,
        eod: str | int | None = None,
        *,
        to_score: bool = False,
    ) -> "TextSource":
        """Opens ``source``: a run, a checkpoint, or a ``foreign_model``.

        Args:
            tokenizer: path of a tokenizer.json, for a source that has none; ``eod`` is its token that ends a document,
                as in ``Tokenizer``.
            to_score: the model is to score texts, as only a GPT does, and not to generate any.

        Raises as ``open_run``, ``foreign_model`` and ``find_tokenizer`` do; ConfigError for an encoder, or a T5 that is
        to score; and DataError if the tokenizer produces ids for which the model has no row, or lacks the special
        tokens of a T5.
        """
        store = open_store(source)
        folder = foreign_model(store)
        opened = _open_run(store, tokenizer, eod) if folder is None else _open_foreign(folder, tokenizer, eod)
        _check_kind(source, opened.config.kind, to_score=to_score)
        assert opened.config.vocab_size is not None, "set in the config.yaml of a run and in a model folder"
        opened.tokenizer.check_fits(str(source), opened.config.vocab_size)
        if opened.answers:
            t5_tokens(opened.tokenizer)
        return opened

    def encode(self, prompts: Sequence[str], *, special_tokens: bool = False) -> list[list[int]]:
        """Encodes each prompt with ``Tokenizer.encode_prompts``; for a T5, appends the token that ends its texts.

        Raises ConfigError as ``check_prompt`` does, and for a prompt that has no tokens of its own or leaves no room
        for new ones.
        """
        for prompt in prompts:
            check_prompt(prompt)
        encoded = self.tokenizer.encode_prompts(prompts, special_tokens=special_tokens)
        assert self.config.vocab_size is not None, "open has checked the tokenizer against it"
        if beyond := [id for ids in encoded for id in ids if id >= self.config.vocab_size]:
            raise ConfigError(
                f"the prompt contains {self.tokenizer.decode(beyond[:1])!r}, token {beyond[0]}, but the model only has "
                f"ids below {self.config.vocab_size}; remove it from the prompt"
            )
        for ids in encoded:
            num_tokens = len(ids) if len(ids) > len(self.tokenizer.begin) else 0  # 0 if the text itself has no tokens
            generation.check_prompt_length(num_tokens, self.config.longest_text)
        if not self.answers:
            return encoded
        return [[*ids, t5_tokens(self.tokenizer).end] for ids in encoded]


@dataclass(frozen=True)
class TextGenerator:
    """A model that continues texts or answers them, and its source."""

    model: Writer
    source: TextSource

    @classmethod
    def load(
        cls, source: str | Path, tokenizer: str | Path | None = None, eod: str | int | None = None
    ) -> "TextGenerator":
        """Loads ``source``. Raises as ``TextSource.open`` and ``TextSource.load_model`` do."""
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
        """Returns the continuation of each of ``prompts``, or the answer; args and errors are those of ``stream``."""
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
        """Yields the continuation of each of ``prompts``, or the answer, in whole characters, as soon as it is drawn.

        Each list has a piece for each prompt, empty if none is ready, and None after the end of its text.

        Args:
            seeds: one per prompt; up to rounding, a text does not depend on the other prompts.
            stop: a text ends before the first of these strings.
            special_tokens: parse special tokens in the prompts, as in ``TextSource.encode``.

        Raises ConfigError, when called, as ``models.generation.stream`` and ``TextSource.encode`` do, and for an empty
        stop string. Logs a warning if a text may grow longer than the rows that the model was trained on, and if
        sentinels in a T5's prompts are not parsed.
        """
        encoded = self.source.encode(prompts, special_tokens=special_tokens)
        # here and not in encode, which also checks prompts before the model is loaded
        self._tell_of_length(max(map(len, encoded), default=0), max_new_tokens)
        if self.source.answers and not special_tokens and any("<extra_id_" in prompt for prompt in prompts):
            log.warning("sentinels such as <extra_id_0> in the prompt are read as text; --special-tokens parses them")
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
        """Warns if positions may exceed those of training; learned positions end there and need no warning."""
        longest, learned = self.source.longest, self.source.config.position_embedding_type == "learned_absolute"
        if self.source.answers:
            if prompt > longest:
                log.warning(
                    "the prompt has %d tokens, but the encoder was trained on rows of %d, and quality usually drops "
                    "beyond that; shorten the prompt to stay within it",
                    prompt,
                    longest,
                )
            return
        if learned or prompt + max_new_tokens <= longest:
            return
        at_most = f"generate at most {longest - prompt} tokens"
        room = at_most if prompt < longest else f"shorten the prompt ({prompt} tokens)"
        log.warning(
            "the text may reach %d tokens, but the model was trained on rows of %d, and quality usually drops beyond "
            "that; to stay within it, %s",
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
    # an answer is a separate text, not a continuation of the prompt
    texts = [_Text(tokenizer, () if isinstance(model, T5Model) else ids, stop) for ids in prompts]
    how: dict[str, Any] = {"sampling": sampling, "seeds": seeds, "end_tokens": tokenizer.ends}
    how["stop"] = lambda row, _: texts[row].stopped
    if isinstance(model, T5Model):
        start = t5_tokens(tokenizer).padding
        return _pieces(t5_generation.stream(model, prompts, max_new_tokens, start_token=start, **how), texts)
    return _pieces(generation.stream(model, prompts, max_new_tokens, **how), texts)


def in_order(openings: Sequence[str], pieces: Iterator[Sequence[str | None]]) -> Iterator[str]:
    """Yields texts of ``TextGenerator.stream`` one after the other, for a terminal, each piece as soon as possible.

    The first unfinished text is shown as it grows, and later ones wait. Each text begins with its entry of ``openings``
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
    """Raises ConfigError if ``prompt`` is empty or not valid text."""
    if not prompt:
        raise ConfigError("the prompt is empty; give some text to continue")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the prompt must be text in UTF-8; character {error.start} is {prompt[error.start]!r}, half of a "
            "surrogate pair, which may also stand for a byte of the command line that is not UTF-8"
        ) from error


def read_prompts(path: str, standard_input: BinaryIO) -> list[str]:
    """Reads prompts, one per line, from the file ``path``, or from ``standard_input`` for ``-``.

    Raises ConfigError as ``read_prompt`` does, and for an empty line or file.
    """
    lines = [line.removesuffix("\r") for line in read_prompt(path, standard_input).removesuffix("\n").split("\n")]
    for number, line in enumerate(lines, 1):
        if not line:
            raise ConfigError(f"each line of {path} must be a prompt; line {number} is empty; leave it out")
    return lines


def read_prompt(path: str, standard_input: BinaryIO) -> str:
    """Reads the text in the file ``path``, or in ``standard_input`` for ``-``, unchanged.

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
    """Converts a stream of tokens to pieces of text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._characters, self._until = TextStream(tokenizer, prompt), StopStrings(stop)
        self._ended = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has occurred."""
        return self._until.found

    def piece(self, token: int | None) -> str | None:
        """Returns the text that ``token`` completes; for None, at the end of the text, first the rest, then None."""
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


def _check_kind(source: str | Path, kind: str, *, to_score: bool) -> None:
    """Raises ConfigError for a model that cannot score or generate text."""
    if to_score and kind != "gpt":
        raise ConfigError(
            f"{source} must be a GPT to score text, such as the choices of questions; it is a model.{kind}, whose loss "
            "on held-out data megalith eval measures"
        )
    if kind == "bert":
        raise ConfigError(
            f"{source} must be a GPT or a T5 to generate text; it is a model.bert, whose predictions on "
            "held-out data megalith eval measures"
        )


def _open_run(store: Store, tokenizer: str | Path | None, eod: str | int | None) -> TextSource:
    checkpoint, folder, config = open_run(store, or_foreign=True)
    found = find_tokenizer(folder, config, tokenizer, eod)

    def load() -> Writer:
        model = load_model(checkpoint).model
        if not isinstance(model, GPTModel | T5Model):
            raise CheckpointError(
                f"{store} holds a {type(model).__name__}, which does not generate text; give a GPT run"
            )
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
    """Loads the model of ``folder`` in evaluation mode, in the dtype of its files."""
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
