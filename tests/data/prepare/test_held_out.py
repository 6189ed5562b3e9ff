"""prepare --valid: any fraction above 0 holds out a document, and the same ones however the work is split."""

import pytest

from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.prepare import parts, prepare
from megalith.data.prepare.sources import find_sources
from megalith.data.tokenizer import train_byte_level_bpe
from tests.data.prepare.test_job import digests, documents_of

TEXTS = [f"text number {n}\n" * 20 for n in range(20)]


@pytest.fixture
def folder(tmp_path):
    """Twenty short files and an empty one, which has no text to hold out."""
    (tmp_path / "small").mkdir()
    for n, text in enumerate([*TEXTS, ""]):
        (tmp_path / "small" / f"{n:02}.txt").write_text(text)
    return tmp_path / "small"


@pytest.mark.parametrize(("share", "num_held_out"), [(1e-9, 1), (1 - 1e-9, 19)])
def test_a_share_above_0_leaves_a_document_in_both_sets(share, num_held_out, folder, tmp_path):
    prepare([folder], tmp_path / "c", vocab_size=260, valid=share)
    train, valid = documents_of(tmp_path / "c"), documents_of(tmp_path / "c-valid")
    assert len([text for text in valid if text]) == num_held_out
    assert sorted(train + valid) == sorted([*TEXTS, ""])
    # the tokenizer has not seen the held-out text
    assert train_byte_level_bpe(train, 260).sha256 == IndexedDataset(tmp_path / "c").sidecar.tokenizer_sha256


def test_any_number_of_processes_holds_out_the_same_document(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_MOST_FILES", 7)  # three parts
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        prepare([folder], tmp_path / str(processes) / "c", vocab_size=260, valid=1e-9, processes=processes)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")


def test_the_same_document_is_held_out_wherever_its_folder_is(folder, tmp_path):
    prepare([folder], tmp_path / "c", vocab_size=260, valid=1e-9)
    (tmp_path / "elsewhere").mkdir()
    prepare([folder.rename(tmp_path / "elsewhere" / "small")], tmp_path / "d", vocab_size=260, valid=1e-9)
    assert documents_of(tmp_path / "c-valid") == documents_of(tmp_path / "d-valid")


def test_a_share_that_divides_the_documents_already_is_left_as_it_is(folder):
    planned = parts.plan_parts(find_sources([folder]).files)
    assert parts.settled_fraction(planned, "text", 0.5) == 0.5
    assert parts.settled_fraction(planned, "text", 0.0) == 0.0
    assert 0 < parts.settled_fraction(planned, "text", 1e-9) < 0.5
    assert 0.5 < parts.settled_fraction(planned, "text", 1 - 1e-9) < 1


def test_one_document_is_not_divided(folder):
    planned = parts.plan_parts(find_sources([folder / "03.txt"]).files)
    assert [parts.settled_fraction(planned, "text", share) for share in (1e-9, 0.5)] == [1e-9, 0.5]


@pytest.mark.parametrize("share", [1e-9, 0.5, 1 - 1e-9])
def test_files_of_one_name_in_two_folders_are_two_documents(share, tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "part.txt").write_text(f"text of {place}\n")
        (tmp_path / place / "lines.jsonl").write_text(f'{{"text": "line of {place}"}}\n')
    for name in ("part.txt", "lines.jsonl"):
        inputs = [tmp_path / place / name for place in ("a", "b")]
        prepare(inputs, tmp_path / name / "c", vocab_size=260, valid=share)
        train, valid = documents_of(tmp_path / name / "c"), documents_of(tmp_path / name / "c-valid")
        assert [len(train), len(valid)] == [1, 1]
        assert train != valid


def test_the_first_file_of_a_name_draws_what_it_draws_alone(tmp_path):
    for place in ("a", "b", "c"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "part.txt").write_text(place)
    alone, first, second, third = [
        *find_sources([tmp_path / "a" / "part.txt"]).files,
        *find_sources([tmp_path / place / "part.txt" for place in ("a", "b", "c")]).files,
    ]
    assert alone == first
    assert len({first.key, second.key, third.key}) == 3
