"""Checks of what ``prepare`` is asked to do, before it writes anything."""

from collections.abc import Sequence
from pathlib import Path

from megalith.data.chat.encoder import ChatEncoder
from megalith.data.chat.format import ChatFormat
from megalith.data.prepare.sources import Sources
from megalith.data.special_tokens import SPECIAL_TOKENS
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.storage import explained

__all__ = ["check_begins", "check_chats", "check_prefix", "check_tokenizer_choice"]


def check_tokenizer_choice(
    tokenizer: str | Path | None, vocab_size: int | None, eod: str | None, special_tokens: Sequence[str]
) -> None:
    """Raises ConfigError unless exactly one tokenizer is given or to be trained, with options that have an effect."""
    if (tokenizer is None) == (vocab_size is None):
        raise ConfigError("give either --tokenizer PATH (a tokenizer.json) or --vocab-size N to train one")
    if eod is not None and tokenizer is None:
        raise ConfigError(
            "--eod requires --tokenizer; a newly trained tokenizer ends documents with its own token; leave --eod out"
        )
    if special_tokens and tokenizer is not None:
        raise ConfigError(
            "--special-tokens requires --vocab-size, to train a tokenizer; one given with --tokenizer has its own"
        )
    for kind in special_tokens:
        if kind not in SPECIAL_TOKENS:
            raise ConfigError(f"--special-tokens must be one of {', '.join(SPECIAL_TOKENS)}; got {kind!r}")


def check_prefix(out: Path) -> None:
    """Raises ConfigError if ``out`` names a folder, and StorageError if it cannot be read."""
    with explained("write", out):
        is_folder = not out.name or out.is_dir()
    if is_folder:
        raise ConfigError(f"--out ({out}) must be a file name prefix, not a folder; for example {out / 'corpus'}")


def check_begins(tokenizer: Tokenizer | None, *, bos: bool, split_sentences: bool) -> None:
    """Raises ConfigError if there is nothing that ``bos=False`` leaves out."""
    if not bos and (tokenizer is None or not tokenizer.begin or split_sentences):
        raise ConfigError(
            "--no-bos drops the tokens that a --tokenizer prepends to every document, but none would be prepended "
            "here; leave it out"
        )


def check_chats(sources: Sources, chat: ChatFormat, tokenizer: Tokenizer | None, *, split_sentences: bool) -> None:
    """Raises ConfigError or DataError if conversations cannot be prepared from ``sources``, or not with ``chat``."""
    if tokenizer is None or split_sentences:
        raise ConfigError("conversations require the tokenizer of the model, and cannot be split into sentences")
    for source in sources.files:
        if source.format == "text":
            raise DataError(
                f"conversations must be in .jsonl or .parquet files, one in each line or row; got {source.path}; "
                "convert it, or give the files of a folder themselves"
            )
    ChatEncoder(tokenizer, chat)  # raises if the template is invalid
