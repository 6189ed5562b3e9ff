"""The choice of path: argument, then ``use``, then the table; a requested path that cannot run raises."""

import asyncio
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

from megalith.errors import BackendError
from megalith.fusions import use, weighted_squared_relu_impl
from megalith.fusions.core import dispatch as backend
from megalith.fusions.core.blocks import LARGEST_WHOLE
from megalith.fusions.core.dispatch import Fusion
from megalith.fusions.core.preference import prefer

# here, a path's function is its name
KERNELS = {"cuda": ("triton",), "cpu": ("aten",)}
LOOPS = {"cuda": ("triton",), "cpu": ("compile", "blocked")}
PATHS = {name: name for name in ("triton", "compile", "blocked", "reference")}
FUSION = Fusion("weighted_squared_relu", PATHS, defaults=LOOPS)


def tensor(device: str = "cpu", dtype: torch.dtype = torch.float32, numel: int = LARGEST_WHOLE + 1) -> SimpleNamespace:
    """Everything that the choice depends on, so that GPU rows can be tested without a GPU."""
    return SimpleNamespace(device=torch.device(device), dtype=dtype, numel=lambda: numel)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(backend, "triton_interprets", lambda: True)
    monkeypatch.setattr(backend, "why_not_compile", lambda: None)


def test_argument_wins_over_use_and_use_over_the_table():
    with use("blocked"):
        assert FUSION.path(tensor(), "reference") == "reference"
        with use("reference"):
            assert FUSION.path(tensor("cuda"), None) == "reference"
        assert FUSION.path(tensor(), None) == "blocked"
    assert FUSION.path(tensor(), None) == "compile"


def test_table_gives_kernels_to_gpus_and_the_reference_to_float64_to_unknown_devices_and_to_one_block():
    assert FUSION.path(tensor("cuda"), None) == "triton"
    assert FUSION.path(tensor("cuda", torch.float64), None) == "reference"
    assert FUSION.path(tensor("mps"), None) == "reference"
    assert FUSION.path(tensor(numel=LARGEST_WHOLE), None) == "reference"


def test_one_block_takes_the_path_that_an_operation_names_for_it():
    paths = {name: name for name in ("compile", "blocked", "aten", "reference")}
    operation = Fusion("rms_norm", paths, whole="aten", defaults=LOOPS)
    assert operation.path(tensor(numel=LARGEST_WHOLE), None) == "aten"
    assert operation.path(tensor(), None) == "compile"
    assert operation.path(tensor(dtype=torch.float64, numel=1), None) == "reference"


def test_use_is_a_preference_and_the_argument_a_demand():
    without_blocks = Fusion("attention", {name: name for name in ("triton", "aten", "reference")}, defaults=KERNELS)
    with use("blocked"):
        assert without_blocks.path(tensor(), None) == "aten"
        with pytest.raises(BackendError, match="'blocked': it has no such path"):
            without_blocks.path(tensor(), "blocked")
    with use("triton"):
        assert FUSION.path(tensor(dtype=torch.float64), None) == "reference"
        with use(None):
            assert FUSION.path(tensor(), None) == "compile"


def test_use_is_of_the_thread_that_says_it():
    found = []
    with use("blocked"):
        other = threading.Thread(target=lambda: found.append(FUSION.path(tensor(), None)))
        other.start()
        other.join()
        assert FUSION.path(tensor(), None) == "blocked"
    assert found == ["compile"]


def test_use_is_of_the_task_that_says_it():
    async def path(preferred: str | None) -> str:
        with use(preferred):
            await asyncio.sleep(0)  # other tasks run in the meantime
            return FUSION.path(tensor(), None)

    async def both() -> list[str]:
        return await asyncio.gather(path("blocked"), path("reference"), path(None))

    assert asyncio.run(both()) == ["blocked", "reference", "compile"]


def test_inside_of_torch_compile_compile_is_the_formulas_of_the_reference(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert FUSION.path(tensor(), "compile") == "reference"
    with use("compile"):
        assert FUSION.path(tensor(), None) == "reference"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, from its forward-mode formulas
def test_forward_mode_takes_the_reference_and_refuses_what_has_no_such_derivative():
    with forward_ad.dual_level():
        assert FUSION.path(tensor("cuda"), None) == "reference"
        for path in ("triton", "compile", "blocked"):
            with pytest.raises(BackendError, match=r"no derivative for forward-mode AD; use reference instead$"):
                FUSION.path(tensor(), path)


def test_beyond_the_limits_of_kernels_the_default_is_the_reference_and_a_line_says_so(caplog):
    limits = {"triton": lambda x: "wider" if x.numel() > 9 else None}
    fusion = Fusion("attention", FUSION.paths, limits, defaults=KERNELS)
    assert fusion.path(tensor("cuda", numel=9), None) == "triton"
    for _ in range(2):
        assert fusion.path(tensor("cuda", numel=10), None) == "reference"
    assert caplog.messages == ["attention falls back to its reference in plain torch: wider"]
    with use("triton"):
        assert fusion.path(tensor("cuda", numel=10), None) == "reference"
    with pytest.raises(BackendError, match="backend='triton': wider"):
        fusion.path(tensor("cuda", numel=10), "triton")


def test_use_ends_with_an_error_and_refuses_an_unknown_name():
    with pytest.raises(BackendError, match=r"must be one of triton, compile, .*; got 'cuda'"), use("cuda"):
        pass
    with pytest.raises(ZeroDivisionError), use("triton"):
        _ = 1 / 0
    assert FUSION.path(tensor(), None) == "compile"


def test_prefer_lifts_what_size_and_float64_choose_and_tells_what_was_taken():
    small, wide = tensor(numel=1), tensor(dtype=torch.float64)
    with prefer() as taken:
        assert FUSION.path(small, None) == "compile"
        assert FUSION.path(wide, None) == "compile"
    assert taken == {("weighted_squared_relu", "compile")}
    with prefer("triton", "blocked") as taken:
        assert FUSION.path(small, None) == "triton"
        assert FUSION.path(wide, None) == "blocked"  # kernels do not accept float64
        assert FUSION.path(small, "reference") == "reference"
        with use("compile"):
            assert FUSION.path(small, None) == "compile"
    assert {path for _, path in taken} == {"triton", "blocked"}
    assert FUSION.path(small, None) == "reference"


def test_preferences_may_end_in_the_order_they_began_in():
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(prefer("triton"))
        taken = second.enter_context(prefer("blocked"))
        first.close()
        assert FUSION.path(tensor(numel=1), None) == "blocked"
    assert FUSION.path(tensor(numel=1), None) == "reference"
    assert taken == {("weighted_squared_relu", "blocked")}


def test_a_refusal_builds_nothing(monkeypatch):
    def refuse():
        raise AssertionError("an error message is not worth a build")

    monkeypatch.setattr(backend, "why_not_compile", refuse)
    monkeypatch.setattr(backend, "why_no_compiler", lambda: None)
    with pytest.raises(BackendError, match="use compile or blocked or reference instead"):
        FUSION.path(tensor(dtype=torch.float64), "triton")


@pytest.mark.parametrize(
    ("choice", "x", "absent", "message"),
    [
        ("aten", tensor(), None, r"'aten': it has no such path, only triton, compile, blocked, reference"),
        ("triton", tensor(dtype=torch.float64), None, r"kernels compute in float32.*use compile or blocked"),
        ("triton", tensor(), "triton_interprets", r"on cpu, and TRITON_INTERPRET=1 was not set"),
        ("triton", tensor("cuda"), "has_triton", r"not installed \(pip install 'megalith\[triton\]'\)"),
        (None, tensor("cuda"), "has_triton", r"cannot run with backend='triton'"),  # the default has no fallback
        ("compile", tensor(), "why_not_compile", r"'compile': no compiler; use triton or blocked"),
    ],
)
def test_a_path_that_cannot_run_is_refused_with_the_reason(monkeypatch, choice, x, absent, message):
    if absent:
        monkeypatch.setattr(backend, absent, lambda: "no compiler" if absent == "why_not_compile" else None)
    with pytest.raises(BackendError, match=message):
        FUSION.path(x, choice)


def test_a_path_may_have_a_limit_of_its_own():
    fusion = Fusion(
        "layer_norm", FUSION.paths, limits={"blocked": lambda x: f"not {x.dtype}" if x.numel() > 9 else None}
    )
    assert fusion.path(tensor(numel=9), "blocked") == "blocked"
    with pytest.raises(BackendError, match=r"backend='blocked': not torch\.float32; use triton"):
        fusion.path(tensor(numel=10), "blocked")


def test_a_compiled_function_follows_use(device):
    graphs = []
    compute = torch.compile(weighted_squared_relu_impl, fullgraph=True, backend=lambda g, _: graphs.append(g.code) or g)
    for path in ("reference", "triton"):
        with use(path):
            compute(torch.ones(2, 3, device=device), torch.ones(2, 1, device=device))
    assert ["megalith.weighted_squared_relu" in code for code in graphs] == [False, True]
