"""Gradients of our pipeline and of torch.distributed.pipelining, on the same ranks with the same stages."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs
from torch.nn.functional import linear

from megalith.parallel.pipeline import executor
from megalith.parallel.pipeline.links import open_links
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.schedules import placement_of, splits_backward
from megalith.parallel.pipeline.split_product import SplitProduct
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from tests.parallel.pipeline.test_pipeline import H, Part
from tests.rank_pool import ranks

THEIRS = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "zero_bubble": theirs.ScheduleInterleavedZeroBubble,
    "zb_v": theirs.ScheduleZBVZeroBubble,
}
where_torchs_zb_v_runs = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="before, torch's zb_v sends shapes to its own rank, which gloo cannot"
)
ROWS = 3  # per micro-batch: all of torch's stages have the same shape


def inputs(num_microbatches: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_microbatches, ROWS, H, generator=generator, dtype=torch.float64)


def of_torch(schedule: str, placement: Placement, m: int) -> list[Tensor]:
    """The gradient of each of this rank's matrices after a step of torch's schedule."""
    rank = dist.get_rank()
    parts = [Part(placement.stage(rank, chunk)) for chunk in range(placement.num_chunks)]
    stages = [
        PipelineStage(part, placement.stage(rank, chunk), placement.num_stages, torch.device("cpu"))
        for chunk, part in enumerate(parts)
    ]
    given = stages[0] if schedule in ("gpipe", "1f1b") else stages
    runs = THEIRS[schedule](given, m, loss_fn=lambda output, target: output.sum(), scale_grads=False)
    x = inputs(m).flatten(0, 1)
    first = any(stage.is_first for stage in stages)
    last = any(stage.is_last for stage in stages)
    runs.step(*([x] if first else []), **({"target": x} if last else {}))
    return [part.weight.grad for part in parts]


def of_ours(schedule: str, placement: Placement, m: int) -> list[Tensor]:
    rank, p = dist.get_rank(), placement.num_ranks
    links = open_links(placement, ParallelState(RankGrid(p, pipeline=p)), torch.float64, torch.device("cpu"))
    product = SplitProduct() if splits_backward(schedule) else None
    parts = [Part(placement.stage(rank, chunk), product or linear) for chunk in range(placement.num_chunks)]
    pipeline = Pipeline(parts, placement, schedule, links, product)

    def forward(part: nn.Module, micro_batch: int, hidden: Tensor | None) -> Tensor:
        y = part(inputs(m)[micro_batch] if hidden is None else hidden)
        return y.sum() if pipeline.holds_output(part) else y

    with (
        patch.object(executor, "gradient_sync", lambda chunk, last, keeps_weights: None),
        patch.object(executor, "finish_backward", lambda chunk: None),
    ):
        pipeline.train(m, forward, lambda _: (ROWS, H))
    return [part.weight.grad for part in parts]


def both(schedule: str, num_chunks: int, m: int) -> list[tuple[Tensor, Tensor]]:
    placement = placement_of(schedule, dist.get_world_size(), num_chunks)
    return list(zip(of_ours(schedule, placement, m), of_torch(schedule, placement, m), strict=True))


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_chunks", "num_microbatches"),
    [
        ("gpipe", 2, 1, 5),
        ("1f1b", 4, 1, 7),
        ("interleaved", 2, 3, 4),
        ("interleaved", 4, 2, 8),
        ("zero_bubble", 4, 1, 8),
        pytest.param("zb_v", 2, 2, 5, marks=where_torchs_zb_v_runs),
        pytest.param("zb_v", 4, 2, 9, marks=where_torchs_zb_v_runs),
    ],
)
def test_our_gradients_are_those_of_torchs_own_schedule(schedule, num_ranks, num_chunks, num_microbatches):
    for pairs in ranks(num_ranks, both, schedule, num_chunks, num_microbatches):
        for ours, torchs in pairs:
            assert torchs.abs().max() > 0
            torch.testing.assert_close(ours, torchs, rtol=1e-13, atol=1e-13)
