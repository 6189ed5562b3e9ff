"""Nothing is loaded unless it matches the saved bytes exactly, and nothing is ever unpickled."""

import errno
import json
import logging
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megalith.checkpoint import load_tensors, read_state, save_checkpoint, verify_checkpoint
from megalith.errors import CheckpointError, StorageError
from megalith.storage import MANIFEST, LocalStore, manifest_of, read_manifest, record_of
from tests.checkpoint.manifests import list_in_manifest
from tests.rank_pool import ranks

SHARD = "shard-00000-of-00001.safetensors"


@pytest.fixture
def checkpoint(tmp_path):
    return save_checkpoint(tmp_path, 1, {"w": torch.arange(100.0)}, {"step": 1}, keep_last=1)


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def refusal(checkpoint: Path) -> str:
    """The error that both verifying and loading raise."""
    with pytest.raises(CheckpointError) as verifying:
        verify_checkpoint(checkpoint)
    into = torch.full((100,), 7.0)
    with pytest.raises(CheckpointError) as loading:
        load_tensors(checkpoint, {"w": into})
    assert str(loading.value) == str(verifying.value)
    assert into.eq(7).all()
    return str(loading.value)


def test_a_sound_checkpoint_passes(checkpoint):
    verify_checkpoint(checkpoint)


@pytest.mark.parametrize("file", [SHARD, "index.json", "state.json", MANIFEST])
def test_a_flipped_bit_is_refused_with_the_file_named(checkpoint, file):
    content = bytearray((checkpoint / file).read_bytes())
    for place in (0, 9, len(content) // 2, len(content) - 1):
        flipped = bytearray(content)
        flipped[place] ^= 1
        (checkpoint / file).write_bytes(flipped)
        message = refusal(checkpoint)
        assert file in message
        assert [name for name in (SHARD, "index.json", "state.json") if name in message] == [file] * (file != MANIFEST)


@pytest.mark.parametrize("file", [SHARD, "state.json"])
def test_a_shorter_and_a_missing_file_are_named(checkpoint, file):
    size = (checkpoint / file).stat().st_size
    os.truncate(checkpoint / file, size - 1)
    assert f"{file}: {size} bytes were saved, but the file has {size - 1}" in refusal(checkpoint)
    (checkpoint / file).unlink()
    assert f"{file}: the file is missing" in refusal(checkpoint)


def test_a_folder_without_manifest_is_refused(checkpoint):
    (checkpoint / MANIFEST).unlink()
    assert "it has no manifest.json" in refusal(checkpoint)


def test_the_run_or_the_folder_of_checkpoints_is_refused_with_the_step_to_give(tmp_path):
    path = save_checkpoint(tmp_path / "checkpoints", 1, {"w": torch.ones(1)}, {}, keep_last=1)
    (tmp_path / "checkpoints" / f"{path.name}.damaged").mkdir()
    assert f"; use one of its steps, such as {path}\n" in refusal(tmp_path)
    assert f"; use one of its steps, such as {path}\n" in refusal(tmp_path / "checkpoints")
    assert "use one of its steps" not in refusal(tmp_path / "none")


PICKLES = ["data.pkl", "model.pt", "pytorch_model.bin", "__0_0.distcp", ".metadata", "x.ckpt"]


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_the_manifest_lists_is_refused_by_name(checkpoint, tmp_path, name):
    (checkpoint / name).write_bytes(pickle.dumps(Trap(tmp_path / "executed")))
    list_in_manifest(checkpoint)
    assert f"{name}: manifest.json may list only .safetensors and .json files" in refusal(checkpoint)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_the_manifest_does_not_list_is_ignored_and_never_opened(checkpoint, tmp_path, name, monkeypatch):
    """Refusing it would protect nobody, since unlisted files are never opened, and would reject valid checkpoints."""
    (checkpoint / name).write_bytes(pickle.dumps(Trap(tmp_path / "executed")))
    opened = files_opened_in(checkpoint, monkeypatch)
    into = torch.zeros(100)
    load_tensors(checkpoint, {"w": into})
    assert read_state(checkpoint) == {"step": 1}
    assert into.equal(torch.arange(100.0))
    assert set(opened) == {MANIFEST, "index.json", "state.json", SHARD}
    assert not (tmp_path / "executed").exists()


def files_opened_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names in ``folder`` that are opened from here on."""
    opened: list[str] = []

    def recording(usual):
        def open_recorded(path, *args, **kwargs):
            if isinstance(path, str | Path) and Path(path).parent == folder:
                opened.append(Path(path).name)
            return usual(path, *args, **kwargs)

        return open_recorded

    monkeypatch.setattr("os.open", recording(os.open))
    monkeypatch.setattr(Path, "open", recording(Path.open))
    return opened


def test_a_pickle_in_the_clothes_of_a_tensor_file_is_refused_and_not_executed(checkpoint, tmp_path):
    (checkpoint / SHARD).write_bytes(pickle.dumps(Trap(tmp_path / "executed")))
    list_in_manifest(checkpoint)
    with pytest.raises(CheckpointError, match=f"{SHARD}: "):
        load_tensors(checkpoint, {"w": torch.zeros(100)})
    assert not (tmp_path / "executed").exists()


STRAYS = [".DS_Store", "README.md", "more.safetensors", "notes.json", "state.json~"]


def add_strays(checkpoint: Path) -> None:
    for name in STRAYS:
        (checkpoint / name).write_bytes(b"mine")
    (checkpoint / "folder").mkdir()


def test_files_that_the_manifest_does_not_list_are_warned_about_once_and_ignored(checkpoint, caplog):
    add_strays(checkpoint)
    into = torch.zeros(100)
    load_tensors(checkpoint, {"w": into})
    assert into.equal(torch.arange(100.0))
    [warning] = [record.message for record in caplog.records]
    assert warning == (
        f"{checkpoint} has files that are not listed in manifest.json and are ignored: "
        ".DS_Store, README.md, folder, more.safetensors, notes.json, state.json~"
    )


def verify_with_a_stray_on_rank_1(path: Path) -> list[str]:
    """The warnings on this rank, where only rank 1 sees an additional file."""
    log, names = Recorded(), LocalStore.names
    logging.getLogger("megalith.checkpoint.verify").addHandler(log)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(LocalStore, "names", lambda store: [*names(store), "stray"])
        verify_checkpoint(path)
    logging.getLogger("megalith.checkpoint.verify").removeHandler(log)
    return log.messages


class Recorded(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_one_rank_warns_of_what_any_rank_sees(checkpoint):
    [[warning], nothing] = ranks(2, verify_with_a_stray_on_rank_1, checkpoint)
    assert warning.endswith("ignored: stray")
    assert nothing == []


def verify_own_folder(folder: Path) -> str:
    """The refusal of a checkpoint of which each rank has its own valid one, as without a shared disk."""
    save_alone(folder / str(dist.get_rank()), float(dist.get_rank()))
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(folder / str(dist.get_rank()) / "step-00000001")
    return str(caught.value)


def save_alone(folder: Path, value: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalith.topology.agreement.dist.is_initialized", lambda: False)
        save_checkpoint(folder, 1, {"w": torch.full((3,), value)}, {}, keep_last=1)


def test_ranks_that_see_different_checkpoints_are_refused(tmp_path):
    for message in ranks(2, verify_own_folder, tmp_path):
        assert "manifest.json: ranks read different versions; all machines must share the file system" in message


def test_a_manifest_that_points_outside_is_refused(checkpoint):
    (checkpoint.parent / "outside.json").write_text("{}")
    records = read_manifest(LocalStore(checkpoint))
    (checkpoint / MANIFEST).write_bytes(manifest_of(records | {"../outside.json": record_of([b"{}"])}))
    assert "'../outside.json' must be a file directly in the folder" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (
            [{"file": "../w.safetensors", "key": "w", "ranges": [[0, 100]]}],
            r"must be a \.safetensors file directly in the folder",
        ),
        (
            [{"file": "w.json", "key": "w", "ranges": [[0, 100]]}],
            r"must be a \.safetensors file directly in the folder",
        ),
        ([{"file": SHARD, "key": "w", "ranges": [[0, 101]]}], r"must be non-empty and lie within shape \(100,\)"),
        ([{"file": SHARD, "key": "w", "ranges": [[-1, 99]]}], r"must be non-empty and lie within shape \(100,\)"),
        ([{"file": SHARD, "key": "w", "ranges": []}], r"must be non-empty and lie within shape \(100,\)"),
        (
            [{"file": SHARD, "key": "w", "ranges": [[0, 60]]}],
            r"each of the 100 elements of w needed here once; it lists 60",
        ),
        (
            [{"file": SHARD, "key": "w", "ranges": [[0, 100]]}] * 2,
            r"each of the 100 elements of w needed here once; it lists 200",
        ),
        (
            [
                {"file": SHARD, "key": "w", "ranges": [[0, 60]]},
                {"file": SHARD, "key": "w", "ranges": [[50, 90]]},
            ],
            r"list each element of w in exactly one box; \[50\] is in 2",
        ),
        ([{"file": SHARD, "key": "v", "ranges": [[0, 100]]}], r"shard-.*: .*v"),
        ([{"file": SHARD}], r"index.json is not a valid tensor index: KeyError"),
    ],
)
def test_an_index_that_does_not_fit_the_files_is_refused(checkpoint, boxes, message):
    index = {"tensors": {"w": {"shape": [100], "dtype": "float32", "boxes": boxes}}}
    (checkpoint / "index.json").write_text(json.dumps(index))
    list_in_manifest(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        load_tensors(checkpoint, {"w": torch.zeros(100)})


@pytest.mark.parametrize(
    "values",
    [
        {"shape": ["100"]},
        {"shape": [100.0]},
        {"shape": [True]},
        {"ranges": [["0", 100]]},
        {"ranges": [[0, 100.5]]},
        {"ranges": [[False, 100]]},
        {"ranges": ["01"]},
        {"key": 2},
        {"key": ["w"]},
        {"file": 2},
    ],
    ids=json.dumps,
)
def test_an_index_with_values_of_another_type_is_refused(checkpoint, values):
    entry = {"shape": [100], "file": SHARD, "key": "w", "ranges": [[0, 100]]} | values
    tensor = {"shape": entry.pop("shape"), "dtype": "float32", "boxes": [entry]}
    (checkpoint / "index.json").write_text(json.dumps({"tensors": {"w": tensor}}))
    list_in_manifest(checkpoint)
    with pytest.raises(
        CheckpointError, match=r"index\.json is not a valid tensor index: TypeError.* should be of type"
    ):
        load_tensors(checkpoint, {"w": torch.zeros(100)})


def test_the_state_is_not_read_if_it_is_damaged(checkpoint):
    assert read_state(checkpoint) == {"step": 1}
    (checkpoint / "state.json").write_text('{"step": 2}')
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        read_state(checkpoint)


def test_a_header_is_not_parsed_before_its_hash_is_known(checkpoint, monkeypatch):
    def opened(*_args, **_kwargs):
        pytest.fail("opened")

    monkeypatch.setattr("megalith.checkpoint.shard_file.read_header", opened)
    (checkpoint / SHARD).write_bytes(b"x" * (checkpoint / SHARD).stat().st_size)
    assert f"{SHARD}: its SHA-256 does not match manifest.json" in refusal(checkpoint)


def unreadable_on_rank_1(path: Path) -> str:
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("megalith.storage.local_store.os.preadv", fail)
        with pytest.raises(StorageError) as caught:
            verify_checkpoint(path)
    return str(caught.value)


def test_a_disk_that_does_not_answer_is_not_taken_for_damage(checkpoint):
    first, second = ranks(2, unreadable_on_rank_1, checkpoint)
    assert first == second
    assert "cannot be verified: rank 1: cannot read " in first
    assert "Input/output error; check the disk" in first


def verify_together(folder: Path) -> str:
    full = torch.arange(64.0).reshape(16, 4)
    tensor = distribute_tensor(full, init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None)
    path = save_checkpoint(folder, 1, {"w": tensor}, {}, keep_last=1)
    verify_checkpoint(path)
    dist.barrier()
    if dist.get_rank() == 0:
        for rank in (1, 3):
            file = path / f"shard-{rank:05}-of-00004.safetensors"
            content = file.read_bytes()
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(path)
    return str(caught.value)


def test_ranks_share_the_work_and_the_verdict(tmp_path):
    verdicts = ranks(4, verify_together, tmp_path)
    assert len(set(verdicts)) == 1
    assert [line.split(":")[0].strip() for line in verdicts[0].splitlines() if "SHA-256" in line] == [
        "shard-00001-of-00004.safetensors",
        "shard-00003-of-00004.safetensors",
    ]


def count_hashed(path: Path) -> list[str]:
    """The files that this rank hashes."""
    hashed = []
    parts = LocalStore.parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "parts", lambda store, name: hashed.append(name) or parts(store, name))
        verify_checkpoint(path)
    return hashed


def test_each_file_is_hashed_on_one_rank(checkpoint):
    first, second = ranks(2, count_hashed, checkpoint)
    assert sorted(first + second) == ["index.json", SHARD, "state.json"]
    assert first
    assert second
