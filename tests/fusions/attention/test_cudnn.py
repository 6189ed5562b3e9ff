"""Attention by cuDNN's kernels. Without a GPU, our reference stands in for them, with their arguments and layouts."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megalith.errors import BackendError
from megalith.fusions import fused_attention, merge_attention, use
from megalith.fusions.attention import cudnn
from megalith.fusions.attention.attention import attention_gradients
from megalith.fusions.attention.formulas import reference, reference_gradients
from megalith.fusions.attention.paths import CUDNN_FUSION, FUSION, fusions_of
from megalith.fusions.core.devices import is_hopper
from tests.fusions.attention.cases_of_attention import formula

ON_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
NEAR = 6e-3  # relative L2 error of results in bfloat16; probabilities and gradients of scores are rounded as well
S, B, A, UNBOUNDED = 256, 2, 4, 2**30
# groups, head size, that of v, whether causal
CALLS = {
    "causal": (4, 64, 64, True),
    "both ways, groups": (2, 64, 64, False),
    "other head size": (4, 96, 64, True),
    "one group": (1, 40, 80, True),
    "latent attention": (4, 192, 128, True),
    "wide heads": (2, 256, 256, False),
}


def is_aligned(x: Tensor) -> bool:
    """Whether cuDNN may be given ``x``: 16 bytes can be read at once."""
    return (
        x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and all(stride and stride % 8 == 0 for stride in x.stride()[:-1])
    )


def forward_on_cpu(q, k, v, bias, has_lse, dropout, causal, debug, *, scale):
    assert (bias, has_lse, dropout, debug) == (None, True, 0.0, False)
    assert all(is_aligned(x) for x in (q, k, v))
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    out, lse = reference(q, k, v, None, None, scale, None, UNBOUNDED, 0 if causal else UNBOUNDED)
    return out.permute(1, 2, 0, 3), lse.unsqueeze(-1), None, None, q.shape[0], k.shape[0], None, None, None


def backward_on_cpu(dout, q, k, v, out, lse, seed, offset, bias, start_q, start_k, Sq, Sk, dropout, causal, *, scale):
    assert (bias, start_q, start_k, Sq, Sk, dropout) == (None, None, None, q.shape[2], k.shape[2], 0.0)
    assert seed.dtype == offset.dtype == torch.int64
    assert lse.is_contiguous()
    assert dout.stride() == out.stride()
    assert all(is_aligned(x) for x in (dout, q, k, v, out))
    given = (x.permute(2, 0, 1, 3) for x in (dout, q, k, v, out))
    right = 0 if causal else UNBOUNDED
    gradients = reference_gradients(*given, lse.squeeze(-1), None, scale, None, UNBOUNDED, right)
    return tuple(dx.permute(1, 2, 0, 3) for dx in gradients)


@pytest.fixture
def called(monkeypatch) -> list[str]:
    """The calls of torch's operators, outside deterministic mode, in which backward makes none."""
    names: list[str] = []
    for name, stand_in in (("_FORWARD", forward_on_cpu), ("_BACKWARD", backward_on_cpu)):
        kernel = getattr(cudnn, name) if ON_GPU else stand_in
        monkeypatch.setattr(
            cudnn, name, lambda *args, _k=kernel, _n=name, **named: names.append(_n) or _k(*args, **named)
        )
    if ON_GPU and not (is_hopper(torch.empty(0, device="cuda").device) and cudnn._is_there()):
        pytest.skip("cuDNN's kernels are not used on this GPU")
    torch.use_deterministic_algorithms(False)
    return names


def example(name: str, device: str, S: int = S) -> tuple[list[Tensor], Tensor, Tensor, bool]:
    """q, k and v, dout and dlse, in bfloat16 but for the last; v is part of a wider tensor."""
    G, D, Dv, causal = CALLS[name]
    torch.manual_seed(0)
    widths = ((A, D), (G, D), (G, Dv + 8), (A, Dv))
    q, k, wide, dout = (torch.randn(S, B, n, width).bfloat16().to(device) for n, width in widths)
    return [x.requires_grad_() for x in (q, k, wide[..., 8:].detach())], dout, torch.randn(B, A, S).to(device), causal


def computed(leaves: list[Tensor], causal: bool) -> tuple[Tensor, Tensor]:
    """``fused_attention`` on a GPU; on a CPU what it would call there."""
    if ON_GPU:
        return fused_attention(*leaves, causal=causal)
    right = 0 if causal else UNBOUNDED
    out, lse = cudnn.op(*leaves, None, None, leaves[0].shape[-1] ** -0.5, None, UNBOUNDED, right)
    return out, lse


def assert_near(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= NEAR * b.norm()


@pytest.mark.parametrize("uses_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_match_float64(name, uses_lse, device, called):
    leaves, dout, dlse, causal = example(name, device)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got, want = computed(leaves, causal), formula(*exact, causal=causal)
    assert_near(got, want)
    num, dy = (2, (dout, dlse)) if uses_lse else (1, (dout,))
    of_exact = torch.autograd.grad(want[:num], exact, [g.double() for g in dy])
    assert_near(torch.autograd.grad(got[:num], leaves, dy), of_exact)
    assert len(called) == (1 if uses_lse else 2)  # there is no gradient for lse, so our kernels compute both


def test_results_may_be_written_into(device, called):
    leaves, *_, causal = example("causal", device)
    for result in computed(leaves, causal):
        result.mul_(2.0)
        assert result.is_contiguous()


def test_upstream_gradients_in_any_layout_share_what_was_prepared_for_the_first(device, called):
    leaves, dout, _, causal = example("causal", device)
    out, _ = computed(leaves, causal)
    layouts = [
        dout,
        dout.transpose(0, 1).contiguous().transpose(0, 1),
        dout[:1].expand_as(dout),
        dout.sum().expand_as(dout),
    ]
    for upstream in layouts:
        got = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
        want = torch.autograd.grad(out, leaves, upstream.contiguous(), retain_graph=True)
        assert_near(got, [x.double() for x in want])


@pytest.mark.parametrize("name", ["begins anywhere", "odd rows", "repeated"])
def test_operands_that_cudnn_cannot_read_are_copied(name, device, called):
    leaves, dout, _, causal = example("causal", device)
    apart = {
        "begins anywhere": lambda x: torch.cat((x[..., :1], x), dim=-1)[..., 1:],
        "odd rows": lambda x: torch.cat((x, x[..., :3]), dim=-1)[..., :-3],
        "repeated": lambda x: x[:, :1].expand_as(x),
    }[name]
    inputs = [apart(x.detach()).requires_grad_() for x in leaves]
    same = [x.detach().contiguous().requires_grad_() for x in inputs]
    got, want = (torch.autograd.grad(computed(given, causal)[0], given, dout) for given in (inputs, same))
    assert_near(got, [x.double() for x in want])


def test_float16(device, called):
    leaves, dout, _, causal = example("causal", device)
    leaves = [x.detach().half().requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got, want = computed(leaves, causal)[0], formula(*exact, causal=causal)[0]
    assert_near([got], [want])
    assert_near(torch.autograd.grad(got, leaves, dout.half()), torch.autograd.grad(want, exact, dout.half().double()))


def test_deterministic_mode_takes_our_backward(device, called):
    leaves, dout, _, causal = example("causal", device)
    torch.use_deterministic_algorithms(True)
    out, _ = computed(leaves, causal)
    torch.autograd.grad(out, leaves, dout)
    assert called == ["_FORWARD"]


@needs_gpu
def test_gradients_of_parts_of_the_keys(device, called):
    (q, k, v), dout, *_ = example("both ways, groups", device, 512)
    halves = [(k[part], v[part]) for part in (slice(256), slice(256, 512))]
    with torch.no_grad():
        parts = [fused_attention(q, *half, causal=False) for half in halves]
        out, lse = merge_attention(*parts[0], *parts[1])
        found = [attention_gradients(dout, q, *half, out, lse, causal=False) for half in halves]
    assert len(called) == 4
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(formula(*exact, causal=False)[0], exact, dout.double())
    (dq, *first), (more, *second) = found
    assert_near((dq.double() + more.double(), *map(torch.cat, zip(first, second, strict=True))), want)


@needs_gpu
@pytest.mark.parametrize("name", CALLS)
def test_torch_compile_is_told_its_memory_layout(name, device, called):
    leaves, dout, _, causal = example(name, device)
    torch.library.opcheck(
        torch.ops.megalith.attention_cudnn.default,
        (*leaves, None, None, 0.1, None, UNBOUNDED, 0 if causal else UNBOUNDED),
        test_utils=("test_schema", "test_faketensor"),
    )
    whole = torch.compile(lambda *given: fused_attention(*given, causal=causal)[0], fullgraph=True)
    got, want = (
        torch.autograd.grad(compute(*leaves), leaves, dout) for compute in (whole, lambda *x: computed(x, causal)[0])
    )
    assert_near(got, want)


def on(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device=device)


Q, K = (512, 2, 8, 64), (512, 2, 2, 64)
TAKEN = {
    "causal": ({}, True),
    "both ways": ({"right": UNBOUNDED}, True),
    "a window as long as the row": ({"left": 511}, True),
    "a window": ({"left": 510}, False),
    "a later part of the window": ({"right": 3}, False),
    "all keys of a shorter cache": ({"k": (256, 2, 2, 64), "v": (256, 2, 2, 64), "right": UNBOUNDED}, True),
    "causal queries after a cache": ({"k": (1024, 2, 2, 64), "v": (1024, 2, 2, 64)}, False),
    "latent attention": ({"q": (512, 2, 8, 192), "k": (512, 2, 8, 192), "v": (512, 2, 8, 128)}, True),
    "the length of a prompt": ({"q": (500, 2, 8, 64), "k": (500, 2, 2, 64), "v": (500, 2, 2, 64)}, False),
    "a head size that 8 does not divide": ({"q": (512, 2, 8, 60), "k": (512, 2, 2, 60)}, False),
    "heads that are too wide": (dict.fromkeys("qkv", (512, 2, 8, 264)), False),
    "float32": ({"dtype": torch.float32}, False),
    "float16": ({"dtype": torch.float16}, True),
    "a sink": ({"sink": (8,)}, False),
    "documents": ({"bounds": (2, 512, 2)}, False),
    "a CPU": ({"device": "cpu"}, False),
    "no keys": ({"k": (0, 2, 2, 64), "v": (0, 2, 2, 64), "right": UNBOUNDED}, False),
    "wide heads of two sizes": ({"q": (512, 2, 8, 256), "k": (512, 2, 2, 256)}, False),
    "wide heads of one size": (dict.fromkeys("qkv", (512, 2, 8, 256)), True),
    "no rows": ({"q": (512, 0, 8, 64), "k": (512, 0, 2, 64), "v": (512, 0, 2, 64)}, False),
}


@pytest.mark.parametrize("name", TAKEN)
def test_it_takes_what_cudnn_computes_faster(name, monkeypatch):
    monkeypatch.setattr(cudnn, "is_hopper", lambda device: device.type == "cuda")
    monkeypatch.setattr(cudnn, "_is_there", lambda: True)
    change, takes = TAKEN[name]
    device, dtype = change.get("device", "cuda"), change.get("dtype", torch.bfloat16)
    q, k, v = (on(device, *change.get(key, usual), dtype=dtype) for key, usual in (("q", Q), ("k", K), ("v", K)))
    sink = on(device, 8) if "sink" in change else None
    bounds = on(device, 2, 512, 2, dtype=torch.int32) if "bounds" in change else None
    call = q, k, v, sink, bounds, None, change.get("left", UNBOUNDED), change.get("right", 0)
    chosen = fusions_of(*call).forward
    assert (chosen is CUDNN_FUSION) is takes
    if device == "cuda":
        assert chosen.default(q) == ("aten" if takes else "triton" if q.shape[-1] <= 256 else "reference")
    if takes:
        with use("triton"):
            assert chosen.choose(q) == "triton"


@pytest.mark.parametrize(("version", "is_there"), [(91900, True), (91200, False), (None, False)])
def test_an_older_cudnn_is_not_used(version, is_there, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: version is not None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert cudnn._is_there() is is_there


def test_an_exported_program_takes_our_kernels_whose_lengths_may_be_dynamic(monkeypatch):
    monkeypatch.setattr(cudnn, "is_hopper", lambda device: True)
    monkeypatch.setattr(cudnn, "_is_there", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    q, k = on("cuda", *Q), on("cuda", *K)
    assert fusions_of(q, k, k, None, None, None, UNBOUNDED, 0).forward is FUSION


def test_the_path_says_which_calls_it_takes_on_a_gpu():
    with pytest.raises(
        BackendError, match=r"16-bit calls of 256, 512, \.\.\. tokens without .* on an H100 or H200; use triton or"
    ):
        FUSION.path(on("cuda", 4, 1, 1, 16), "aten")
