"""step_record: what layers write for each micro-batch, once, however often they run."""

import torch

from megalith.transformer.step_record import StepRecord


def test_what_is_kept_is_computed_once_for_each_name_layer_and_micro_batch():
    record, computed = StepRecord(1.0), []

    def compute(value: int) -> torch.Tensor:
        computed.append(value)
        return torch.tensor([value])

    for value, (name, layer, index) in enumerate([("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0)]):
        for _ in range(2):
            kept = record.micro_batch(index).kept(name, layer, lambda value=value: compute(value))
            assert kept.item() == value
    assert computed == [0, 1, 2, 3]
    assert record.total("a", 0).item() == 1
    assert record.total("c", 0) is None


def test_what_is_kept_has_no_gradient():
    x = torch.ones(2, requires_grad=True)
    assert not StepRecord(1.0).micro_batch(0).kept("a", 0, lambda: 2 * x).requires_grad


def test_loads_and_losses_are_summed_over_micro_batches_and_written_twice_count_once():
    record = StepRecord(0.5)
    assert record.tokens_per_expert(3) is None
    for index in (0, 1, 1):
        micro_batch = record.micro_batch(index)
        assert micro_batch.balance_scale == 0.5
        micro_batch.add(3, torch.tensor([1, 2]))
        micro_batch.add_loss("z_loss", 3, torch.tensor(1.5))
    assert record.tokens_per_expert(3).tolist() == [2, 4]
    total = record.loss("z_loss", 3)
    assert total is not None
    assert (total.item(), total.dtype, record.loss("z_loss", 2)) == (3.0, torch.float64, None)
