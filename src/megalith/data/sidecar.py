"""``PREFIX.json``: what a pair of ``.bin`` and ``.idx`` files was made from, and their counts."""

import json
import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megalith.errors import DataError, MissingFileError, StorageError
from megalith.storage import Store

__all__ = ["ChatOrigin", "Sidecar", "SourceRecord"]


_MOST_BYTES = 1 << 26  # each source takes about 100


class SourceRecord(BaseModel):
    """One input that the data were made from: its name, number of files, and bytes on disk."""

    model_config = ConfigDict(frozen=True)

    name: str
    num_files: int
    bytes: int


class ChatOrigin(BaseModel):
    """How conversations became text.

    ``template`` and ``tools_template`` are those of ``ChatFormat``. ``ends`` are ids of the special tokens that end a
    turn of the assistant, where a text that a model generates ends too.
    """

    model_config = ConfigDict(frozen=True)

    template: str | None = None
    tools_template: str | None = None
    ends: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = ()


class Sidecar(BaseModel):
    """The content of ``PREFIX.json``. Unknown fields are ignored; datasets made by other tools have no sidecar.

    ``tokenizer`` is the path of a tokenizer.json relative to the sidecar's folder, ``tokenizer_sha256`` the digest of
    its bytes. ``text_bytes`` counts the text in UTF-8. ``job`` is the fingerprint of the command that made the files.
    ``min_token_id`` and ``max_token_id`` describe the tokens in ``.bin``; None if there are no tokens, or if an earlier
    version wrote the file. With ``conversations``, the sequences of a document alternate: 0, 2, ... are context without
    a loss, and 1, 3, ... are learned; they may be empty. ``chat`` says how they became text; None if it is not known.
    With ``pairs``, the sequences of a document are a query, its positive passage, and hard negatives of it, if any.
    """

    model_config = ConfigDict(frozen=True)

    num_documents: int = Field(ge=0)
    num_sequences: int = Field(ge=0)
    num_tokens: int = Field(ge=0)
    bin_bytes: int = Field(ge=0)
    num_empty_documents: int = Field(default=0, ge=0)
    min_token_id: int | None = None
    max_token_id: int | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    vocab_size: int | None = Field(default=None, ge=1, lt=2**31)
    eod: int | None = Field(default=None, ge=0, lt=2**31)
    text_bytes: int = Field(default=0, ge=0)
    num_skipped_files: int = Field(default=0, ge=0)
    sources: tuple[SourceRecord, ...] = ()
    job: str | None = None
    conversations: bool = False
    chat: ChatOrigin | None = None
    pairs: bool = False

    @property
    def token_id_range(self) -> tuple[int, int] | None:
        """The smallest and largest token id; None if they are not recorded."""
        if self.min_token_id is None or self.max_token_id is None:
            return None
        return self.min_token_id, self.max_token_id

    @classmethod
    def read(cls, store: Store, name: str) -> "Sidecar | None":
        """Reads the file ``name``; None if it does not exist. Raises DataError if it is damaged."""
        try:
            if (size := store.size(name)) > _MOST_BYTES:
                raise StorageError(f"it has {size:,} bytes; the limit is {_MOST_BYTES:,}")
            return cls.model_validate_json(store.read(name))
        except MissingFileError:
            return None
        except (StorageError, ValidationError) as error:
            raise DataError(
                f"{store / name} must describe the .bin and .idx beside it; it cannot be read: {_reason(error)}; copy "
                "it again from the original, or delete it: the dataset can be read without it"
            ) from error

    def write(self, path: Path) -> None:
        """Writes and fsyncs ``path``, not atomically: the caller publishes it."""
        # texts have no such fields
        fields = self.model_dump(exclude={name for name in ("chat", "pairs") if not getattr(self, name)})
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(fields, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _reason(error: StorageError | ValidationError) -> str:
    """The error in one line: the first of pydantic's errors."""
    if isinstance(error, StorageError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(part for part in (".".join(map(str, first["loc"])), first["msg"]) if part)
