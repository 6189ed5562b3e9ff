"""Encodes and decodes text with any ``tokenizer.json``, and trains byte-level BPE tokenizers.

BPE: Sennrich et al. 2016 (arXiv:1508.07909). Bytes as the alphabet: GPT-2 (Radford et al. 2019), so that every text can
be encoded, and decoding is lossless.
"""

import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from megalith.data.post_processor import frame_of, without_beginning
from megalith.data.special_spellings import model_without, special_pieces
from megalith.data.word_starts import WordStarts
from megalith.errors import ConfigError, DataError, StorageError
from megalith.input_file import read_regular_file
from megalith.storage import LocalStore, Store, explained, open_store, publish_file

__all__ = ["EOD", "TextStream", "Tokenizer", "train_byte_level_bpe"]

log = logging.getLogger(__name__)

EOD = "<|endoftext|>"
_WAY_OUT = (
    "give a tokenizer.json that has a token for unknown words (unk_token), or train one with: megalith data prepare "
    "FILES... --out PREFIX --vocab-size N"
)
_REPLACEMENT = "\ufffd"
_MOST_BEGINNING = 8  # tokens prepended to a text; published tokenizers prepend one
_MOST_BYTES_OPEN = 3  # bytes of an incomplete UTF-8 character
_CONTEXT = 16  # ids; more than a character, or a decoder's rule for spaces, spans
_MOST_BYTES = 1 << 28  # of a tokenizer.json; the largest published ones have about 40 MB
_MOST_ENTRIES = 1 << 24  # of a trained vocabulary; the largest published ones have a million
_LONGER_THAN_WORDS = 512  # characters
_ONE_KIND = re.compile(r"\w+|\s+|[^\w\s]+")  # letters and digits, spaces, or other symbols
_EOD_NAMES = (EOD, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>", "[SEP]")  # noqa: RUF001


class Tokenizer:
    """One tokenizer.json. Pickles as its bytes.

    Encoding adds no special tokens and neither truncates nor pads, whatever the file's settings say. Text that spells a
    special token is encoded as ordinary text, so that no document can forge an end-of-document token that the file
    marks as special. The tokens to prepend to a document or prompt are in ``begin``.

    Args:
        content: the bytes of a tokenizer.json.
        eod: the end-of-document token, as text or id; by default the first of the usual names that exists.
        name: name of the tokenizer in error messages.
        begin: ids of the tokens that begin a text; by default those that the file's post-processor adds.
        ends: ids of tokens that end a text in addition to ``eod``, such as end-of-turn tokens.

    Attributes:
        vocab_size: all ids are below it.
        num_rows: all ids that encoding can produce, ``begin`` and ``eod`` included, are below it; a model needs at
            least this many embedding rows. Other special tokens may have larger ids, because no text is encoded as
            one: Gemma 3's tokenizer has an image token beyond the last row of the text-only model.
        eod: id of the end-of-document token.
        eod_text: the text of that token.
        special_ids: ids of the tokens that the file marks as special.
        begin: ids of the tokens that a text begins with: the BOS token for Llama and Gemma, none for GPT-2. Tokens that
            enclose a text on both sides, such as BERT's [CLS] and [SEP], are not included.
        ends: ids of the tokens that end a text, ``eod`` first.
        frame: ids that the file's post-processor puts before and after a text, as transformers does; encoding leaves
            them out, because datasets and prompts add what their model needs.
        sha256: digest of the file's bytes.

    Raises:
        DataError: the content is not a tokenizer, or it has no end-of-document token.
    """

    def __init__(
        self,
        content: bytes,
        eod: str | int | None = None,
        name: str = "tokenizer.json",
        *,
        begin: Sequence[int] | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        self._content = content
        self.name = name
        self.sha256 = hashlib.sha256(content).hexdigest()
        with _told(f"{name} must be a tokenizer.json of Hugging Face tokenizers; it cannot be parsed"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()  # many published files silently truncate to 512 tokens
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        # ids may have gaps, so this can exceed the number of entries
        entries = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(entries.values(), default=-1) + 1
        self.eod = self._find_eod(eod)
        special = {id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(special)
        self.num_rows = max((id for id in entries.values() if id not in special), default=-1) + 1
        processor = self._tokenizer.post_processor
        self.frame = ([], []) if processor is None else frame_of(json.loads(processor.__getstate__()))
        self.begin = self._beginning() if begin is None else tuple(begin)
        self._tokenizer.post_processor = None  # it runs even without special tokens, and may drop the text
        self.num_rows = max(self.num_rows, *(id + 1 for id in (self.eod, *self.begin)))
        self.eod_text = self._tokenizer.id_to_token(self.eod) or ""
        self.ends = tuple(dict.fromkeys([self.eod, *ends]))
        if special_text := special_pieces(self._tokenizer):
            self._tokenizer.model = model_without(content, special_text)

    @classmethod
    def load(cls, path: str | Path, eod: str | int | None = None, *, ends: Sequence[int] = ()) -> "Tokenizer":
        """Loads the file ``path``. Raises DataError as the constructor does, or if the file cannot be read."""
        try:
            content = read_regular_file(path, _MOST_BYTES)
        except OSError as error:
            raise DataError(
                f"{path} must be a tokenizer.json; it cannot be read: {error.strerror}; check the path, or train one "
                "with: megalith data prepare FILES... --out PREFIX --vocab-size N"
            ) from error
        return cls(content, eod, str(path), ends=ends)

    @classmethod
    def beside(
        cls, prefix: str | Path | Store, name: str, eod: str | int | None = None, *, ends: Sequence[int] = ()
    ) -> "Tokenizer":
        """Loads the tokenizer of a dataset; ``name`` is relative to the folder of ``prefix``. Raises as ``load``."""
        folder = open_store(prefix).split()[0]
        if isinstance(folder, LocalStore):
            return cls.load(folder.path / name, eod, ends=ends)
        try:
            return cls(folder.read(name), eod, str(folder / name), ends=ends)
        except StorageError as error:
            raise DataError(f"{folder / name} must be a tokenizer.json; {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the tokenizer's bytes to ``path``, atomically. Raises StorageError."""
        with explained("write", Path(path)), publish_file(Path(path)) as temporary:
            temporary.write_bytes(self._content)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text``, using one thread."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, using all cores unless TOKENIZERS_PARALLELISM says otherwise.

        Raises DataError for a text that the tokenizer cannot encode.
        """
        with _told(f"{self.name} cannot encode this text", _WAY_OUT):
            return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_prompts(self, texts: Sequence[str], *, special_tokens: bool = False) -> list[list[int]]:
        """Returns the ids of each text as a prompt: ``begin``, followed by the ids of the text.

        Args:
            special_tokens: encode text that spells a special token as that token, as chat templates need. ``begin`` is
                not repeated for a text that starts with it.

        Raises DataError as ``encode_batch``.
        """
        with self._special_tokens_encoded(special_tokens):
            encoded = self.encode_batch(texts)
        begin = list(self.begin)
        return [ids if special_tokens and ids[: len(begin)] == begin else begin + ids for ids in encoded]

    def encode_with_offsets(
        self, text: str, *, special_tokens: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of ``text``, and the characters [start, end) of each; ``begin`` is not added.

        Args:
            special_tokens: as in ``encode_prompts``.

        Raises DataError as ``encode_batch``.
        """
        with self._special_tokens_encoded(special_tokens), _told(f"{self.name} cannot encode this text", _WAY_OUT):
            found = self._tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def begins(self, document: Sequence[int]) -> bool:
        """Whether the ids ``document`` start with ``begin``."""
        return tuple(document[: len(self.begin)]) == self.begin

    def framed(self, *, begin: Sequence[int], ends: Sequence[int] = ()) -> "Tokenizer":
        """The same tokenizer for texts that begin with ``begin``, and that any of ``ends`` ends as well."""
        if tuple(begin) == self.begin and set(ends) <= set(self.ends):
            return self
        return Tokenizer(self._content, self.eod, self.name, begin=begin, ends=(*self.ends, *ends))

    def without_beginning(self) -> "Tokenizer":
        """The same tokenizer, with a tokenizer.json that prepends nothing to a text."""
        return Tokenizer(without_beginning(self._content), self.eod, self.name, ends=self.ends)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ``ids``, with special tokens. Raises DataError if a damaged file has no text for them."""
        with _told(f"{self.name} cannot decode these tokens"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled ``text``; None if there is none."""
        id: int | None = self._tokenizer.token_to_id(text)
        return id

    @property
    def special_texts(self) -> frozenset[str]:
        """The texts of the tokens that the file marks as special."""
        return frozenset(
            token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special
        )

    @property
    def begin_text(self) -> str:
        """The text of the first token of ``begin``, the BOS token; empty if there is none."""
        return self._tokenizer.id_to_token(self.begin[0]) or "" if self.begin else ""

    def word_starts(self) -> WordStarts:
        """Lookup tables for which ids of a sequence begin a word."""
        entries = self._tokenizer.get_vocab(with_added_tokens=True)
        return WordStarts.of(json.loads(self._content), entries, self.vocab_size)

    def check_fits(self, model: str, num_rows: int) -> None:
        """Raises DataError if the tokenizer needs more rows than ``num_rows``, the rows of ``model``."""
        if self.num_rows > num_rows:
            raise DataError(
                f"{self.name} must have ids below {num_rows}, the vocabulary size of the model in {model}; text gives "
                f"ids up to {self.num_rows - 1} ({self._tokenizer.id_to_token(self.num_rows - 1)!r:.80}); use the "
                "tokenizer.json that the model was trained with, or convert the model without one"
            )

    def __reduce__(self) -> tuple[Callable[..., "Tokenizer"], tuple[bytes, int, str]]:
        build = functools.partial(Tokenizer, begin=self.begin, ends=self.ends)
        return build, (self._content, self.eod, self.name)

    @contextmanager
    def _special_tokens_encoded(self, are_encoded: bool) -> Iterator[None]:
        """In the ``with`` block, text that spells a special token is encoded as that token if ``are_encoded``."""
        self._tokenizer.encode_special_tokens = not are_encoded
        try:
            yield
        finally:
            self._tokenizer.encode_special_tokens = True

    def _beginning(self) -> tuple[int, ...]:
        """The ids that the post-processor prepends to a text, if it appends none. Raises DataError."""
        before, after = self.frame
        begin = [] if after else before
        if any(type(id) is not int or not 0 <= id < self.vocab_size for id in begin) or len(begin) > _MOST_BEGINNING:
            raise DataError(
                f"the post_processor of {self.name} must prepend at most {_MOST_BEGINNING} tokens of its vocabulary "
                f"to a text; it prepends {begin!r:.80}; fix the file, or remove its post_processor"
            )
        return tuple(begin)

    def _find_eod(self, wanted: str | int | None) -> int:
        names = _EOD_NAMES if wanted is None else (wanted,)
        for name in names:
            id = self._tokenizer.token_to_id(name) if isinstance(name, str) else name
            if id is not None and 0 <= id < self.vocab_size:
                return id
        special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        raise DataError(
            f"{self.name} must have an end-of-document token, {' or '.join(map(repr, names))}; it has none; choose one "
            f"of its tokens with --eod (eod=... in Python); its special tokens are {special or 'none'}"
        )


@contextmanager
def _told(problem: str, way_out: str = "use another tokenizer.json") -> Iterator[None]:
    """Raises DataError for whatever the library raises in the ``with`` block, including Rust panics.

    A damaged file can cause a panic anywhere. It does not derive from Exception, and its class cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{problem}: {error}; {way_out}") from error


class TextStream:
    """Incremental decoding: ids come one at a time, and each character is returned once all of its bytes are known.

    The concatenated results of ``add`` and ``end`` are the text that the ids add to the text of ``before``. Decoding
    them alone would lose the space that some tokenizers omit at the beginning of a text.

    Args:
        before: the preceding ids, of which only the last few are used.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._num_open = 0  # ids since the text last ended with a whole character
        self._given = 0  # characters of the text of _ids that have been returned
        self._restart(before)

    def add(self, id: int) -> str:
        """Returns the text that ``id`` completes; may be empty."""
        self._ids.append(id)
        text = self._tokenizer.decode(self._ids)
        complete = text.rstrip(_REPLACEMENT)
        self._num_open = self._num_open + 1 if len(complete) < len(text) else 0
        if self._num_open > _MOST_BYTES_OPEN:  # too long for a character: all but the last bytes are invalid
            complete = text[: max(len(complete), len(text) - _MOST_BYTES_OPEN)]
        new, self._given = complete[self._given :], max(self._given, len(complete))
        if not self._num_open and len(self._ids) > 2 * _CONTEXT:
            self._restart(self._ids)
        return new

    def end(self) -> str:
        """Returns the rest: bytes of an incomplete character, as replacement characters."""
        text = self._tokenizer.decode(self._ids)
        new, self._given = text[self._given :], len(text)
        return new

    def _restart(self, ids: Sequence[int]) -> None:
        """Keeps the last few of ``ids``, whose text has been returned, starting at a character boundary."""
        first = max(0, len(ids) - _CONTEXT)
        starts = range(first, max(-1, first - _MOST_BYTES_OPEN - 1), -1)
        texts = {start: self._tokenizer.decode(ids[start:]) for start in starts}
        start = next((start for start, text in texts.items() if not text.startswith(_REPLACEMENT)), first)
        self._ids = list(ids[start:])
        self._given = len(texts[start])


def train_byte_level_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    frame: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of at most ``vocab_size`` entries.

    The vocabulary is ``<|endoftext|>`` (id 0), then ``special_tokens``, 256 bytes, and merges. ``frame`` are the tokens
    that the file's post-processor puts before and after a text, and after a second one; see ``Tokenizer.frame``.

    The same texts in the same order produce an identical file. A small amount of text may yield fewer entries than
    requested. Training time is quadratic in the length of a word, so very long ones (DNA, a line of dashes) are split.

    Raises ConfigError if ``vocab_size`` is too small for the bytes, or unreasonably large.
    """
    if vocab_size > _MOST_ENTRIES:  # the trainer allocates memory for all of them, and crashes if there is not enough
        raise ConfigError(f"a vocabulary can have at most {_MOST_ENTRIES:,} entries; got {vocab_size}; use 32000")
    special = [EOD, *special_tokens]
    if vocab_size < (least := 256 + len(special)):
        others = f" and {len(special_tokens)} special tokens" if special_tokens else ""
        raise ConfigError(
            f"the vocabulary must have at least {least} entries, for 256 bytes and {EOD}{others}; got {vocab_size}"
        )
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    trained.train_from_iterator(_without_endless_words(texts), trainer)
    if (found := trained.get_vocab_size()) < vocab_size:
        log.warning("the text yields a vocabulary of %d entries; %d were requested", found, vocab_size)
    if any(frame):
        before, after = frame
        single, second = [*before, "$A", *after], ["$B:1", *(f"{token}:1" for token in after)]
        ids = [(token, trained.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
        trained.post_processor = processors.TemplateProcessing(single, [*single, *second], ids)
    return Tokenizer(trained.to_str(pretty=True).encode())


def _without_endless_words(texts: Iterable[str]) -> Iterator[str]:
    """``texts``, with very long words split; merges are counted within words, so this has little effect."""
    for text in texts:
        start = 0
        for stop in range(_LONGER_THAN_WORDS, len(text), _LONGER_THAN_WORDS):
            if _ONE_KIND.fullmatch(text, stop - _LONGER_THAN_WORDS, stop):
                yield text[start:stop]
                start = stop
        yield text[start:]
