"""split_product: the numbers of a plain matmul, each computed once, in the action it belongs to."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.acceleration.recompute import recompute
from megalith.parallel import linear as default
from megalith.parallel.pipeline.split_product import SplitProduct

IN, OUT = 7, 5


def operands(*shape: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    """x [*shape, IN], weight, bias, and the gradient of the product."""
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(size, generator=generator).to(dtype) for size in ((*shape, IN), (OUT, IN), (OUT,)))
    dy = torch.randn(*shape, OUT, generator=generator).to(dtype)
    return [x.requires_grad_(), w.requires_grad_(), b.requires_grad_() if bias else None, dy]


def finish(product: SplitProduct) -> None:
    for part in product.take():
        part.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 4), (6,), (2, 3, 2), (), (0, 4)], ids=str)
def test_outputs_and_gradients_are_bitwise_those_of_linear(shape, bias, dtype):
    found = []
    for product in (linear, SplitProduct()):
        x, w, b, dy = operands(*shape, bias=bias, dtype=dtype)
        y = product(x, w, b)
        y.backward(dy)
        if isinstance(product, SplitProduct):
            assert w.grad is None, "put off"
            finish(product)
        found.append([y.detach(), x.grad, w.grad, *([b.grad] if bias else [])])
    for want, got in zip(*found, strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize(("num_in", "num_out"), [(32, 32), (512, 512), (768, 256), (256, 768)])
def test_in_every_layout_the_gradients_are_bitwise_those_of_the_default_product(num_in, num_out, monkeypatch):
    monkeypatch.setattr(default, "_has_slow_mkl", lambda: True)  # oneDNN computes the products of the last three
    S, B = (96, 4) if num_in > 32 else (4, 4)
    generator = torch.Generator().manual_seed(0)
    weight, x, dy = (
        torch.randn(*shape, generator=generator) for shape in ((num_out, num_in), (S, B, num_in), (S, B, num_out))
    )
    by_batch = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in (x, dy)]
    by_columns = [each.permute(2, 0, 1).contiguous().permute(1, 2, 0) for each in (x, dy)]
    layouts = [(x, dy), (x, by_batch[1]), (x, by_columns[1]), (by_batch[0], dy), (by_columns[0], by_columns[1])]
    for given_x, gradient in [*layouts, [each.double() for each in layouts[2]]]:
        found = []
        for product in (default.linear, SplitProduct()):
            given = [given_x.detach().requires_grad_(), weight.to(gradient.dtype, copy=True).requires_grad_()]
            product(*given, None).backward(gradient)
            if isinstance(product, SplitProduct):
                finish(product)
            found.append([each.grad for each in given])
            given_x.grad = None
        assert all(map(torch.equal, *found)), (given_x.stride(), gradient.stride())


def test_a_strided_input_and_an_expanded_gradient_are_taken_as_they_are():
    found = []
    for product in (linear, SplitProduct()):
        x, w, b, _ = operands(3, 4)
        product(x.transpose(0, 1), w, b).sum().backward()
        if isinstance(product, SplitProduct):
            finish(product)
        found.append([x.grad, w.grad, b.grad])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)


def test_the_gradient_goes_through_whatever_made_the_weight():
    product = SplitProduct()
    x, w, _, _ = operands(3)
    product(x, (2.0 * w)[1:3], None).sum().backward()
    finish(product)
    want = torch.zeros(OUT, IN, dtype=torch.float64)
    want[1:3] = 2.0 * x.detach().sum(0)
    torch.testing.assert_close(w.grad, want, rtol=1e-15, atol=1e-15)


def test_gradients_of_several_backwards_add_up_and_nothing_is_left():
    product = SplitProduct()
    x, w, _, _ = operands(3)
    for _ in range(3):
        product(x, w, None).sum().backward()
    finish(product)
    torch.testing.assert_close(w.grad, 3.0 * x.detach().sum(0).expand(OUT, IN), rtol=1e-15, atol=1e-15)
    assert product.take() == []


@pytest.mark.parametrize(("of_x", "of_weight"), [(False, True), (True, False), (False, False)])
def test_where_one_gradient_is_all_that_is_wanted_nothing_is_put_off(of_x, of_weight):
    product = SplitProduct()
    x, w, b, dy = operands(3)
    x.requires_grad_(of_x)
    w.requires_grad_(of_weight)
    product(x, w, b).backward(dy)
    assert product.take() == []
    assert (x.grad is not None, w.grad is not None) == (of_x, of_weight)
    assert torch.equal(b.grad, dy.sum(0))


def test_without_gradients_it_is_linear():
    product = SplitProduct()
    x, w, b, _ = operands(3)
    with torch.no_grad():
        y = product(x, 2.0 * w, b)
        assert torch.equal(y, linear(x, 2.0 * w, b))
    assert not y.requires_grad


class Products(TorchDispatchMode):
    """Records the shapes of the matrix products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.append(tuple(found.shape))
        return found


class Mlp(nn.Module):
    """Two products with a sigmoid in between, with sizes that make every product's shape unique."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up = nn.Parameter(torch.randn(11, IN, generator=generator))
        self.down = nn.Parameter(torch.randn(OUT, 11, generator=generator))
        self.product = product
        self.between: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        up = self.product(x, self.up, None)
        hidden = torch.sigmoid(up)
        self.between.append(weakref.ref(hidden))
        return self.product(hidden, self.down, None)


def test_each_product_is_computed_in_its_action_and_once():
    product = SplitProduct()
    mlp, x = Mlp(product), torch.randn(3, IN, requires_grad=True)
    y = mlp(x)
    with Products() as of_inputs:
        y.sum().backward()
    with Products() as of_weights:
        finish(product)
    assert of_inputs.shapes == [(3, 11), (3, IN)]
    assert of_weights.shapes == [(OUT, 11), (11, IN)]


def test_recomputed_activations_are_not_computed_a_third_time():
    product = SplitProduct()
    mlp, x = Mlp(product), torch.randn(3, IN, requires_grad=True)
    y = recompute(mlp.forward, x)
    assert mlp.between[0]() is None, "dropped"
    with Products() as of_inputs:
        y.sum().backward()
    assert len(mlp.between) == 2
    with Products() as of_weights:
        finish(product)
    assert of_inputs.shapes.count((3, 11)) == 2  # the recomputed forward, and the gradient
    assert of_weights.shapes == [(OUT, 11), (11, IN)]
    plain = Mlp(linear)
    plain(x.detach().requires_grad_()).sum().backward()
    assert torch.equal(mlp.up.grad, plain.up.grad)
    assert torch.equal(mlp.down.grad, plain.down.grad)


def test_between_the_actions_the_inputs_of_products_are_kept_and_afterwards_nothing():
    product = SplitProduct()
    mlp, x = Mlp(product), torch.randn(3, IN, requires_grad=True)
    mlp(x).sum().backward()
    [hidden] = mlp.between
    assert hidden() is not None
    parts = product.take()
    last, first = parts
    assert first.x is x
    del last, parts
    assert hidden() is None, "nothing else of the graph holds it"
