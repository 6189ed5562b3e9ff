"""YAML as people write settings: ``3e-4`` is a number, ``no`` and ``12:30`` are text, a key given twice is an error.

PyYAML reads YAML 1.1, where the first is text and the others are false and 750. Reading here follows the core schema of
YAML 1.2.2 (section 10.3.2), plus underscores in whole numbers; writing quotes whatever either version would misread.
"""

import math
import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml

from megalith.errors import ConfigError

__all__ = ["MOST_BYTES", "read_override", "read_yaml", "write_override", "write_yaml"]

MOST_BYTES = 1 << 18  # of a file of settings; a run's settings have about 2 kB

_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
_MOST_LEVELS = 20  # of nesting; a run's settings have five
_MOST_NODES = 4_000  # values and names in a file; a run's settings have about 150
_MOST_DIGITS = 100  # of a whole number; Python refuses to print those of more than 4300

_BREAK = re.compile("[\r\x85\u2028\u2029\ufeff]")
_SCALARS = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)"), list("tTfF")),
    "int": (re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*"), list("-+0123456789")),
    "float": (re.compile(rf"(?:{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"), list("-+.0123456789")),
}


def read_yaml(text: str | bytes, source: str) -> Any:
    """The one document in ``text``, UTF-8 if it is bytes.

    Raises:
        ConfigError: it is not YAML, or larger or deeper than settings are; it names ``source`` and the line.
    """
    try:
        if len(text) > MOST_BYTES:
            raise yaml.YAMLError(f"it has {len(text):,} bytes, and settings have at most {MOST_BYTES:,}")
        return yaml.load(text.decode("utf-8") if isinstance(text, bytes) else text, _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source} cannot be read as YAML: byte {error.start} is not UTF-8; save it as UTF-8"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} cannot be read as YAML: {' '.join(str(error).split())}") from error


def write_yaml(value: Any) -> str:
    """``value`` as YAML that ``read_yaml`` reads back, keys in their order, lists on one line."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return text


def read_override(text: str) -> tuple[str, Any]:
    """The dotted name and the value of ``name=value``, where the value is YAML: ``optim.lr=3e-4``, ``load=null``."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"an override must look like optim.lr=3e-4; got {text!r}")
    return name.strip(), read_yaml(value, f"the value of override {text!r}")


def write_override(name: str, value: Any) -> str:
    """``name=value`` on one line, such that ``read_override`` reads it back."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    text = text.removesuffix("\n").removesuffix("\n...")  # PyYAML ends a lone scalar with an end-of-document mark
    return f"{name}={text}"


class _Loader(yaml.SafeLoader):
    """Core schema, no key twice, and bounds that hold before any value is made."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own protocol)
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (*(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")), None)
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_nodes = 0
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._num_nodes += 1
        self._depth += 1
        mark = self.peek_event().start_mark
        _check_bounds(self._num_nodes, self._depth, mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        _measure(node, {})
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", node.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)

    def construct_core(self, node: yaml.Node) -> Any:
        """A scalar of the core schema, also where its tag is written out: ``!!int many`` is none."""
        kind = node.tag.rpartition(":")[2]
        if not isinstance(node, yaml.ScalarNode) or not _SCALARS[kind][0].fullmatch(node.value):
            raise yaml.constructor.ConstructorError(None, None, f"it is tagged {kind} and is none", node.start_mark)
        if kind == "int":
            if len(node.value) > _MOST_DIGITS:
                message = f"a whole number of {len(node.value):,} digits; settings have at most {_MOST_DIGITS}"
                raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
            return int(node.value)  # base 10 always: 010 is ten
        return {
            "null": lambda _: None,
            "bool": self.construct_yaml_bool,
            "float": self.construct_yaml_float,
        }[kind](node)


def _check_bounds(num_nodes: int, depth: int, mark: Any) -> None:
    if num_nodes > _MOST_NODES or depth > _MOST_LEVELS:
        what = f"{_MOST_LEVELS} levels" if depth > _MOST_LEVELS else f"{_MOST_NODES:,} values, aliases counted in full"
        raise yaml.composer.ComposerError(None, None, f"it has more than {what}", mark)


def _measure(node: yaml.Node, known: dict[yaml.Node, tuple[int, int] | None]) -> tuple[int, int]:
    """Values and levels of ``node`` once every alias is replaced by what it stands for; checked against the bounds.

    A few lines of aliases to aliases can stand for billions of values.
    """
    if node not in known:
        known[node] = None  # begun, and not ended
        parts = [part for entry in node.value for part in entry] if isinstance(node, yaml.MappingNode) else node.value
        sizes = [_measure(part, known) for part in parts] if isinstance(node, yaml.CollectionNode) else []
        size = 1 + sum(values for values, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
        _check_bounds(*size, node.start_mark)
        known[node] = size
    found = known[node]
    if found is None:
        raise yaml.composer.ComposerError(None, None, "an alias stands for something that contains it", node.start_mark)
    return found


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else; writes lists on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML's other styles let line breaks that are not \n fall into spaces
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _BREAK.search(text) else None)


for _kind, (_pattern, _first) in _SCALARS.items():
    _exact = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _exact, _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _exact, _first)
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_core)
_Dumper.add_representer(list, _write_list)
_Dumper.add_representer(str, _write_text)
