"""A store without rename holds checkpoints as a file system does; Megalith has no code specific to it."""

import contextlib
import itertools
import logging

import pytest
import torch
import torch.distributed as dist

from megalith.checkpoint import (
    find_checkpoint,
    load_tensors,
    read_state,
    save_checkpoint,
    set_aside_damaged,
    verify_checkpoint,
)
from megalith.checkpoint.box import Box
from megalith.checkpoint.folders import traces_of_saves
from megalith.checkpoint.shard_file import ShardFile, write_shard
from megalith.errors import CheckpointError, StorageError
from megalith.storage import MANIFEST
from tests.checkpoint.layouts import LAYOUTS, Layout, full_tensors, in_layout, local_bits
from tests.rank_pool import ranks
from tests.storage.memory_store import MemoryStore, OwnBytes, SharedBytes

SHARD = "shard-00000-of-00001.safetensors"


@pytest.fixture
def store():
    return MemoryStore(OwnBytes()) / "run" / "checkpoints"


def save(store: MemoryStore, step: int, value: float = 0.0, keep_last: int = 100) -> MemoryStore:
    return save_checkpoint(store, step, {"w": torch.full((3,), value)}, {"step": step}, keep_last=keep_last)


def test_what_is_saved_is_found_verified_and_loaded(store):
    assert find_checkpoint(store) is None
    path = save_checkpoint(store, 7, full_tensors(7), {"step": 7}, keep_last=1)
    assert path == find_checkpoint(store) == store / "step-00000007"
    assert store.names() == ["latest", "step-00000007"]
    assert store.read("latest") == b"step-00000007\n"
    verify_checkpoint(path)
    into = full_tensors(seed=-1)
    load_tensors(path, into)
    assert local_bits(into) == local_bits(full_tensors(7))
    assert read_state(path) == {"step": 7}


def save_and_load(prefix: str, writes: Layout, reads: Layout) -> list[str]:
    """The names of the tensors whose local bits differ after passing through the store from one layout to another."""
    store = MemoryStore(SharedBytes(prefix))
    for step in (1, 2, 3):
        path = save_checkpoint(store, step, in_layout(full_tensors(step), writes), {}, keep_last=2)
    assert path == find_checkpoint(store)
    assert [name for name in store.names() if "step" in name] == ["step-00000002", "step-00000003"]
    into = in_layout(full_tensors(seed=-1), reads)
    load_tensors(path, into)
    wanted, got = local_bits(in_layout(full_tensors(3), reads)), local_bits(into)
    return [name for name in wanted if wanted[name] != got[name]]


@pytest.mark.parametrize(("writes", "reads"), list(itertools.permutations(LAYOUTS[2], 2)), ids=str)
def test_two_ranks_write_in_one_layout_and_read_in_another(writes, reads):
    assert ranks(2, save_and_load, f"{writes} {reads}", writes, reads) == [[], []]


def test_the_newest_stay(store):
    for step in range(1, 6):
        save(store, step, keep_last=2)
    assert store.names() == ["latest", "step-00000004", "step-00000005"]


@pytest.mark.parametrize("file", [SHARD, "index.json", "state.json", MANIFEST])
def test_a_damaged_byte_is_found_and_the_checkpoint_set_aside(store, file):
    older, newer = save(store, 1), save(store, 2)
    content = bytearray(newer.read(file))
    content[-3] ^= 1
    newer.put(file, bytes(content))
    with pytest.raises(CheckpointError, match=file):
        verify_checkpoint(newer)
    assert set_aside_damaged(newer) == store / "step-00000002.damaged"
    assert (store / "step-00000002.damaged").read(file) == content
    assert find_checkpoint(store) == older


class Dies(MemoryStore):
    """Raises at its ``held.left``-th modification, like a process that is killed there."""

    def __truediv__(self, name: str) -> "Dies":
        return Dies(self.held, f"{self.folder}/{name}")

    def write(self, name, parts):
        self._use()
        super().write(name, parts)

    def remove(self, name):
        self._use()
        super().remove(name)

    def _use(self) -> None:
        self.held.left -= 1
        if self.held.left < 0:
            raise KeyboardInterrupt


def test_one_that_is_not_committed_is_not_seen_and_removed_by_the_next_save(caplog):
    """Killed before any modification, the store has the old or the new one, and the next save cleans up."""
    caplog.set_level(logging.INFO)
    found = []
    for uses in itertools.count():
        held = OwnBytes()
        store = MemoryStore(held)
        save(store, 1)
        held.left = uses
        try:
            save(Dies(held), 2, keep_last=1)
            killed = False
        except KeyboardInterrupt:
            killed = True
        newest = find_checkpoint(store)
        verify_checkpoint(newest)
        found.append(read_state(newest)["step"])
        save(store, 3, keep_last=1)
        assert store.names() == ["latest", "step-00000003"]
        if not killed:
            break
    assert found == sorted(found)
    assert (found[0], found[-2]) == (1, 2)
    assert len(found) > 8
    assert "which a killed process left behind" in caplog.text


def test_a_first_save_that_is_killed_leaves_a_checkpoint_or_no_trace():
    complete = []
    for uses in itertools.count():
        held = OwnBytes()
        held.left = uses
        with contextlib.suppress(KeyboardInterrupt):
            save(Dies(held), 2)
        store = MemoryStore(held)
        complete.append(find_checkpoint(store) is not None)
        assert complete[-1] or traces_of_saves(store) == []
        if traces_of_saves(store) == ["latest", "step-00000002"] and store.leftovers() == []:
            break
    assert complete[0] is False
    assert len(complete) > 5


def test_the_same_step_is_left_as_it_is_and_another_of_its_name_refused(store):
    path = save(store, 1)
    before = dict(store.held)
    assert save(store, 1) == path
    with pytest.raises(CheckpointError, match="step-00000001 already exists with different contents"):
        save(store, 1, value=3.0)
    assert store.held == before


class Full(MemoryStore):
    def __truediv__(self, name: str) -> "Full":
        return Full(self.held, f"{self.folder}/{name}")

    def write(self, name, parts):
        if dist.get_rank() == 1 and "shard" in name:
            raise StorageError("the bucket is full")
        super().write(name, parts)


def save_where_rank_1_cannot() -> tuple[str, list[str]]:
    store = Full(SharedBytes("full"))
    with pytest.raises(StorageError) as caught:
        save_checkpoint(store, 1, in_layout(full_tensors(1), LAYOUTS[2][0]), {}, keep_last=2)
    dist.barrier()
    return str(caught.value), store.names()


def test_a_refusal_on_one_rank_leaves_nothing(store):
    text = "step 1 was not saved and earlier checkpoints are unchanged: rank 1: the bucket is full"
    assert ranks(2, save_where_rank_1_cannot) == [(text, [])] * 2


@pytest.mark.parametrize("block", [1, 64, 8 << 20])
def test_a_part_of_a_box_is_read_whatever_the_size_of_a_block(store, block, monkeypatch):
    monkeypatch.setattr("megalith.checkpoint.shard_file._BLOCK", block)
    full = torch.arange(5.0 * 6 * 7).reshape(5, 6, 7)
    write_shard(store, "x.safetensors", {"w": full.bfloat16(), "other": torch.ones(3)})
    shard = ShardFile(store, "x.safetensors")
    for part in [
        ((0, 5), (0, 6), (0, 7)),
        ((1, 4), (0, 6), (0, 7)),
        ((1, 4), (2, 5), (0, 7)),
        ((0, 5), (3, 4), (2, 7)),
    ]:
        into = torch.zeros(2 * 7, 6, 5).permute(2, 1, 0)[: part[0][1] - part[0][0]]  # other strides and dtype
        into = into[:, : part[1][1] - part[1][0], : 2 * (part[2][1] - part[2][0]) : 2]
        shard.read_part("w", Box.whole(full.shape), Box(part), "bfloat16", into)
        assert into.equal(full[tuple(slice(*ends) for ends in part)])
