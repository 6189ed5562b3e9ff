"""Attention on a CPU: as torch, under torch.compile, and in bfloat16; test_fused_attention.py has the rest."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megalith.fusions import fused_attention, merge_attention
from megalith.fusions.attention import flash_for_cpu, products_for_cpu
from megalith.fusions.attention.attention import attention_gradients
from megalith.packed_seq_params import PackedSeqParams
from tests.fusions.attention.cases_of_attention import formula
from tests.fusions.attention.cpus import AMX, AVX512_BF16, CPUS, NEITHER, lengths_given_to_products, pretend


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("window", [2**30, 2], ids=["one tile", "several"])
@pytest.mark.parametrize("Dv", [5, 8, 11])
def test_values_of_any_head_size_are_in_the_memory_that_the_compiler_is_told_of(Dv, window):
    q, k = torch.randn(2, 6, 2, 4, 8)
    v = torch.randn(6, 2, 4, Dv)
    arguments = (q, k, v, None, None, 0.5, None, window, 0)
    inputs = tuple(x.requires_grad_() if isinstance(x, Tensor) else x for x in arguments)
    torch.library.opcheck(torch.ops.megalith.attention_for_cpu.default, inputs)


# float16, and without AMX bfloat16, are widened or computed by products
@pytest.mark.parametrize(("dtype", "S"), [(torch.float32, 33), (torch.bfloat16, 257)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("G", [1, 2, 4])
def test_it_is_torchs_attention_bit_for_bit(dtype, S, causal, G, monkeypatch):
    pretend(monkeypatch, AMX)
    monkeypatch.setattr(flash_for_cpu, "_FEWEST_QUERIES", 10_000)  # no products
    leaves = [torch.randn(S, 2, heads, 16).to(dtype).requires_grad_() for heads in (4, G, G)]
    out, _ = fused_attention(*leaves, causal=causal)
    heads_first = (x.permute(1, 2, 0, 3) for x in leaves)
    torchs = scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).permute(2, 0, 1, 3)
    dout = torch.randn(out.shape).to(dtype)
    got, want = ((y, *torch.autograd.grad(y, leaves, dout)) for y in (out, torchs))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("S", "cpu", "widened"),
    [(257, AMX, False), (32, AMX, True), (257, AVX512_BF16, False), (32, AVX512_BF16, True), (257, NEITHER, True)],
)
def test_the_backward_of_bfloat16_is_that_of_float32_where_it_is_faster(S, cpu, widened, monkeypatch):
    pretend(monkeypatch, cpu)
    monkeypatch.setattr(flash_for_cpu, "_FEWEST_QUERIES", 10_000)  # no products
    q, k, v = (x.bfloat16().requires_grad_() for x in torch.randn(3, S, 2, 4, 16))
    out, lse = fused_attention(q, k, v)
    dout = torch.randn(out.shape).bfloat16()
    saved = [x.detach().float() for x in (out, lse)]
    exact = attention_gradients(dout.float(), q.float(), k.float(), v.float(), *saved)
    got = torch.autograd.grad(out, (q, k, v), dout)
    rounded = [torch.equal(x, y.bfloat16()) for x, y in zip(got, exact, strict=True)]
    assert all(rounded) if widened else not any(rounded)


# rows of two tiles, of 256 and 44 queries or of 250 and 50, so that with AMX one tile of each row is widened
ROWS = {
    "window": ({"window": (100, 0)}, {"window": (100, 0)}),
    "documents": ({"packed_seq_params": PackedSeqParams.from_lengths([[250, 50]])}, {}),
}


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("name", ROWS)
def test_gradients_of_tiles_in_bfloat16_and_float32_match_float64(name, cpu, monkeypatch):
    pretend(monkeypatch, cpu)
    of_ours, of_formula = ROWS[name]
    leaves = [x.bfloat16().requires_grad_() for x in torch.randn(3, 300, 1, 2, 16)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, lse = fused_attention(*leaves, **of_ours)
    parts = [slice(0, 250), slice(250, 300)] if name == "documents" else [slice(None)]
    wanted = [formula(*(x[part] for x in exact), **of_formula) for part in parts]
    want_out, want_lse = torch.cat([one for one, _ in wanted]), torch.cat([one for _, one in wanted], dim=-1)
    dout, dlse = torch.randn(out.shape).bfloat16(), torch.randn(lse.shape)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    want = torch.autograd.grad((want_out, want_lse), exact, (dout.double(), dlse.double()))
    for a, b in zip((out, lse, *got), (want_out, want_lse, *want), strict=True):
        assert (a.double() - b).norm() <= 6e-3 * b.norm()


SHORT = {  # tokens, dtype, heads of keys, size of v's heads
    "float32": (99, torch.float32, 4, 16),
    "groups": (99, torch.float32, 2, 16),
    "one group, other head size": (99, torch.float32, 1, 24),
    "float16": (99, torch.float16, 4, 16),
    "bfloat16": (99, torch.bfloat16, 2, 16),
}


@pytest.mark.parametrize("has_sink", [True, False], ids=["sink", "no sink"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", SHORT)
def test_gradients_of_short_rows_are_products_that_match_float64(name, causal, has_sink, monkeypatch):
    pretend(monkeypatch, AMX)
    monkeypatch.setattr(products_for_cpu, "_ELEMENTS", 99 * 99 * 5)  # several heads at once, but not all
    calls = lengths_given_to_products(monkeypatch)
    S, dtype, G, Dv = SHORT[name]
    q, k, v = (torch.randn(S, 3, *heads).to(dtype).requires_grad_() for heads in ((4, 16), (G, 16), (G, Dv)))
    leaves = [q, k, v, *([torch.randn(4).to(dtype).requires_grad_()] if has_sink else [])]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, lse = fused_attention(*leaves[:3], sink=leaves[3] if has_sink else None, causal=causal)
    dout, dlse = torch.randn(out.shape).to(dtype), torch.randn(lse.shape)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    given = dout.double(), dlse.double()
    of_formula = formula(*exact[:3], sink=exact[3] if has_sink else None, causal=causal)
    want = list(torch.autograd.grad(of_formula, exact, given))
    if (
        has_sink and dtype.itemsize == 2
    ):  # that of the sink, a sum over all queries, is the gradient of out as it is stored
        share = (exact[3].detach().unsqueeze(-1) - lse.detach().double()).exp()  # of the sink in each query
        outward = (given[0] * out.detach().double()).sum(dim=-1).permute(1, 2, 0)
        want[3] = (share * (given[1] - outward)).sum(dim=(0, 2))
    assert calls == [S]
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() <= {2: 6e-3, 4: 2e-6}[a.element_size()] * b.norm()


# large scores, and values and gradients with a common part, so that dout v and dout out nearly cancel: the error in
# float32, bfloat16 and float16 is 2e-5, 2e-3 and 2e-4; with delta from out it is 5e-5, 8e-2 and 9e-3, and with
# probabilities that are not normalized 6e-4 in float32
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-5), (torch.bfloat16, 6e-3), (torch.float16, 6e-4)])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_short_rows_are_exact_where_terms_nearly_cancel(causal, dtype, bound, monkeypatch):
    lengths = lengths_given_to_products(monkeypatch)
    q, k, v, dout = (x.to(dtype) for x in torch.randn(4, 160, 2, 8, 64))
    leaves = [x.requires_grad_() for x in (30 * q, k, v + 10)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got = torch.autograd.grad(fused_attention(*leaves, causal=causal)[0], leaves, dout + 1)
    want = torch.autograd.grad(formula(*exact, causal=causal)[0], exact, (dout + 1).double())
    assert lengths == [160]
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "cpu"), [(torch.float32, AMX), *((torch.bfloat16, cpu) for cpu in CPUS)], ids=str)
def test_rows_are_short_within_measured_lengths(dtype, cpu, causal, monkeypatch):
    pretend(monkeypatch, cpu)
    calls = lengths_given_to_products(monkeypatch)
    lengths = [95, 96, 191, 192, 255, 256, 640, 641, 704, 705]
    for S in lengths:
        q = torch.randn(S, 1, 1, 8).to(dtype).requires_grad_()
        fused_attention(q, q, q, causal=causal, backend="aten")[0].sum().backward()
    of_any_rows = [96, 191, 256, 640] if causal else [96, 191]
    assert calls == (lengths[1:-1] if dtype == torch.bfloat16 and cpu != NEITHER else of_any_rows)


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_sink", [True, False], ids=["sink", "no sink"])
@pytest.mark.parametrize("G", [1, 2, 6])
def test_gradients_of_blocks_of_causal_rows_add_up(G, has_sink, dtype, cpu, monkeypatch):
    pretend(monkeypatch, cpu)
    monkeypatch.setattr(products_for_cpu, "_QUERIES", 60)  # blocks of 60, 60 and 30 of 150 queries
    monkeypatch.setattr(products_for_cpu, "_ELEMENTS", 60 * 150 * 4)
    calls = lengths_given_to_products(monkeypatch)
    q, k, v = (torch.randn(150, 3, heads, 16).to(dtype).requires_grad_() for heads in (6, G, G))
    sink = torch.randn(6).to(dtype) if has_sink else None
    out, lse = fused_attention(q, k, v, sink=sink)
    dout, dlse = torch.randn(out.shape).to(dtype), torch.randn(lse.shape)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    of_formula = formula(*exact, sink=None if sink is None else sink.double(), causal=True)
    want = torch.autograd.grad(of_formula, exact, (dout.double(), dlse.double()))
    assert calls == [150]
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() <= {2: 6e-3, 4: 2e-6}[a.element_size()] * b.norm()


@pytest.fixture
def onednn():
    """The settings for float32 products on a CPU, put back afterwards."""
    settings = torch.backends.mkldnn
    before = settings.fp32_precision, settings.matmul.fp32_precision
    yield settings
    settings.fp32_precision = before[0]
    settings.matmul.fp32_precision = before[1]


def differentiate(dtype):
    q = torch.randn(256, 2, 8, 16).to(dtype).requires_grad_()
    fused_attention(q, q, q)[0].sum().backward()


@pytest.mark.parametrize("precision", ["none", "ieee", "bf16"])
def test_operands_are_rounded_in_bfloat16_alone_and_the_setting_is_put_back(precision, onednn, monkeypatch):
    onednn.matmul.fp32_precision = precision
    found, compute = [], products_for_cpu._gradients_

    def recorded(*operands, **options):
        found.append(onednn.matmul.fp32_precision)
        compute(*operands, **options)

    monkeypatch.setattr(products_for_cpu, "_gradients_", recorded)
    for dtype, cpu in (*((torch.bfloat16, cpu) for cpu in CPUS), (torch.float32, AMX)):
        pretend(monkeypatch, cpu)
        differentiate(dtype)
        assert onednn.matmul.fp32_precision == precision
    assert found == ["bf16", "bf16", "ieee", "ieee"]


def test_an_inherited_setting_stays_inherited(onednn, monkeypatch):
    pretend(monkeypatch, AMX)
    onednn.fp32_precision = "ieee"
    differentiate(torch.bfloat16)
    onednn.fp32_precision = "bf16"
    assert onednn.matmul.fp32_precision == "bf16"


def test_the_setting_is_put_back_after_an_error(onednn, monkeypatch):
    pretend(monkeypatch, AMX)
    monkeypatch.setattr(products_for_cpu, "_gradients_", lambda *_, **__: 1 / 0)
    before = onednn.matmul.fp32_precision
    with pytest.raises(ZeroDivisionError):
        differentiate(torch.bfloat16)
    assert onednn.matmul.fp32_precision == before


def test_the_setting_is_put_back_after_backwards_in_two_threads(onednn, monkeypatch):
    pretend(monkeypatch, AMX)
    before = onednn.matmul.fp32_precision
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(differentiate, torch.bfloat16) for _ in range(40)]:
            done.result()
    assert onednn.matmul.fp32_precision == before


def test_masks_many_heads_of_one_group_and_float64_take_the_kernel_of_torch(monkeypatch):
    calls = lengths_given_to_products(monkeypatch)
    many, one = torch.randn(150, 1, 64, 8, requires_grad=True), torch.randn(150, 1, 1, 8)
    fused_attention(many, one, one)[0].sum().backward()
    for Sq, Sk, options in ((100, 120, {}), (100, 100, {"window": (3, 0)})):
        q, k = torch.randn(Sq, 1, 2, 8, requires_grad=True), torch.randn(Sk, 1, 2, 8)
        fused_attention(q, k, k, **options)[0].sum().backward()
    q = torch.randn(100, 1, 2, 8, dtype=torch.float64, requires_grad=True)
    fused_attention(q, q, q, backend="aten")[0].sum().backward()
    assert calls == []


# documents of the same length in rows 0 and 1, and in rows 3 to 5; the second of row 2 is as long as the first of 0
PACKED = [[100, 20], [100, 20], [20, 100], [110, 10], [110, 10], [110, 10]]


def test_documents_in_the_same_place_of_successive_rows_are_one_tile(monkeypatch):
    lengths = [*PACKED, [100, 20]]
    bounds = torch.tensor([[(0, n)] * n + [(n, 120)] * m for n, m in lengths], dtype=torch.int32)
    assert list(flash_for_cpu._documents(bounds)) == [
        (slice(0, 2), 0, 100),
        (slice(6, 7), 0, 100),
        (slice(0, 2), 100, 120),
        (slice(6, 7), 100, 120),
        (slice(2, 3), 0, 20),
        (slice(2, 3), 20, 120),
        (slice(3, 6), 0, 110),
        (slice(3, 6), 110, 120),
    ]
    calls = lengths_given_to_products(monkeypatch, flash_for_cpu._FEWEST_QUERIES)
    for num_heads, lengths in ((6, []), (7, [110]), (11, [100, 110])):  # at least 2048 queries in two or three rows
        q = torch.randn(120, 6, num_heads, 8, requires_grad=True)
        fused_attention(q, q, q, packed_seq_params=PackedSeqParams.from_lengths(PACKED))[0].sum().backward()
        assert calls == lengths
        calls.clear()


@pytest.mark.parametrize("Dv", [5, 8, 11])
def test_gradients_over_some_of_the_keys_are_in_the_memory_that_the_compiler_is_told_of(Dv):
    q, k = torch.randn(2, 6, 2, 4, 8)
    v, dout = torch.randn(2, 6, 2, 4, Dv)
    out, lse = fused_attention(q, k, v)
    inputs = (dout, None, q, k, v, None, out, lse, None, 0.5, None, 2**30, 0)
    torch.library.opcheck(torch.ops.megalith.attention_of_part_for_cpu_back.default, inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_short_rows_over_some_of_the_keys_belong_to_attention_over_all(causal, monkeypatch):
    lengths = lengths_given_to_products(monkeypatch)
    q, k, v, other_k, other_v, dout = torch.randn(6, 150, 2, 4, 16)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    other = fused_attention(leaves[0], other_k.double(), other_v.double(), causal=False)
    out, lse = merge_attention(*fused_attention(*leaves, causal=causal), *other)
    want_k, want_v = torch.autograd.grad(out, leaves[1:], dout.double())
    _, dk, dv = attention_gradients(dout, q, k, v, out.detach().float(), lse.detach().float(), causal=causal)
    assert lengths == [150]
    for got, want in ((dk, want_k), (dv, want_v)):
        assert (got.double() - want).norm() <= 2e-6 * want.norm()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("Dv", [16, 24])
@pytest.mark.parametrize("fewest_queries", [1, 1800])
def test_gradients_of_short_documents_match_those_of_each_alone(fewest_queries, Dv, causal, monkeypatch):
    calls = lengths_given_to_products(monkeypatch, fewest_queries)
    q, k, v = (torch.randn(120, 6, *heads, requires_grad=True) for heads in ((6, 16), (6, 16), (6, Dv)))
    out, lse = fused_attention(q, k, v, causal=causal, packed_seq_params=PackedSeqParams.from_lengths(PACKED))
    dout, dlse = torch.randn(out.shape), torch.randn(lse.shape)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    assert calls == ([100, 100, 110] if fewest_queries == 1 else [110])
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    for row, lengths in enumerate(PACKED):
        for part in (slice(0, lengths[0]), slice(lengths[0], 120)):
            alone = formula(*(x[part, row : row + 1] for x in exact), causal=causal)
            given = dout[part, row : row + 1].double(), dlse[row : row + 1, :, part].double()
            torch.autograd.backward(alone, given)
    for a, x in zip(got, exact, strict=True):
        assert (a.double() - x.grad).norm() <= 2e-6 * x.grad.norm()
