"""Rules for every source file, checked on the syntax trees; import-linter checks the layers, ruff the rest."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "megalith"
LONGEST_FILE, LONGEST_FUNCTION = 400, 60

# file:function -> why it may exceed 60 lines; never over 100
LONG_FUNCTIONS: dict[str, str] = {}
# file:name -> why it may change at run time
GLOBAL_STATE = {
    "src/megalith/acceleration/full_cuda_graph.py:_FAILED": "graphs that must live on, because a capture failed",
    "src/megalith/acceleration/replay.py:_current": "what is recorded, in the thread that records it",
    "src/megalith/config/layout_rules.py:_other_layouts": "remembers a formula that many suggestions ask for",
    "src/megalith/config/recipes.py:_preset": "remembers a file of the wheel",
    "src/megalith/recipe_files.py:preset_names": "remembers names of files of the wheel",
    "src/megalith/recipe_files.py:recipe_names": "remembers names of files of the wheel",
    "src/megalith/data/prepare/parts.py:_tokenizer": "the tokenizer that a worker process loads once",
    "src/megalith/fusions/core/preference.py:ranking": "what `prefer` has set, for all threads of a process",
    "src/megalith/fusions/core/preference.py:_backend": "what `use` says, to the thread or task that says it",
    "src/megalith/fusions/core/registry.py:FUSIONS": "the operations there are, as their families are imported",
    "src/megalith/fusions/core/registration.py:_launches": "whether a thread launches kernels without torch's wrapper",
    "src/megalith/fusions/core/dispatch.py:_tell": "which lines the log has already",
    "src/megalith/fusions/core/compiled_formulas.py:_log_wait": "which lines the log has already",
    "src/megalith/acceleration/replay.py:_depends_on_values": "cache: what torch says of an operator",
    "src/megalith/fusions/core/compiler.py:why_not_compile": "cache: whether torch.compile can build here",
    "src/megalith/fusions/core/compiled_reference.py:build": "compiles a path once, when it is first taken",
    "src/megalith/parallel/pipeline/links.py:deliveries_to": "cache: what follows from a schedule",
    "src/megalith/parallel/pipeline/pipeline.py:_forward_only": "cache: the schedule of the evaluation before",
    "src/megalith/parallel/pipeline/pipeline.py:_schedule": "cache: the schedule of the step before",
    "src/megalith/torch_compat/distributed.py:distributed_c10d": "how torch names a process group, while it makes one",
    "src/megalith/topology/current_state.py:_current": "the one named context, for accessors of users' scripts",
}
# __init__ file:name -> why it contains more than a docstring, imports and __all__
CODE_IN_INIT = {
    "src/megalith/__init__.py:__version__": "the build reads it from there",
    "src/megalith/fusions/core/kernels/__init__.py:Expr": "says how to install triton before a kernel file fails",
}
# modules that do not import torch, so that commands start fast and data can be prepared without it
WITHOUT_TORCH = [
    "megalith.cli.main",
    "megalith.config",
    "megalith.data.indexed_dataset",
    "megalith.data.prepare",
    "megalith.data.tokenizer",
    "megalith.errors",
    "megalith.numerics.permutation",
    "megalith.observe.metrics",
    "megalith.optim.optimizer_param_scheduler",
    "megalith.optional",
    "megalith.parallel.pipeline.schedules",
    "megalith.parallel.pipeline.simulate",
    "megalith.parallel.pipeline.validate",
    "megalith.storage.atomic",
    "megalith.topology.rank_grid",
    "megalith.recipe_files",
    "megalith.training.num_microbatches_calculator",
]
MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "set", "setdefault"}
MUTATORS |= {"update", "appendleft", "sort", "reverse"}
PRIVATE = {
    "a path of the machine it was written on": r"(?<![\w.])/(work|home/\w+|root|mnt|workspace)/",
    "a file outside of the repository": r"\bshared/(specs|design|specimen|hooks)\b",
    "a folder that only some machines have": r"[\"'(\s=]/tmp/\w",
    "an issue of some tracker": r"(?i)\bissue #?\d+\b",
    "a host of packages": r"\b(pypi\.org|pythonhosted\.org|anaconda\.org|npmjs\.(com|org))\b",
    "how it was written": r"(?i)\b(this|another|next) session\b|\bworkplace\b|\bhelper session\b|\bsub-?agent\b",
    "a note to self": r"\b(TODO|FIXME|HACK|XXX)\b",
}


def tracked(*suffixes: str) -> list[Path]:
    """Files that git tracks or would add, with one of ``suffixes``; all of them if there are none."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (not suffixes or name.endswith(suffixes)) and (ROOT / name).is_file()]


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def source_files() -> list[Path]:
    return [file for file in tracked(".py") if PACKAGE in file.parents]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):  # no expression contains a definition
            yield from functions(node)


def test_the_rules_see_the_tree():
    names = {name_of(file) for file in tracked()}
    assert {"pyproject.toml", "README.md", "src/megalith/errors.py", "tests/test_house.py"} <= names
    assert len(source_files()) > 50


def test_no_file_is_longer_than_400_lines():
    lengths = {name_of(file): len(file.read_text(encoding="utf-8").splitlines()) for file in tracked(".py")}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_no_function_is_longer_than_60_lines():
    lengths = {
        f"{name_of(file)}:{function.name}": function.end_lineno - function.lineno + 1
        for file in tracked(".py")
        # the garbage collector would traverse cached trees again and again
        for function in functions(ast.parse(file.read_text(encoding="utf-8")))
    }
    long = {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION}
    assert long.keys() == LONG_FUNCTIONS.keys(), long
    assert all(length <= 100 for length in long.values())


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("megalith")
    circles = [
        (module, other)
        for module in sorted(graph.modules)
        for other in sorted(graph.find_modules_directly_imported_by(module))
        if graph.chain_exists(importer=other, imported=module)
    ]
    assert circles == []


def test_only_the_command_line_prints():
    printing = [
        f"{name_of(file)}:{node.lineno}"
        for file in source_files()
        if PACKAGE / "cli" not in file.parents
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


def test_nothing_is_moved_to_a_gpu_by_name():
    calls = [
        f"{name_of(file)}:{node.lineno}"
        for file in source_files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
    ]
    assert calls == []


def test_the_run_names_no_model_outside_of_its_tasks():
    run = PACKAGE / "training"
    files = [file for file in source_files() if run in file.parents and run / "tasks" not in file.parents]
    naming = [name_of(file) for file in files if re.search(r"megalith\.models|GPT|Bert|T5", file.read_text("utf-8"))]
    assert len(files) > 10
    assert naming == []


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_init_files_hold_a_docstring_imports_and_all():
    found = set()
    for file in (file for file in source_files() if file.name == "__init__.py"):
        body = tree_of(file).body
        assert body, f"{name_of(file)} says nothing"
        assert is_docstring(body[0]), f"{name_of(file)} has no docstring"
        for node in body[1:]:
            if isinstance(node, ast.Import | ast.ImportFrom):
                continue
            what = node.targets[0].id if isinstance(node, ast.Assign) else type(node).__name__
            if what != "__all__":
                found.add(f"{name_of(file)}:{what}")
    assert found == CODE_IN_INIT.keys()


def bound_names(tree: ast.Module) -> set[str]:
    """The names a module binds at its top level, by assignment or import."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        names |= {name.id for target in targets if target for name in ast.walk(target) if stores(name)}
    return names


def stores(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def written_through(node: ast.AST) -> ast.AST | None:
    """The names a statement modifies by subscript, by attribute, or by a mutating method."""
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return node.func.value
    return None


def changed_state(tree: ast.Module) -> set[str]:
    """Top-level names of a module that its functions modify, and functions that cache results."""
    found = set()
    for function in functions(tree):
        nodes = list(ast.walk(function))
        declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        own = {node.id for node in nodes if stores(node)} | {node.arg for node in nodes if isinstance(node, ast.arg)}
        targets = [written_through(node) for node in nodes]
        written = {target.id for target in targets if isinstance(target, ast.Name)}
        found |= declared | (written - own) & bound_names(tree)
        if any("cache" in ast.unparse(decorator) for decorator in function.decorator_list):
            found.add(function.name)
    return found


def test_global_state_is_what_the_list_says():
    found = {f"{name_of(file)}:{name}" for file in source_files() for name in changed_state(tree_of(file))}
    assert found == GLOBAL_STATE.keys()


@pytest.mark.parametrize(
    ("function", "is_state"),
    [
        ("def f(): STATE['x'] = 1", True),
        ("def f(): STATE.append(1)", True),
        ("def f(): STATE.attribute = 1", True),
        ("def f(): del STATE[0]", True),
        ("def f():\n    global STATE\n    STATE = 1", True),
        ("class C:\n    def f(self): STATE.update(x=1)", True),
        ("@functools.cache\ndef STATE(): return 1", True),
        ("def f(): return STATE['x']", False),
        ("def f(STATE): STATE['x'] = 1", False),
        ("def f():\n    STATE = {}\n    STATE['x'] = 1", False),
        ("def f(): other.STATE = 1", False),
    ],
)
def test_state_is_known_when_it_is_seen(function, is_state):
    assert changed_state(ast.parse(f"STATE = {{}}\n{function}")) == ({"STATE"} if is_state else set())


def test_every_module_says_what_it_is_and_what_it_offers():
    wrong = []
    for file in (file for file in source_files() if file.name != "__init__.py"):
        tree = tree_of(file)
        if not ast.get_docstring(tree):
            wrong.append(f"{name_of(file)} has no docstring")
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        offers = [node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
        if len(offers) != 1 and file.name != "__main__.py":
            wrong.append(f"{name_of(file)} has no __all__")
        defined = bound_names(tree) | {getattr(node, "name", "") for node in tree.body}
        missing = [name for offer in offers for name in ast.literal_eval(offer) if name not in defined]
        wrong += [f"{name_of(file)} offers {name} and has none" for name in missing]
    assert wrong == []


def test_nothing_private_is_in_any_file():
    found = []
    for file in tracked():
        if file == Path(__file__):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image
        for what, pattern in PRIVATE.items():
            for match in re.finditer(pattern, text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{name_of(file)}:{line}: {match.group().strip()!r} is {what}")
    assert found == []


def fresh_process(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_megalith_imports_nothing_else():
    program = "import sys; before = set(sys.modules); import megalith; print(*set(sys.modules) - before)"
    assert fresh_process(program) == "megalith"


def test_what_needs_no_torch_imports_none():
    program = f"""
import importlib, sys
for name in {WITHOUT_TORCH}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(print(name))
"""
    assert fresh_process(program) == ""
