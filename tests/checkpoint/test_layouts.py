"""Any layout reads what any layout wrote, bit for bit; each element is stored once."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megalith.checkpoint import load_tensors, read_state, save_checkpoint
from megalith.checkpoint.folders import step_name
from tests.checkpoint.layouts import LAYOUTS, Layout, full_tensors, in_layout, local_bits, mesh_of
from tests.rank_pool import ranks

ALONE = (1, 1, 1)
WRITERS = [(1, ALONE), *((size, layout) for size, layouts in LAYOUTS.items() for layout in layouts)]


def save_all(folder: Path, first_step: int, layouts: list[Layout]) -> None:
    """Saves the tensors of seed ``step`` in each layout, one step per layout."""
    for step, layout in enumerate(layouts, first_step):
        save_checkpoint(folder, step, in_layout(full_tensors(step), layout), {"layout": layout}, keep_last=100)


def load_all(folder: Path, steps: int, layouts: list[Layout]) -> list[tuple[Layout, int, list[str]]]:
    """For each layout and step, the names of the tensors whose local bits differ from those saved."""
    different = []
    for layout in layouts:
        for step in range(steps):
            into = in_layout(full_tensors(seed=-1), layout)
            load_tensors(folder / step_name(step), into)
            wanted, got = local_bits(in_layout(full_tensors(step), layout)), local_bits(into)
            different.append((layout, step, [name for name in wanted if wanted[name] != got[name]]))
    return different


def save_and_load_alone(folder: Path, steps: int) -> list[list[str]]:
    """The same without a process group."""
    save_checkpoint(folder, 0, full_tensors(0), {"layout": ALONE}, keep_last=100)
    different = []
    for step in range(steps):
        into = full_tensors(seed=-1)
        load_tensors(folder / step_name(step), into)
        wanted, got = local_bits(full_tensors(step)), local_bits(into)
        different.append([name for name in wanted if wanted[name] != got[name]])
    return different


def test_any_layout_reads_what_any_layout_wrote(tmp_path):
    first_step = 1
    for num_ranks, layouts in LAYOUTS.items():
        ranks(num_ranks, save_all, tmp_path, first_step, layouts)
        first_step += len(layouts)
    assert save_and_load_alone(tmp_path, len(WRITERS)) == [[]] * len(WRITERS)
    for num_ranks, layouts in LAYOUTS.items():
        wanted = [(layout, step, []) for layout in layouts for step in range(len(WRITERS))]
        assert ranks(num_ranks, load_all, tmp_path, len(WRITERS), layouts) == [wanted] * num_ranks
    assert [tuple(read_state(tmp_path / step_name(step))["layout"]) for step in range(len(WRITERS))] == [
        layout for _, layout in WRITERS
    ]


def test_every_layout_stores_each_element_once(tmp_path):
    ranks(4, save_all, tmp_path, 0, LAYOUTS[4])
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in full_tensors(0).values())
    for step in range(len(LAYOUTS[4])):
        stored = 0
        for file in (tmp_path / step_name(step)).glob("*.safetensors"):
            header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
            stored += file.stat().st_size - header
        assert stored == num_bytes


class Net(nn.Module):
    """A column-parallel, a row-parallel and an uneven norm weight: the placements that FSDP and TP create together."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        torch.manual_seed(0)
        mesh, replicated = mesh_of(layout), [Replicate()]
        for name, shape, placements in [
            ("up", (6, 8), [Shard(0)]),
            ("down", (8, 6), [Shard(1)]),
            ("norm", (5,), replicated),
        ]:
            whole = torch.randn(shape)
            weight = distribute_tensor(whole, mesh["tp"], placements, src_data_rank=None)
            self.register_parameter(name, nn.Parameter(weight))
        fully_shard(
            self,
            mesh=mesh["dp_replicate", "dp_shard"],
            shard_placement_fn=lambda weight: Shard(1) if weight is self.up else Shard(0),
        )

    def forward(self) -> torch.Tensor:
        return sum(weight.to_local().square().sum() for weight in self.parameters())


def trained(layout: Layout, steps: int) -> tuple[dict[str, torch.Tensor], nn.Module, torch.optim.Optimizer]:
    net = Net(layout)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        net().backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in net.named_parameters():
        tensors[f"model.{name}"] = weight
        for key, value in optimizer.state[weight].items():
            tensors[f"optimizer.{key}.{name}"] = value
    return tensors, net, optimizer


def save_trained(folder: Path, layout: Layout) -> dict[str, torch.Tensor]:
    tensors, _, _ = trained(layout, steps=2)
    save_checkpoint(folder, 1, tensors, {}, keep_last=1)
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}


def load_trained(folder: Path, layout: Layout) -> dict[str, torch.Tensor]:
    tensors, _, _ = trained(layout, steps=1)
    load_tensors(folder / step_name(1), tensors)
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}


@pytest.mark.parametrize(("writes", "reads"), [((1, 2, 2), (2, 2, 1)), ((2, 2, 1), (1, 4, 1)), ((1, 4, 1), (1, 2, 2))])
def test_parameters_and_moments_of_fsdp_and_tp_move_to_another_layout(tmp_path, writes, reads):
    saved = ranks(4, save_trained, tmp_path, writes)[0]
    assert len(saved) == 3 * 4
    assert not saved["optimizer.exp_avg.norm"].isnan().any()
    for loaded in ranks(4, load_trained, tmp_path, reads):
        assert loaded.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(loaded[name], tensor)
