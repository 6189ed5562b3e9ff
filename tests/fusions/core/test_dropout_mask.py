"""dropout_mask: the same mask in torch and in Triton, whatever the block, shard or device."""

import shutil

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith import fusions
from megalith.errors import ShapeError
from megalith.fusions.core.dropout_mask import keep, mask_operands
from megalith.fusions.core.kernels.philox import dropout_factor
from megalith.numerics.dropout import DropoutKey, keep_mask, threshold
from megalith.optional import triton_interprets
from tests.kernel_reports import TARGETS, Launch, Resources, compile_for, without_interpreter

TOKENS = torch.tensor([0, 6, 2**32 - 1, 2**40 + 6, 2**62 + 5])
KEY = DropoutKey(seed=1234, step=7, tokens=TOKENS, site=5)


@triton.jit
def factor_kernel(key_ptr, tokens_ptr, y_ptr, site, first_quad, F, T: tl.constexpr, S: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tl.load(tokens_ptr + row)
    factor = dropout_factor(tl.load(key_ptr), token, first_quad + tile * (B // 4), site, T, S, B)
    col = tile * B + tl.arange(0, B)
    tl.store(y_ptr + row * F + col, factor, mask=col < F)


def factors(key: DropoutKey, p: float, num_features: int, feature_offset: int, block: int, device: str) -> Tensor:
    x = torch.empty(len(key.tokens), num_features, device=device)
    packed, tokens, site = mask_operands(DropoutKey(key.seed, key.step, key.tokens.to(device), key.site), x)
    factor_kernel[(len(x), triton.cdiv(num_features, block))](
        packed, tokens, x, site, feature_offset // 4, num_features, T=threshold(p), S=1 / (1 - p), B=block
    )
    return x.cpu()


@pytest.mark.parametrize("block", [4, 16, 64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_kernels_and_torch_drop_the_same_elements_over_block_sizes(p, block, device):
    want = keep_mask(KEY, p, 37) * torch.tensor(1 / (1 - p))
    assert torch.equal(factors(KEY, p, 37, 0, block, device), want)


def test_a_shard_of_features_or_of_tokens_drops_what_the_whole_does(device):
    want = keep_mask(KEY, 0.5, 64) * 2.0
    assert torch.equal(factors(KEY, 0.5, 20, 44, 16, device), want[:, 44:])
    shard = DropoutKey(KEY.seed, KEY.step, TOKENS[3:], KEY.site)
    assert torch.equal(factors(shard, 0.5, 64, 0, 16, device), want[3:])


@pytest.mark.parametrize("seed", range(8))  # both signs of the packed key
def test_the_packed_key_holds_both_words_of_the_documented_one(seed, device):
    key = DropoutKey(seed, 7, TOKENS.to(device), 5)
    packed, tokens, site = mask_operands(key, torch.empty(5, 9, device=device))
    assert torch.equal(keep(packed, tokens, site, 0.3, 5, 9, 3), keep_mask(key, 0.3, 9, 3))


def test_a_drawn_key_repeats_with_the_generator_and_counts_rows_as_tokens(device):
    x = torch.empty(3, 4, 8, device=device)
    torch.manual_seed(3)
    first, tokens, site = mask_operands(None, x)
    second, _, _ = mask_operands(None, x)
    torch.manual_seed(3)
    assert mask_operands(None, x)[0] == first != second
    assert (tokens, site, first.shape, first.dtype) == (None, 0, (), torch.int64)
    rows = torch.arange(12, device=device)
    assert torch.equal(keep(first, None, 0, 0.5, 12, 8, 0), keep(first, rows, 0, 0.5, 12, 8, 0))


def test_compiled_code_makes_the_same_key_without_compiling_each_step_anew():
    torch.compiler.reset()
    compiled = torch.compile(lambda key, x: mask_operands(key, x)[0], fullgraph=True, backend="aot_eager")
    x = torch.empty(5, 8)
    keys = [DropoutKey(1234, step, TOKENS) for step in range(4)]
    got = [compiled(key, x) for key in keys[:2]]  # the second call makes the step dynamic
    with torch.compiler.set_stance("fail_on_recompile"):
        got += [compiled(key, x) for key in keys[2:]]
    assert torch.stack(got).tolist() == [mask_operands(key, x)[0].item() for key in keys]


@pytest.mark.parametrize("tokens", [TOKENS[:3], TOKENS[:, None], torch.empty(5, dtype=torch.int64, device="meta")])
def test_a_key_of_other_rows_is_refused(tokens):
    with pytest.raises(
        ShapeError, match=r"one token id for each row of x, \[5\] on cpu; got \[.*pass .* to DropoutKey"
    ):
        mask_operands(DropoutKey(1, 2, tokens), torch.empty(5, 8))


def compiled_mask(target: str) -> Resources:
    given = {"key_ptr": TOKENS, "tokens_ptr": TOKENS, "y_ptr": torch.empty(1), "site": 5, "first_quad": 0, "F": 4096}
    return compile_for(Launch(factor_kernel, given | {"T": threshold(0.1), "S": 1 / 0.9, "B": 1024}), TARGETS[target])


@pytest.mark.slow
@pytest.mark.skipif(not triton_interprets(), reason="compiles for a GPU that is not there")
def test_the_mask_stays_in_registers():
    used = without_interpreter(compiled_mask, "sm_90")
    assert (used.spilled, used.shared) == (0, 0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
def test_inside_of_torch_compile_each_step_drops_what_it_drops_outside():
    def dropped(x: torch.Tensor, tokens: torch.Tensor, step: int) -> torch.Tensor:
        return fusions.bias_dropout_add_fused_train(
            (x, None), torch.zeros_like(x), 0.5, key=DropoutKey(7, step, tokens)
        )

    x, tokens, through = torch.ones(16, 8, 32), torch.arange(128).view(16, 8), torch.compile(dropped)
    for step in range(6):
        assert torch.equal(through(x, tokens, step), dropped(x, tokens, step)), step
