"""Properties of every fused operation, tested on its cases: accuracy, purity, compilation, bytes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from megalith.errors import BackendError
from megalith.fusions.core.compiler import why_not_compile
from tests.compiling import builds
from tests.fusions.harness import SAMPLE, Case, Inputs, all_cases, as_tuple, first_of_each_operation
from tests.fusions.observe import operator_calls, saved_bytes
from tests.kernel_reports import in_interpreter, traffic
from tests.sampling import sampled

CASES = all_cases()
FIRST = first_of_each_operation()
OURS = ("triton", "blocked")  # the paths with a Megalith operator
EAGER = (*OURS, "aten", "reference")
CaseAndPath = tuple[Case, str]
COMPILED = [case for case in CASES if "compile" in case.fusion.defaults.get("cpu", ())]  # compiled by default


def of_each_operation(pair: CaseAndPath) -> set[Hashable]:
    return {pair[0].fusion.name}


def of_each_operation_on_each_path(pair: CaseAndPath) -> set[Hashable]:
    return {(pair[0].fusion.name, pair[1])}


def of_each_case_on_each_path(pair: CaseAndPath) -> set[Hashable]:
    return {(str(pair[0]), pair[1])}


def on_paths(
    cases: list[Case],
    paths: Sequence[str] = EAGER,
    sample: Callable[[CaseAndPath], set[Hashable]] = of_each_case_on_each_path,
) -> pytest.MarkDecorator:
    """Parametrizes a test by case and path; `make test` covers everything that ``sample`` names once.

    What holds for blocks must also hold for what is compiled by default: one slow case for each operation.
    """
    pairs = [(case, path) for case in cases for path in paths if path in case.fusion.paths]
    parameters = sampled(by_turns(pairs) if sample is of_each_operation else pairs, sample)
    parameters += [
        pytest.param(case, "compile", id=f"{case}-compile", marks=pytest.mark.slow)
        for case in cases
        if "blocked" in paths and case in FIRST and case in COMPILED
    ]
    return pytest.mark.parametrize(("case", "path"), parameters)


def by_turns(pairs: list[CaseAndPath]) -> list[CaseAndPath]:
    """Rotates the order of paths from operation to operation, so that a sample with one path each covers all paths."""
    found = []
    for turn, (_, group) in enumerate(itertools.groupby(pairs, lambda pair: pair[0].fusion.name)):
        same = list(group)
        paths = list(dict.fromkeys(path for _, path in same))
        first = turn % len(paths)
        found += sorted(same, key=lambda pair: paths.index(pair[1]) != first)
    return found


def small(case: Case, device: str, dtype: torch.dtype | None = None, num_rows: int = 3) -> Inputs:
    """Inputs in ``dtype``, by default float32 if the case accepts it."""
    usual = torch.float32 if torch.float32 in case.dtypes else case.dtypes[0]
    return case.make(num_rows, usual_width(case), dtype or usual, device)


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def matrix() -> list[Any]:
    """Every case on every path in every dtype at every width; `make test` takes a sample.

    It has each case, and each operation on each path in float32 and in 16 bits, in each dtype and at each width of the
    sample.
    """
    parameters = []
    for _, cases in itertools.groupby(CASES, lambda case: case.fusion.name):
        calls = [
            (case, path, dtype, width)
            for case in cases
            for path in EAGER
            if path in case.fusion.paths
            for dtype, width in itertools.product(case.dtypes, case.widths)
            if path not in case.fusion.limits or not case.fusion.limits[path](torch.empty(0, dtype=dtype))
        ]
        parameters += sampled(calls, shown_by)
    return parameters


def shown_by(call: tuple[Case, str, torch.dtype, int]) -> set[Hashable]:
    case, path, dtype, width = call
    return set() if width not in sample_of(case.widths) else {str(case), dtype, width, (path, dtype is torch.float32)}


def sample_of(widths: Sequence[int]) -> Sequence[int]:
    return [width for width in widths if width in SAMPLE] or widths[:3]


def usual_width(case: Case) -> int:
    """A width that is not a power of two, if the case accepts one."""
    return 127 if 127 in case.widths else case.widths[-1]


@pytest.mark.parametrize(("case", "path", "dtype", "width"), matrix())
def test_results_and_gradients_match_float64(case, path, dtype, width, device):
    case.assert_accurate(case.make(3 if path == "triton" else 5, width, dtype, device), path)


@on_paths(CASES, sample=of_each_operation_on_each_path)
def test_no_rows_give_no_rows_and_zero_sums(case, path, device):
    inputs = small(case, device, num_rows=0)
    case.assert_accurate(inputs, path)


@on_paths(CASES, sample=of_each_operation_on_each_path)
def test_strided_inputs_and_expanded_gradients(case, path, device):
    inputs = small(case, device)
    apart = {name: case.leaf(name, x if x is None else strided(x)) for name, x in inputs.items()}
    dy = [case.expanded(g) for g in case.upstream(inputs, path)]
    case.assert_accurate(apart, path, dy)


def strided(x: Tensor) -> Tensor:
    """The same values with padding in between."""
    wide = torch.full([2 * size for size in x.shape], 7, dtype=x.dtype, device=x.device)
    view = wide[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x.detach())


@on_paths(CASES, sample=of_each_operation_on_each_path)
def test_backward_can_run_twice_and_nothing_that_was_given_is_written(case, path, device):
    inputs = small(case, device)
    dy = case.upstream(inputs, path)
    before = [None if x is None else x.detach().clone() for x in (*inputs.values(), *dy)]
    leaves = [x for x in inputs.values() if x is not None and x.requires_grad]
    roots = [y for y in as_tuple(case.compute(**inputs, backend=path)) if y.requires_grad]
    if roots:
        first = torch.autograd.grad(roots, leaves, dy[: len(roots)], retain_graph=True)
        second = torch.autograd.grad(roots, leaves, dy[: len(roots)])
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for given, want in zip((*inputs.values(), *dy), before, strict=True):
        assert given is None or torch.equal(given, want)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in FIRST if "compile" in case.fusion.paths], ids=str)
def test_what_was_compiled_can_run_backward_twice(case, device):
    test_backward_can_run_twice_and_nothing_that_was_given_is_written(case, "compile", device)


@on_paths(CASES, sample=of_each_operation_on_each_path)
def test_two_runs_and_a_recomputed_one_are_equal_bit_for_bit(case, path, device):
    inputs = small(case, device)
    dy = case.upstream(inputs, path)
    want = case.run(inputs, path, dy)
    assert_equal(case.run(inputs, path, dy), want)

    def recomputed(backend: str, **inputs: Tensor | None) -> object:
        return checkpoint(functools.partial(case.compute, backend=backend), **inputs, use_reentrant=False)

    assert_equal(dataclasses.replace(case, compute=recomputed).run(inputs, path, dy), want)


@on_paths(CASES, sample=of_each_operation)
def test_autocast_does_not_reach_inside(case, path, device):
    inputs = small(case, device)
    dy = case.upstream(inputs, path)
    want = case.run(inputs, path, dy)

    def autocast(**arguments: Any) -> object:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return case.compute(**arguments)

    assert_equal(dataclasses.replace(case, compute=autocast).run(inputs, path, dy), want)


@pytest.mark.parametrize("case", [case for case in FIRST if case.derivative], ids=str)
def test_torch_func_sees_through_the_reference(case, device):
    inputs = small(case, device)
    leaves = {name: x.detach() for name, x in inputs.items() if x is not None and x.requires_grad}
    dy = case.upstream(inputs, "reference")
    want = case.run(inputs, "reference", dy)

    def compute(leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
        values = as_tuple(case.compute(**(inputs | leaves), backend="reference"))
        return tuple(y for y in values if y.is_floating_point())

    if not leaves:
        return  # an operation without a gradient
    _, back = torch.func.vjp(compute, leaves)
    (found,) = back(tuple(dy))
    for name in leaves:
        torch.testing.assert_close(found[name], want[f"d{name}"], rtol=1e-5, atol=1e-5, equal_nan=True)


@on_paths(CASES, ("reference",), sample=of_each_operation)
def test_the_reference_is_exact_in_float64(case, path):
    inputs = small(case, "cpu", torch.float64) if case.widths[0] > 4 else case.make(3, 4, torch.float64, "cpu")
    case.assert_accurate(inputs, path)
    names = [name for name, x in inputs.items() if x is not None and x.requires_grad and case.derivative]

    def compute(*leaves: Tensor) -> object:
        values = case.compute(**(inputs | dict(zip(names, leaves, strict=True))), backend=path)
        return tuple(y for y in as_tuple(values) if y.requires_grad)

    assert not names or torch.autograd.gradcheck(compute, [inputs[name] for name in names])


@pytest.mark.parametrize("num_rows", [2, pytest.param(0, marks=pytest.mark.slow)])
@on_paths(CASES, OURS, sample=of_each_operation)
def test_operators_are_registered_as_torch_expects(case, path, num_rows, device):
    inputs = small(case, device, num_rows=num_rows)
    dy = case.upstream(inputs, path)
    calls = operator_calls(lambda: case.run(inputs, path, dy))
    assert calls
    for operator, arguments in calls:
        torch.library.opcheck(operator, tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments))
        if not operator.__name__.startswith("_") and "_back" not in str(operator):
            torch.library.opcheck(operator, arguments)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, from its forward-mode formulas
@pytest.mark.parametrize("case", [case for case in FIRST if case.derivative], ids=str)
def test_forward_mode_is_the_transpose_of_the_gradient_or_refused(case, device):
    inputs = small(case, device)
    leaves = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
    if not leaves:
        return  # an operation without a gradient
    tangents = {name: torch.randn_like(x) for name, x in leaves.items()}

    def forward(path: str | None) -> list[Tensor]:
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(x.detach(), tangents[name]) for name, x in leaves.items()}
            values = as_tuple(case.compute(**(inputs | duals), backend=path))
            found = [forward_ad.unpack_dual(y) for y in values if y.is_floating_point()]
            return [torch.zeros_like(y.primal) if y.tangent is None else y.tangent for y in found]

    dy = case.upstream(inputs)
    found = case.run(inputs, None, dy)
    along = [g.double() * y.double() for g, y in zip(dy, forward(None), strict=True)]
    back = [found[f"d{name}"].double() * tangents[name].double() for name in leaves]
    # each term is a result rounded once, so that the sums differ by a few roundings of a typical term's size
    rounding = max(torch.finfo(g.dtype).eps for g in dy) * sum(terms.square().sum() for terms in along + back) ** 0.5
    sums = (torch.stack([terms.sum() for terms in parts]).sum() for parts in (along, back))
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-4 + rounding.item())
    for path in set(case.fusion.paths) & {"triton", "compile", "blocked"}:
        with pytest.raises(BackendError, match=r"forward-mode AD; use .* instead"):
            forward(path)


@on_paths(FIRST, OURS)
def test_a_second_derivative_raises_instead_of_being_wrong(case, path, device):
    inputs = small(case, device)
    roots = [y for y in as_tuple(case.compute(**inputs, backend=path)) if y.requires_grad]
    leaf = next((x for x in inputs.values() if x is not None and x.requires_grad), None)
    if leaf is None:
        return  # an operation without a gradient
    (dx,) = torch.autograd.grad(sum(y.square().sum() for y in roots), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="_back"):
        dx.sum().backward()


def through(compiled: Callable[..., object], case: Case) -> Case:
    """Runs the case through ``compiled``, whose path is already chosen."""
    return dataclasses.replace(case, compute=lambda backend, **inputs: compiled(**inputs))


@on_paths(CASES, sample=of_each_operation)
def test_torch_compile_finds_one_graph(case, path, device):
    torch.compiler.reset()
    compute = functools.partial(case.compute, backend=path)
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    through(compiled, case).assert_accurate(small(case, device), path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case}-{dtype}")
        for case, dtype in itertools.product(FIRST, [torch.float32, torch.bfloat16])
        if "compile" in case.fusion.paths and dtype in case.dtypes
    ],
)
def test_inductor_keeps_the_accuracy(case, dtype, device):
    torch.compiler.reset()
    case.assert_accurate(small(case, device, dtype), "compile")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_what_compiles_by_default_keeps_the_accuracy_in_columns_that_no_vector_divides(case, dtype, device):
    widths = [width for width in case.widths if 64 < width < 4096 and width % 16] or case.widths
    case.assert_accurate(case.make(5, widths[-1], dtype, device), "compile")


@pytest.mark.skipif(bool(why_not_compile()), reason=f"{why_not_compile()}")
@pytest.mark.parametrize(("case", "path"), sampled([(case, "compile") for case in COMPILED], of_each_operation))
def test_what_compiles_by_default_runs_the_same_code_for_more_rows(case, path):
    case.assert_accurate(small(case, "cpu", num_rows=5), path)
    with builds(0):
        case.assert_accurate(small(case, "cpu", num_rows=7), path)


@in_interpreter
@on_paths([case for case in CASES if case.cost], ("triton",), sample=of_each_operation)
def test_kernels_move_the_bytes_of_the_floor_and_touch_each_once(case, path):
    inputs = case.make(4, 1536 if 1536 in case.widths else case.widths[-1], torch.bfloat16, "cpu")
    floor = case.cost(**inputs)
    dy = case.upstream(inputs, path)
    shared = [x for name in case.shared if (x := inputs.get(name)) is not None]
    values = []
    forward = traffic(lambda: values.extend(as_tuple(case.compute(**inputs, backend=path))), shared)
    roots = [y for y in values if y.requires_grad]
    backward = traffic(lambda: torch.autograd.backward(roots, dy[: len(roots)]), shared)
    assert forward.bytes <= 1.05 * floor.forward
    assert backward.bytes <= 1.05 * floor.backward
    assert forward.visits <= floor.forward_visits
    assert backward.visits <= floor.backward_visits


@on_paths([case for case in CASES if case.cost], OURS, sample=of_each_operation)
def test_what_is_kept_for_backward_is_what_the_table_says(case, path, device):
    inputs = case.make(4, 1536 if 1536 in case.widths else case.widths[-1], torch.bfloat16, device)
    assert saved_bytes(lambda: case.compute(**inputs, backend=path)) == case.cost(**inputs).saved


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_every_operation_has_a_default_on_every_device_that_it_can_take(case):
    defaults = case.fusion.defaults
    assert {"cpu", "cuda"} <= defaults.keys()
    assert {path for ranked in defaults.values() for path in ranked} <= case.fusion.paths.keys()
