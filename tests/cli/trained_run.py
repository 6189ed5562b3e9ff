"""A two-step run on prepared text, trained once and then used through copies of its folder."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.program import Ended, here, write_settings

TEXT = "Once there were ships in the harbour, and each had a name; über alles, 日本語. "
MODEL = {
    "num_layers": 1,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 2,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",  # 32 positions
}


@dataclass(frozen=True)
class Original:
    """Where the run was trained, which no longer exists; its run/ and data/ now; the output of two commands there."""

    place: Path
    kept: Path
    text: Ended
    loss: Ended


def generate(run: object, *more: object) -> Ended:
    return here("generate", run, "--prompt", "Once", "--max-new-tokens", 8, *more)


def write_texts(folder: Path, num_documents: int = 12) -> list[Path]:
    """Writes distinct documents, one per file."""
    folder.mkdir(parents=True)
    for number in range(num_documents):
        (folder / f"{number:02}.txt").write_text(f"Document {number}. " + TEXT * 3)
    return sorted(folder.iterdir())


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """A run trained in one place with relative paths, and moved to another."""
    place = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        write_texts(place / "texts")
        prepared = here("data", "prepare", "texts", "--out", "data/text", "--vocab-size", 280, "--valid", 0.2)
        assert prepared.code == 0, prepared
        tree = {
            "model": MODEL,
            "data": {"train": "data/text", "valid": "data/text-valid", "seq_length": 32},
            "train": {"steps": 2, "global_batch_size": 2, "micro_batch_size": 2},
            "optim": {"lr": 1e-3},
            "run": "run",
        }
        trained = here("train", write_settings(tree, place))
        assert trained.code == 0, trained
        text, loss = generate("run"), here("eval", "run")
    return Original(place, place.rename(place.with_name("kept")), text, loss)
