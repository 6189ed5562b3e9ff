"""What a run's tokenizer takes over from the model that the run begins from, where both have the same one."""

from pathlib import Path

from megalith.data.companions import read_companions
from megalith.data.tokenizer import Tokenizer
from megalith.models.foreign import foreign_model
from megalith.storage import LocalStore, Store, open_store, record_of
from megalith.training.kept import KEPT_TOKENIZER, kept_companions, kept_marks, run_of

__all__ = ["with_those_of_origin"]


def with_those_of_origin(tokenizer: Tokenizer, folder: Path, load: str | None) -> tuple[Tokenizer, dict[str, bytes]]:
    """``tokenizer`` with the tokens that end a text, and the companions, of the model that the run began from.

    That is what ``folder``, the run's, keeps already, or else the model at ``load``. Another tokenizer has its own.

    Raises as ``foreign_model`` and ``read_companions``.
    """
    origin: Store = LocalStore(folder)
    foreign = None
    if KEPT_TOKENIZER not in origin.names() and load is not None:
        origin = open_store(load)
        foreign = foreign_model(origin)
        origin = run_of(origin) if foreign is None else foreign.store
    if KEPT_TOKENIZER not in origin.names() or record_of(origin.parts(KEPT_TOKENIZER)).sha256 != tokenizer.sha256:
        return tokenizer, {}
    if foreign is None:
        ends, companions = kept_marks(origin).ends, kept_companions(origin)
    else:
        ends, companions = foreign.end_tokens, read_companions(origin)
    return tokenizer.framed(begin=tokenizer.begin, ends=ends), companions
