"""Free space matches df for this user, and is checked before it is needed."""

import os

import pytest

from megalith.errors import StorageError
from megalith.storage import free_bytes, free_space, require_free_bytes


def test_free_bytes_are_those_of_statvfs_even_for_a_folder_to_come(tmp_path):
    disk = os.statvfs(tmp_path)
    # other processes write to this disk too
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.05)
    assert not (tmp_path / "not").exists()


def test_too_little_space_is_refused_with_both_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(free_space, "free_bytes", lambda _: 2_500_000_000)
    require_free_bytes(tmp_path, 2_500_000_000)
    with pytest.raises(StorageError, match=r"needs 3.10 GB, but its disk has only 2.50 GB left; free up space"):
        require_free_bytes(tmp_path, 3_100_000_000)
