"""Whether torch.compile works here is tested by compiling, and every reason why not is one clause."""

from contextlib import ExitStack

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalith import fusions
from megalith.fusions.core import compiler
from megalith.fusions.core import dispatch as backend
from megalith.fusions.core.blocks import LARGEST_WHOLE
from megalith.fusions.core.compiler import why_not_compile
from megalith.fusions.core.dispatch import Fusion
from megalith.fusions.core.preference import ranking, without_compiling


@pytest.fixture(autouse=True)
def asked_anew():
    why_not_compile.cache_clear()
    yield
    why_not_compile.cache_clear()


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_not_compile() == "torch.compile finds no C++ compiler (install no-such-compiler, or set CXX)"


def test_torch_can_be_told_to_compile_nothing(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert "TORCH_COMPILE_DISABLE=1" in why_not_compile()


def test_a_compiler_that_cannot_build_is_found_out_once(monkeypatch):
    tries = []

    def refuse(function):
        tries.append(function)
        raise RuntimeError("Python.h: No such file or directory\nlong output")

    monkeypatch.setattr(compiler, "CompiledFormula", refuse)
    monkeypatch.setattr(compiler.shutil, "which", lambda _: "/usr/bin/g++")
    assert (
        why_not_compile()
        == why_not_compile()
        == ("torch.compile cannot build here (Python.h: No such file or directory)")
    )
    assert len(tries) == 2  # with this CPU's vector instructions, then with those that torch finds


def test_a_compiler_that_does_not_know_the_instructions_of_this_cpu_builds_with_those_that_torch_finds(monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda _: "/usr/bin/g++")
    cpp, seen = torch._inductor.config.cpp, []

    def knows_old_instructions(function):
        seen.append(cpp.vec_isa_ok)
        if cpp.vec_isa_ok:
            raise RuntimeError("g++: error: unrecognized command-line option '-mamx-fp16'")
        return function

    monkeypatch.setattr(compiler, "CompiledFormula", knows_old_instructions)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": None}):
        assert why_not_compile() is None
    assert seen == [True, None]


@pytest.mark.parametrize("given", [None, False])
def test_what_the_loop_has_shown_is_not_asked_again_unless_a_user_said_so(given, monkeypatch):
    monkeypatch.setattr(compiler, "CompiledFormula", lambda function: function)
    monkeypatch.setattr(compiler.shutil, "which", lambda _: "/usr/bin/g++")
    with torch._inductor.config.patch({"cpp.vec_isa_ok": given}):
        assert why_not_compile() is None
        assert torch._inductor.config.cpp.vec_isa_ok is (True if given is None else given)


def test_without_it_the_default_is_the_next_of_the_table(monkeypatch):
    x = torch.empty(LARGEST_WHOLE + 1)
    paths = {path: path for path in ("compile", "blocked", "reference")}
    fusion = Fusion("glu", paths, defaults={"cpu": ("compile", "blocked")})
    for reason, want in ((None, "compile"), ("there is none", "blocked")):
        monkeypatch.setattr(backend, "why_not_compile", lambda reason=reason: reason)
        assert fusion.default(x) == want


def test_inside_of_without_compiling_the_default_is_the_next_of_the_table_and_nothing_is_built(monkeypatch):
    def refuse():
        raise AssertionError("asking builds a loop")

    monkeypatch.setattr(backend, "why_not_compile", refuse)
    x = torch.empty(LARGEST_WHOLE + 1)
    paths = {path: path for path in ("compile", "blocked", "reference")}
    fusion = Fusion("glu", paths, defaults={"cpu": ("compile", "blocked")})
    with without_compiling():
        assert fusion.default(x) == "blocked"
        with without_compiling():
            pass
        assert fusion.default(x) == "blocked"
    monkeypatch.setattr(backend, "why_not_compile", lambda: None)
    with without_compiling():
        assert fusion.path(x, "compile") == "compile"  # explicitly requested
    assert fusion.default(x) == "compile"


def test_blocks_may_end_in_the_order_they_began_in():
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(without_compiling())
        second.enter_context(without_compiling())
        first.close()
        assert not ranking.compiles
    assert ranking.compiles


def test_a_fake_tensor_asks_no_compiler(monkeypatch):
    def refuse(function):
        raise AssertionError("a probe of fake tensors would crash")

    monkeypatch.setattr(compiler, "CompiledFormula", refuse)
    with FakeTensorMode():
        x = torch.empty(512, 1024, requires_grad=True)
        y = fusions.glu(x, activation="silu")
        y.sum().backward()
    assert (y.shape, x.grad.shape) == ((512, 512), (512, 1024))
