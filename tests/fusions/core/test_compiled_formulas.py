"""Compiled formulas: the code that runs is that for the arguments, from this process, an earlier one, or new."""

import platform
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megalith
from megalith.fusions.core import compiled_formulas, kept_code
from megalith.fusions.core.compiled_formulas import CompiledFormula
from megalith.fusions.core.compiler import why_not_compile
from megalith.torch_compat.compiled_ahead import can_compile_ahead, compile_ahead
from megalith.torch_compat.compiler import watch_compiler
from tests.compiling import builds

pytestmark = [
    pytest.mark.skipif(bool(why_not_compile()), reason=f"{why_not_compile()}"),
    pytest.mark.skipif(not can_compile_ahead(), reason="torch 2.11 compiles at the call, unless it is told otherwise"),
    pytest.mark.usefixtures("new_folder"),
]


def scaled(x: Tensor, y: Tensor | None, options: tuple[float, str]) -> Tensor:
    scale, how = options
    z = x * scale if y is None else x * scale - y
    return z.sum(dim=-1, keepdim=True) if how == "sum" else z


def check(formula: CompiledFormula, *arguments: object) -> None:
    torch.testing.assert_close(formula(*arguments), scaled(*arguments))


def test_other_options_dtypes_columns_and_strides_get_code_of_their_own():
    formula, x = CompiledFormula(scaled), torch.randn(6, 8)
    for _ in range(2):
        check(formula, x, None, (2.0, ""))
        check(formula, x, x + 1.0, (2.0, ""))
        check(formula, x, x + 1.0, (3.0, ""))
        check(formula, x, x + 1.0, (3.0, "sum"))
        check(formula, x.double(), x.double() + 1.0, (3.0, "sum"))
        check(formula, x[:, :5], x[:, 3:], (3.0, "sum"))
        check(formula, x[:, ::2], x[:, 1::2], (3.0, "sum"))
        check(formula, x.t(), x.t() + 1.0, (3.0, "sum"))


def test_sizes_that_were_equal_when_code_was_compiled_may_differ_later():
    formula = CompiledFormula(scaled)
    for sizes in ((8, 8, 8), (4, 6, 8), (1, 6, 8), (6, 1, 8), (2, 2, 2)):
        x = torch.randn(sizes)
        check(formula, x, x + 1.0, (2.0, ""))
        check(formula, x, x[:1] + 1.0, (2.0, ""))
        check(formula, x.transpose(0, 1), x.transpose(0, 1) + 1.0, (2.0, ""))


def test_a_tensor_that_was_given_twice_may_be_two_later():
    formula, x = CompiledFormula(scaled), torch.randn(6, 8)
    check(formula, x, x, (2.0, ""))
    check(formula, x, x + 1.0, (2.0, ""))


def closed_over(by: Tensor, also: Tensor, options: tuple[float, str]):
    def formula(x: Tensor) -> Tensor:
        return scaled(x * by, also, options)

    return formula


def test_what_a_closure_holds_is_part_of_the_arguments():
    compute = CompiledFormula(lambda inner, x: inner(x))
    x, a, b = torch.randn(6, 8), torch.randn(8), torch.randn(8).requires_grad_()
    for inner in (closed_over(a, a, (2.0, "")), closed_over(a, b, (2.0, "")), closed_over(b, a, (3.0, "sum"))):
        torch.testing.assert_close(compute(inner, x), inner(x))


def test_no_number_of_rows_is_compiled_again_and_no_gradient_is_recorded():
    formula, x = CompiledFormula(scaled), torch.randn(50, 8, requires_grad=True)
    with builds(1):
        for num_rows in (7, 8, 9, 50):
            assert not formula(x[:num_rows], None, (2.0, "")).requires_grad


def test_rows_that_are_columns_of_another_tensor_may_be_any_number():
    formula = CompiledFormula(scaled)
    with builds(1):
        for num_rows in (5, 7):
            check(formula, torch.randn(8, num_rows).t(), None, (2.0, ""))


def test_vectors_are_numbers_of_each_row_or_shared():
    for shares, num_builds in ((False, 1), (True, 2)):
        formula = CompiledFormula(scaled, shares_vectors=shares)
        with builds(num_builds):
            for length in (6, 9):
                check(formula, torch.randn(length), None, (2.0, ""))


def test_a_later_run_loads_the_code_and_gets_the_same_bits():
    x = torch.randn(6, 8).bfloat16()
    with builds(1):
        first = CompiledFormula(scaled)(x, x + 1.0, (1.7, ""))
    with builds(0):
        later = CompiledFormula(scaled)
        assert torch.equal(later(x, x + 1.0, (1.7, "")), first)
        check(later, torch.randn(9, 8).bfloat16(), torch.ones(8).bfloat16().expand(9, 8).contiguous(), (1.7, ""))
    with builds(1):
        check(CompiledFormula(scaled), x, x + 1.0, (1.8, ""))


def test_code_of_other_sources_another_torch_python_or_cpu_is_not_found(package, monkeypatch):
    fingerprint = kept_code._fingerprint
    found = [fingerprint(package)]
    assert fingerprint(package) == found[0]
    (package / "numerics" / "philox.py").write_text("a = 2")
    found.append(fingerprint(package))
    for where, name, value in (
        (megalith, "__version__", "0.0.1"),
        (torch, "__version__", "2.99"),
        (platform, "python_version", lambda: "3.99"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX1024"),
    ):
        monkeypatch.setattr(where, name, value)
        found.append(fingerprint(package))
    assert len({*found}) == 6


def test_code_is_not_kept_if_the_sources_have_changed_or_are_not_there(package, new_folder, monkeypatch):
    x = torch.randn(6, 8)
    CompiledFormula(scaled)(x, None, (2.0, ""))
    assert len([*new_folder.iterdir()]) == 1
    (package / "fusions" / "formula.py").write_text("a = 2")
    CompiledFormula(scaled)(x, None, (3.0, ""))
    assert len([*new_folder.iterdir()]) == 1
    assert kept_code._fingerprint(package / "fusions") is None
    monkeypatch.undo()
    monkeypatch.setattr(kept_code, "_SOURCES", None)
    assert kept_code._folder() is None
    check(CompiledFormula(scaled), x, None, (4.0, ""))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Sources of their own."""
    package = tmp_path / "package"
    for part in ("fusions", "numerics", "torch_compat"):
        (package / part).mkdir(parents=True)
    (package / "fusions" / "formula.py").write_text("a = 1")
    (package / "numerics" / "philox.py").write_text("a = 1")
    monkeypatch.setattr(kept_code, "_PACKAGE", package)
    monkeypatch.setattr(kept_code, "_SOURCES", kept_code._fingerprint(package))
    return package


def twice(x: Tensor) -> Tensor:
    return 2.0 * x


def thrice(x: Tensor) -> Tensor:
    return 3.0 * x


def test_code_of_another_function_with_the_same_arguments_is_not_found():
    for function, want in ((twice, 2), (thrice, 3), (twice, 2)):
        assert CompiledFormula(function)(torch.ones(6, 8))[0, 0] == want


def applied(inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return inner(x)


def test_functions_of_the_same_line_or_constants_are_told_apart_and_defaults_refused():
    x = torch.full((6, 8), 5.0)
    add, times, add_more = (lambda x: x + 3.0), (lambda x: x * 3.0), (lambda x: x + 4.0)
    for _ in range(2):  # a new process
        compute = CompiledFormula(applied)
        assert [compute(inner, x)[0, 0].item() for inner in (add, times, add_more)] == [8, 15, 9]
        with pytest.raises(TypeError, match="no default values"):
            compute(lambda x, k=2.0: x * k, x)


def test_a_formula_has_as_many_files_as_variants(new_folder):
    x = torch.randn(6, 8)
    operands = [x + 1.0, x[:, :1].expand(6, 8), torch.randn(6, 16)[:, ::2], torch.randn(12, 8)[::2]]
    for builds_any in (True, False, False):
        formula = CompiledFormula(scaled)
        with nullcontext() if builds_any else builds(0):
            for y in operands:
                check(formula, x, y, (2.0, ""))
        assert len([*new_folder.iterdir()]) == 4


def quotient(x: Tensor, divisor: float) -> Tensor:
    return x / divisor


def test_zeros_of_both_signs_and_negated_views_are_told_apart():
    x, z = torch.ones(6, 8), torch.randn(6, 8, dtype=torch.complex64)
    divide, scale = CompiledFormula(quotient), CompiledFormula(scaled)
    assert [divide(x, zero)[0, 0].item() for zero in (0.0, -0.0)] == [torch.inf, -torch.inf]
    for part in (z.imag, z.conj().imag):
        check(scale, part, None, (2.0, ""))
    assert z.conj().imag.is_neg()


def test_a_tensor_on_another_device_does_not_get_the_code_of_the_cpu():
    formula, arguments = CompiledFormula(scaled), (torch.randn(6, 8), None, (2.0, ""))
    formula(*arguments)
    on_meta = torch.randn(6, 8, device="meta"), None, (2.0, "")
    assert formula._code_for(arguments) != formula._through_torch_compile
    assert formula._code_for(on_meta) == formula._through_torch_compile
    with pytest.raises(ValueError, match="Unknown device type meta"):  # it has no memory for any code
        formula(*on_meta)


def zero_factors(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if "mul" in str(node.target):
            node.args = (node.args[0], 0.0)


def test_what_a_users_pass_has_changed_is_not_kept(new_folder):
    x = torch.ones(6, 8)
    with torch._inductor.config.patch(post_grad_custom_post_pass=zero_factors, fx_graph_cache=False):
        assert not CompiledFormula(scaled)(x, None, (2.0, "")).any()
    assert not [*new_folder.iterdir()]
    check(CompiledFormula(scaled), x, None, (2.0, ""))


def test_other_settings_of_the_compiler_have_files_of_their_own(new_folder):
    x = torch.ones(6, 8)
    for settings in ({}, {"cpp.simdlen": 256}, {}):
        with torch._inductor.config.patch(settings):
            check(CompiledFormula(scaled), x, None, (2.0, ""))
    assert len([*new_folder.iterdir()]) == 2


def test_without_torchs_cache_nothing_is_kept(new_folder):
    with torch._inductor.config.patch(fx_graph_cache=False):
        check(CompiledFormula(scaled), torch.ones(6, 8), None, (2.0, ""))
    assert not [*new_folder.iterdir()]
    with torch._inductor.config.patch(force_disable_caches=True):
        assert not can_compile_ahead()


def test_a_torch_that_does_not_compile_ahead_says_so(monkeypatch):
    monkeypatch.delattr(torch.compiler, "load_compiled_function")
    assert not can_compile_ahead()


def test_a_stance_is_followed():
    formula, x = CompiledFormula(scaled), torch.ones(6, 8)
    check(formula, x, None, (2.0, ""))
    with torch.compiler.set_stance("force_eager"), builds(0):
        check(formula, x, None, (2.0, ""))
        check(formula, x, None, (3.0, ""))
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        formula(x, None, (4.0, ""))


def test_a_file_that_cannot_be_loaded_is_replaced(new_folder):
    x = torch.randn(6, 8)
    CompiledFormula(scaled)(x, None, (2.0, ""))
    (path,) = new_folder.iterdir()
    path.write_bytes(path.read_bytes()[:1000])
    with builds(1):
        check(CompiledFormula(scaled), x, None, (2.0, ""))
    with builds(0):
        check(CompiledFormula(scaled), x, None, (2.0, ""))
    assert [*new_folder.iterdir()] == [path]


def test_without_a_folder_to_write_to_each_process_compiles(tmp_path, monkeypatch):
    (tmp_path / "file").touch()

    def refused() -> Path:
        raise PermissionError("not yours")

    for folder in (lambda: tmp_path / "file" / "folder", refused):
        monkeypatch.setattr(kept_code, "_folder", folder)
        with builds(1):
            check(CompiledFormula(scaled), torch.randn(6, 8), None, (2.0, ""))


def test_files_of_editors_are_no_sources(package):
    before = kept_code._fingerprint(package)
    (package / "fusions" / ".#formula.py").symlink_to("user@host.1")  # Emacs has it open
    assert kept_code._fingerprint(package) == before
    (package / "fusions" / "gone.py").symlink_to("nowhere")
    assert kept_code._fingerprint(package) is None


def refuses_to_be_one_graph(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x + 1.0


def test_what_cannot_be_built_ahead_is_tried_once(monkeypatch):
    tries = []

    def compile_and_count(*given: object) -> object:
        tries.append(given)
        return compile_ahead(*given)

    monkeypatch.setattr(compiled_formulas, "compile_ahead", compile_and_count)
    formula = CompiledFormula(refuses_to_be_one_graph)
    for num_rows in (6, 7, 8):
        assert torch.equal(formula(torch.zeros(num_rows, 8)), torch.ones(num_rows, 8))
    assert len(tries) == 1


def test_a_torch_that_cannot_compile_ahead_compiles_at_the_call(monkeypatch):
    monkeypatch.setattr(compiled_formulas, "can_compile_ahead", lambda: False)
    formula = CompiledFormula(scaled)
    with builds(2):
        for num_rows in (6, 9):
            x = torch.randn(num_rows, 8)
            check(formula, x, None, (2.0, ""))
            check(formula, x, x[:, :1], (2.0, ""))


def test_a_formula_that_raises_raises_its_own_error():
    def refuses(x: Tensor) -> Tensor:
        raise ArithmeticError("not these")

    with pytest.raises(ArithmeticError, match="not these"):
        CompiledFormula(refuses)(torch.randn(6, 8))


def test_many_lengths_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(compiled_formulas, "_MOST_SIGNATURES", 3)
    formula = CompiledFormula(scaled)
    with builds(1):
        for num_rows in range(2, 9):
            check(formula, torch.randn(num_rows, 8), None, (2.0, ""))
    assert len(formula._by_signature) <= 3


@pytest.mark.parametrize("is_watched", [False, True])
def test_the_wait_is_logged_once_if_something_is_built_and_nobody_watches(is_watched, monkeypatch, caplog):
    compiled_formulas._log_wait.cache_clear()
    x = torch.randn(6, 8)
    with watch_compiler(lambda: None, lambda: None) if is_watched else nullcontext():
        for scale in (2.0, 3.0):
            CompiledFormula(scaled)(x, None, (scale, ""))
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert ["compiling fused operations" in line for line in told] == [True] * (not is_watched)
    compiled_formulas._log_wait.cache_clear()
    caplog.clear()
    CompiledFormula(scaled)(x, None, (2.0, ""))
    assert not caplog.records


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("num_threads", [(1, 2), (2, 1)])
def test_another_number_of_threads_runs_the_same_code(num_threads):
    x = torch.randn(64, 4096)
    results = []
    for number, num_builds in zip(num_threads, (1, 0), strict=True):
        torch.set_num_threads(number)
        with builds(num_builds):
            results.append(CompiledFormula(scaled)(x, None, (2.0, "sum")))
    assert torch.equal(*results)


@pytest.fixture
def default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


def one_more(x: Tensor) -> Tensor:
    return x + torch.ones(())


def product(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@pytest.mark.usefixtures("default_dtype")
def test_the_default_dtype_and_autocast_are_part_of_the_arguments():
    compute, multiply = CompiledFormula(one_more), CompiledFormula(product)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        assert compute(torch.ones(3, 4, dtype=torch.int32)).dtype == dtype
    for enabled in (False, True, False):
        with torch.autocast("cpu", enabled=enabled):
            found = multiply(torch.ones(3, 4), torch.ones(4, 4))
        assert found.dtype == (torch.bfloat16 if enabled else torch.float32)
