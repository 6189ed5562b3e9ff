"""Finds the fields of settings groups that a program reads, by following types through its syntax trees.

A value is a group if an annotation says so: of a parameter, a class's attribute, a function's result, a group's field.
From there types follow assignments, also of several names at once, ``self.x = ...``, loops and comprehensions over
sequences, and calls. Within a function order does not matter: a name has every type that it is ever given.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

# a class by name; for a sequence, its elements' class after "*"
Type = str
_SEQUENCES = {"Sequence", "Iterable", "Iterator", "list", "tuple"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Program:
    """Syntax trees, what is known about their classes and functions, and the reads found so far.

    Args:
        trees: modules whose code runs.
        settings_trees: modules that declare the groups; of these, only functions that others call count.
        groups: names of the classes whose reads are searched for.
    """

    trees: Iterable[ast.Module]
    settings_trees: Iterable[ast.Module]
    groups: frozenset[str]
    reads: set[tuple[str, str]] = field(default_factory=set)  # (class, attribute)
    attributes: dict[str, dict[str, set[Type]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    bases: dict[str, list[str]] = field(default_factory=dict)
    results: dict[str, set[Type]] = field(default_factory=lambda: defaultdict(set))  # by function name
    called: set[str] = field(default_factory=set)  # functions and "Class.method"

    def find_reads(self) -> set[tuple[str, str]]:
        """All reads, as (class, attribute)."""
        for tree in (*self.trees, *self.settings_trees):
            self._declare(tree)
        before = -1
        while before != (before := self._num_known()):  # an attribute set in one class is read in another
            for tree in self.trees:
                for function, owner in _functions(tree):
                    _Body(self, function, owner, _constants(tree)).follow()
            for tree in self.settings_trees:
                for function, owner in _functions(tree):
                    if (f"{owner}.{function.name}" if owner else function.name) in self.called:
                        _Body(self, function, owner, _constants(tree)).follow()
        return self.reads

    def attribute(self, owner: str, name: str) -> set[Type]:
        """The types of an attribute, or of a method's result, including inherited ones."""
        known = self.attributes.get(owner, {}).get(name, set())
        return known.union(*(self.attribute(base, name) for base in self.bases.get(owner, [])))

    def _num_known(self) -> int:
        kinds = [kinds for owner in self.attributes.values() for kinds in owner.values()]
        return len(self.reads) + len(self.called) + sum(map(len, kinds))

    def _declare(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                # C[int] is C
                bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                self.bases[node.name] = [base.id for base in bases if isinstance(base, ast.Name)]
                for part in node.body:
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        self.attributes[node.name][part.target.id] |= annotated(part.annotation, node.name)
                    elif isinstance(part, Function):
                        self.attributes[node.name][part.name] |= annotated(part.returns, node.name)
        for function, owner in _functions(tree):
            if owner is None:
                self.results[function.name] |= annotated(function.returns, None)


@dataclass
class _Body:
    """One function: the types of its names, and what it reads."""

    program: Program
    function: Function
    owner: str | None
    constants: Mapping[str, list[str]]
    names: dict[str, set[Type]] = field(default_factory=lambda: defaultdict(set))
    texts: dict[str, list[str]] = field(default_factory=dict)  # names that iterate over constant strings

    def follow(self) -> None:
        nodes = list(ast.walk(self.function))
        for node in nodes:
            if isinstance(node, ast.arg):
                self.names[node.arg] |= annotated(node.annotation, self.owner)
        if self.owner and self.function.args.args:
            self.names[self.function.args.args[0].arg].add(self.owner)
        before = -1
        while before != (before := sum(map(len, self.names.values()))):
            for node in nodes:
                self._bind(node)
        for node in nodes:
            self._note(node)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            members = {kind.removeprefix("*") for kind in self._types(node.iter) if kind.startswith("*")}
            self.names[node.target.id] |= members
            if isinstance(node.iter, ast.Name) and node.iter.id in self.constants:
                self.texts[node.target.id] = self.constants[node.iter.id]

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one_target, one_value in zip(target.elts, value.elts, strict=False):
                self._assign(one_target, one_value)
        elif isinstance(target, ast.Name):
            self.names[target.id] |= self._types(value)
        elif isinstance(target, ast.Attribute):
            for owner in self._types(target.value):
                self.program.attributes[owner][target.attr] |= self._types(value)

    def _types(self, node: ast.expr) -> set[Type]:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return set().union(*(self.program.attribute(owner, node.attr) for owner in self._types(node.value)))
        if isinstance(node, ast.IfExp):
            return self._types(node.body) | self._types(node.orelse)
        if isinstance(node, ast.BoolOp):
            return set().union(*map(self._types, node.values))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                made = {node.func.id} if node.func.id in self.program.bases else set()
                return made | self.program.results.get(node.func.id, set())
            return self._types(node.func)  # a method has the type of its result
        return set()

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            for owner in self._types(node.value) & self.program.groups:
                self.program.reads.add((owner, node.attr))
                self.program.called.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            self.program.called.add(node.func.id)
            if node.func.id == "getattr" and isinstance(node.args[1], ast.Name):
                for owner in self._types(node.args[0]) & self.program.groups:
                    self.program.reads |= {(owner, text) for text in self.texts.get(node.args[1].id, [])}


def annotated(annotation: ast.expr | None, owner: str | None) -> set[Type]:
    """The types that ``annotation`` names, within the class ``owner``."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotated(ast.parse(annotation.value, mode="eval").body, owner)
    if isinstance(annotation, ast.Name):
        return {owner} if annotation.id == "Self" and owner else {annotation.id}
    if isinstance(annotation, ast.BinOp):
        return annotated(annotation.left, owner) | annotated(annotation.right, owner)
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        if annotation.value.id == "Annotated" and isinstance(annotation.slice, ast.Tuple):
            return annotated(annotation.slice.elts[0], owner)
        if annotation.value.id in _SEQUENCES:
            members = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            return {f"*{kind}" for member in members for kind in annotated(member, owner)}
    return set()


def _functions(tree: ast.Module) -> Iterator[tuple[Function, str | None]]:
    """A module's functions, each with None, and methods, each with its class; nested functions belong to these."""

    def inside(body: Iterable[ast.stmt], owner: str | None) -> Iterator[tuple[Function, str | None]]:
        for node in body:
            if isinstance(node, Function):
                yield node, owner
            elif isinstance(node, ast.ClassDef):
                yield from inside(node.body, node.name)

    return inside(tree.body, None)


def _constants(tree: ast.Module) -> dict[str, list[str]]:
    """Tuples of strings that a module binds at its top level."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Tuple):
            texts = [part.value for part in node.value.elts if isinstance(part, ast.Constant)]
            found[node.targets[0].id] = [text for text in texts if isinstance(text, str)]
    return found
