"""AdamW over many tensors: step by step like torch's optimizers, with everything a training loop does around it."""

import pytest
import torch
from torch import Tensor, nn

from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions import fused_adamw_
from megalith.fusions.adamw.kernels import adamw as kernels
from tests.kernel_reports import in_interpreter

PATHS = ("triton", "aten", "reference")
SHAPES = [(3, 5), (), (0,), (8191,), (2, 4097), (0, 4), (1,)]  # around a program's chunk, and empty
SETTINGS = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1}


class State:
    """Weights of dtype ``of``, copies in ``dtype`` if given, zero moments, and gradients."""

    def __init__(self, device: str, shapes=SHAPES, dtype: torch.dtype | None = None, of: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.weights = [torch.randn(shape).to(device, of) for shape in shapes]
        self.copies = None if dtype is None else [w.to(dtype) for w in self.weights]
        self.moments = [[torch.zeros_like(w) for w in self.weights] for _ in range(2)]
        self.grads = [torch.randn(shape).to(device, of) for shape in shapes]

    def tensors(self) -> list[Tensor]:
        return [*self.weights, *(self.copies or []), *self.moments[0], *self.moments[1]]

    def update_(self, path: str | None, grads: list[Tensor] | None = None, step: int = 1, **settings) -> None:
        params, masters = (self.weights, None) if self.copies is None else (self.copies, self.weights)
        grads = self.grads if grads is None else grads
        fused_adamw_(params, masters, grads, *self.moments, backend=path, step=step, **(SETTINGS | settings))


def by_torch(state: State, num_steps: int, **settings) -> list[Tensor]:
    """The weights of ``state`` after steps of torch's optimizer, with slightly larger gradients in each."""
    weights = [nn.Parameter(w.clone()) for w in state.weights]
    optimizer = torch.optim.AdamW(weights, **SETTINGS, **settings)
    for step in range(num_steps):
        for w, g in zip(weights, state.grads, strict=True):
            w.grad = g * (step + 1)
        optimizer.step()
    return [w.detach() for w in weights]


def by_us(state: State, num_steps: int, path: str) -> list[Tensor]:
    for step in range(num_steps):
        state.update_(path, [g * (step + 1) for g in state.grads], step + 1)
    return state.weights


@pytest.mark.parametrize("of", [torch.float32, torch.float64], ids=str)
def test_the_reference_is_torchs_optimizer_bit_for_bit(of, device):
    want = by_torch(State(device, of=of), 4, foreach=False)
    assert all(map(torch.equal, by_us(State(device, of=of), 4, "reference"), want))


def test_aten_is_torchs_fused_optimizer_bit_for_bit(device):
    want = by_torch(State(device), 4, fused=True)
    assert all(map(torch.equal, by_us(State(device), 4, "aten"), want))


def test_the_kernel_stays_as_near_to_float64_as_torchs_optimizer(device):
    exact = by_torch(State(device, of=torch.float64), 4)
    for w, want in zip(by_us(State(device), 4, "triton"), exact, strict=True):
        torch.testing.assert_close(w.double(), want, rtol=1e-6, atol=1e-6)


def test_an_update_worked_out_by_hand():
    # m = 0.2, v = 0.4, corrected to 1 and 4; w = 3 * (1 - 0.01) - 0.1 * 1 * 2 / 2
    state = State("cpu", shapes=[(1,)], of=torch.float64)
    state.weights[0].fill_(3.0)
    state.update_("reference", [torch.tensor([2.0], dtype=torch.float64)], eps=0.0)
    assert state.weights[0].item() == pytest.approx(3.0 * 0.99 - 0.1, abs=1e-15)
    assert state.moments[0][0].item() == pytest.approx(0.4)
    assert state.moments[1][0].item() == pytest.approx(0.4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_copies_are_the_masters_rounded_in_the_same_pass(dtype, path, device):
    alone, state = State(device), State(device, dtype=dtype)
    alone.update_(path)
    state.update_(path)
    for w, copy, want in zip(state.weights, state.copies, alone.weights, strict=True):
        assert copy.dtype == dtype
        if path == "aten":  # a long tensor is vectorized differently in blocks
            torch.testing.assert_close(w, want, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(w, want)
        if path == "triton" and device == "cpu":  # the interpreter truncates to bfloat16
            torch.testing.assert_close(copy.float(), w, rtol=2**-7, atol=1e-7)
        else:
            assert torch.equal(copy, w.to(dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_gradients_are_multiplied_by_a_scale_on_the_device_and_not_changed(dtype, path, device):
    scaled, plain = State(device, dtype=dtype), State(device, dtype=dtype)
    grads = [g * 4 for g in scaled.grads]  # a power of two, so that rounding is the same
    before = [g.clone() for g in grads]
    scaled.update_(path, grads, grad_scale=torch.tensor([0.25], device=device))
    plain.update_(path)
    for got, want in zip(scaled.tensors(), plain.tensors(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, grads, before))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("found", [torch.tensor(True), torch.tensor([2.0]), torch.tensor(float("nan"))], ids=str)
def test_nothing_is_written_where_a_gradient_is_not_finite(found, dtype, path, device):
    state = State(device, dtype=dtype)
    before = [x.clone() for x in state.tensors()]
    state.update_(path, [torch.full_like(g, float("nan")) for g in state.grads], found_nonfinite=found.to(device))
    assert all(map(torch.equal, state.tensors(), before))
    state.update_(path, found_nonfinite=torch.zeros_like(found, device=device))
    assert not torch.equal(state.weights[0], before[0])


@pytest.mark.parametrize("path", PATHS)
def test_nan_reaches_the_weight_that_it_belongs_to_and_no_other(path, device):
    state = State(device, shapes=[(4,), (4,)])
    state.grads[0][1] = float("nan")
    state.update_(path)
    assert state.weights[0].isnan().tolist() == [False, True, False, False]
    assert state.weights[1].isfinite().all()


@pytest.mark.parametrize("path", PATHS)
def test_parameters_that_want_gradients_are_updated_and_autograd_is_told(path, device):
    param = nn.Parameter(torch.ones(3, device=device))
    y = param.square().sum()
    fused_adamw_([param], None, [torch.ones_like(param)], [torch.zeros(3, device=device)],
                 [torch.zeros(3, device=device)], **SETTINGS, step=1, backend=path)  # fmt: skip
    assert param.grad_fn is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("path", PATHS)
def test_gradients_may_be_strided_expanded_and_unaligned(path, device):
    state, plain = (State(device, shapes=[(4, 6), (4, 6), (5,)]) for _ in range(2))
    plain.grads[1] = torch.ones(4, 6, device=device)
    memory = torch.zeros(9, device=device)
    memory[1:6] = state.grads[2]
    grads = [state.grads[0].t().contiguous().t(), torch.ones((), device=device).expand(4, 6), memory[1:6]]
    state.update_(path, grads)
    plain.update_(path)
    assert all(map(torch.equal, state.weights, plain.weights))


@in_interpreter
def test_tensors_are_found_where_more_of_them_are_than_are_looked_at_together(monkeypatch):
    state, plain = State("cpu"), State("cpu")
    monkeypatch.setattr(kernels, "_SEARCH", 2)
    state.update_("triton")
    plain.update_("reference")
    for got, want in zip(state.weights, plain.weights, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_no_parameters_are_no_work():
    fused_adamw_([], None, [], [], [], lr=0.1, weight_decay=0.0, step=1)


def one(dtype: torch.dtype = torch.float32, *shape: int) -> list[Tensor]:
    return [torch.ones(shape or (2,), dtype=dtype)]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"grads": []}, ShapeError, "grads must have a tensor for each of the 1 params; got 0"),
        ({"grads": one(torch.float32, 3)}, ShapeError, r"grads\[0\] must be \[2\], like params\[0\]; got \[3\]"),
        ({"exp_avgs": [torch.ones(2, device="meta")]}, ShapeError, r"exp_avgs\[0\] must be on cpu.*got meta"),
        ({"grads": one(torch.int32)}, ShapeError, r"grads must all have .* floating-point dtype; got torch.int32"),
        ({"params": one(torch.bfloat16)}, ShapeError, r"params must be float32 or float64.*pass float32 masters"),
        ({"masters": one(torch.float16)}, ShapeError, r"masters must be float32 or float64; got torch.float16$"),
        ({"exp_avg_sqs": one(torch.bfloat16)}, ShapeError, r"exp_avg_sqs must be torch.float32.*got torch.bfloat16"),
        ({"exp_avgs": [torch.ones(4)[::2]]}, ShapeError, r"exp_avgs\[0\] must be contiguous.*strides \(2,\)"),
        ({"grad_scale": torch.ones(2)}, ShapeError, r"grad_scale must have one element and be on cpu.*got shape \[2\]"),
        (
            {"found_nonfinite": torch.ones((), device="meta")},
            ShapeError,
            r"found_nonfinite must have one element.*on meta",
        ),
        ({"lr": -1.0}, ConfigError, r"lr must be 0 or more; got -1.0"),
        ({"eps": float("nan")}, ConfigError, r"eps must be 0 or more; got nan"),
        ({"betas": (0.9, 1.0)}, ConfigError, r"betas must be two numbers in \[0, 1\); got \(0.9, 1.0\)"),
        ({"step": 0}, ConfigError, r"step must be the number of this update, counted from 1; got 0"),
        ({"backend": "blocked"}, BackendError, "it has no such path, only triton, aten, reference"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(changed, error, message):
    given = {"params": one(), "masters": None, "grads": one(), "exp_avgs": one(), "exp_avg_sqs": one()}
    given |= {"step": 1, **SETTINGS} | changed
    with pytest.raises(error, match=message):
        fused_adamw_(**given)
    assert torch.equal(given["params"][0], torch.ones_like(given["params"][0]))


@pytest.mark.parametrize("path", PATHS)
def test_an_update_is_refused_while_a_cuda_graph_is_captured(path, monkeypatch):
    state = State("cpu")
    before = [x.clone() for x in state.tensors()]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match=r"every replay would repeat step 3 with learning rate 0.1; capture forward"):
        state.update_(path, step=3)
    assert all(map(torch.equal, state.tensors(), before))


def test_lists_of_two_dtypes_are_refused():
    pair = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    with pytest.raises(ShapeError, match=r"params must all have the same .*dtype; got torch.float64 for params\[1\]"):
        fused_adamw_(pair, None, pair, pair, pair, **SETTINGS, step=1)
