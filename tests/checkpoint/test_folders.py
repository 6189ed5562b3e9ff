"""Which checkpoint is the newest, which are kept, and where a damaged one goes."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalith.checkpoint import find_checkpoint, save_checkpoint, set_aside_damaged
from megalith.errors import CheckpointError, StorageError
from tests.rank_pool import ranks


def save(folder: Path, step: int, keep_last: int = 100, best: int | None = None) -> Path:
    return save_checkpoint(folder, step, {"w": torch.full((2,), float(step))}, {}, keep_last=keep_last, best=best)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_no_folder_and_an_empty_folder_hold_no_checkpoint(tmp_path):
    assert find_checkpoint(tmp_path / "none") is None
    assert find_checkpoint(tmp_path) is None


def test_the_newest_is_found_by_number_whatever_latest_says(tmp_path):
    for step in (9, 123_456_789, 99_999_999):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("step-00000009\n")
    assert find_checkpoint(tmp_path) == tmp_path / "step-123456789"
    (tmp_path / "latest").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "step-123456789"


def truncate(path: Path) -> None:
    os.truncate(path / "shard-00000-of-00001.safetensors", 40)


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def lose_state(path: Path) -> None:
    (path / "state.json").unlink()


@pytest.mark.parametrize("damage", [truncate, lose_manifest, lose_state])
def test_an_incomplete_newer_one_is_passed_over_with_a_warning(tmp_path, caplog, damage):
    whole = save(tmp_path, 1)
    damage(save(tmp_path, 2))
    assert find_checkpoint(tmp_path) == whole
    passed_over = f"skipping {tmp_path / 'step-00000002'}: it is not a complete checkpoint"
    assert caplog.text.count(passed_over) == 1
    save(tmp_path, 3, keep_last=1)  # also looks for old ones, and does not report it again
    assert find_checkpoint(tmp_path, but_not=["step-00000003"]) is None
    assert caplog.text.count(passed_over) == 2
    assert find_checkpoint(tmp_path, but_not=["step-00000003", "step-00000001"]) is None
    assert caplog.text.count(passed_over) == 2


def test_a_newer_one_of_another_version_is_not_passed_over(tmp_path):
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(CheckpointError, match=r"step-00000002/manifest\.json must have format"):
        find_checkpoint(tmp_path)
    assert save(tmp_path, 3, keep_last=1).exists()
    assert manifest.exists()


def find_where_only_rank_0_sees(folder: Path) -> Path | None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("megalith.checkpoint.folders.complete_steps", lambda *_, **__: iter(["step-99999999"]))
        return find_checkpoint(folder)


def test_all_ranks_get_the_answer_of_rank_0(tmp_path):
    path = save(tmp_path, 1)
    assert ranks(2, find_where_only_rank_0_sees, tmp_path) == [path] * 2


def test_the_newest_stay_and_what_is_not_ours_too(tmp_path):
    (tmp_path / "step-00000001.damaged").mkdir()
    (tmp_path / "notes").mkdir()
    for step in range(1, 6):
        save(tmp_path, step, keep_last=2)
    assert steps(tmp_path) == ["step-00000001.damaged", "step-00000004", "step-00000005"]
    assert (tmp_path / "notes").exists()


def test_the_one_just_written_stays_even_if_newer_ones_are_there(tmp_path):
    for step in (7, 8, 9):
        save(tmp_path, step)
    save(tmp_path, 1, keep_last=2)
    assert steps(tmp_path) == ["step-00000001", "step-00000008", "step-00000009"]


def test_the_best_one_stays_besides_the_newest_and_is_named_until_another_is_better(tmp_path):
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
        save(tmp_path, step, keep_last=2, best=best)
    assert steps(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    assert (tmp_path / "best").read_text() == "step-00000002\n"
    assert (tmp_path / "latest").read_text() == "step-00000005\n"
    save(tmp_path, 6, keep_last=2, best=6)
    assert steps(tmp_path) == ["step-00000005", "step-00000006"]
    assert (tmp_path / "best").read_text() == "step-00000006\n"


def test_best_names_no_checkpoint_that_a_save_without_a_best_one_has_removed(tmp_path, caplog):
    save(tmp_path, 1, best=1)
    save(tmp_path, 2, keep_last=1)
    assert steps(tmp_path) == ["step-00000002"]
    assert not (tmp_path / "best").exists()
    (tmp_path / "best").mkdir()  # not a file that can be removed
    save(tmp_path, 3)
    assert "step-00000003 is saved, but cannot remove" in caplog.text


def test_an_old_one_that_cannot_be_removed_is_told_and_the_save_stands(tmp_path, monkeypatch, caplog):
    save(tmp_path, 1)

    def fail(path):
        assert path.name == ".step-00000001.tmp"
        raise OSError(errno.EACCES, "permission denied")

    monkeypatch.setattr("megalith.storage.local_store.shutil.rmtree", fail)
    assert save(tmp_path, 2, keep_last=1) == find_checkpoint(tmp_path)
    assert "old checkpoints in" in caplog.text
    assert (
        f"failed to remove old checkpoints in {tmp_path}: cannot remove {tmp_path / 'step-00000001'}: permission "
        "denied; change the permissions" in caplog.text
    )


def set_aside_everywhere(path: Path) -> Path:
    return set_aside_damaged(path)


def test_a_damaged_one_is_kept_under_another_name_and_the_older_is_found(tmp_path):
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    aside = tmp_path / "step-00000002.damaged"
    assert ranks(2, set_aside_everywhere, newer) == [aside] * 2
    assert (aside / "state.json").exists()
    assert find_checkpoint(tmp_path) == older
    assert set_aside_damaged(save(tmp_path, 2)) == tmp_path / "step-00000002.damaged-2"


def test_setting_aside_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(StorageError, match=r"setting .* aside: cannot rename .*: No such file or directory; check"):
        set_aside_damaged(tmp_path / "step-00000002")
