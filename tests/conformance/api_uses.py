"""What our sources use of TensorRT, found by reading them.

Three conventions of the code make that possible: the loaded module is called `api` (or is the
call `load()`), objects of TensorRT are held under the names of OWNERS, with or without a
leading underscore, and a plain `x = api.A.B` is an alias.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

API_NAME = "api"
LOAD = "load"
OWNERS = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "config": "IBuilderConfig",
    "parser": "OnnxParser",
    "profile": "IOptimizationProfile",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "registry": "IPluginRegistry",
    "layer": "ILayer",
    "description": "PluginTensorDesc",
    "expr_builder": "IExprBuilder",
}
SEAM = "paged_trt.plugins.trt"


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """A dotted name of TensorRT, and how it is called (`num_arguments` -1: it is not).

    Attributes:
        place: file and line.
        name: such as `PreviewFeature.ALIASED_PLUGIN_IO_10_03`.
        num_arguments: positional arguments, self not counted.
        keywords: names of keyword arguments.
    """

    place: str
    name: str
    num_arguments: int = -1
    keywords: tuple[str, ...] = ()


def uses_in(root: Path) -> list[Use]:
    """Uses in all sources of the four packages under `root`."""
    found = []
    for package in ("plugins", "builder", "runtime", "scripts"):
        for path in sorted((root / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            found += uses_in_source(source, str(path.relative_to(root)))
    return found


def uses_in_source(source: str, name: str) -> list[Use]:
    """Uses in one source; none where it does not import the seam."""
    tree = ast.parse(source)
    if name != "plugins/trt.py" and not _imports_seam(tree):
        return []
    aliases = _aliases(tree)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    uses = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        dotted = _dotted(node, aliases)
        if dotted is None:
            continue
        place = f"{name}:{node.lineno}"
        call = calls.get(id(node))
        if call is None or any(isinstance(argument, ast.Starred) for argument in call.args):
            uses.append(Use(place, dotted))
            continue
        keywords = tuple(keyword.arg for keyword in call.keywords if keyword.arg)
        # A base class's `__init__` is called with an explicit self.
        num_arguments = len(call.args) - dotted.endswith(".__init__")
        uses.append(Use(place, dotted, num_arguments, keywords))
    return uses


def _imports_seam(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == SEAM:
                return True
            if node.module == "paged_trt.plugins" and any(
                alias.name in ("trt", "creator", "plugin") for alias in node.names
            ):
                return True
    return False


def _aliases(tree: ast.AST) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        for target, value in _assignments(node):
            dotted = _dotted(value, {}) if isinstance(value, ast.Attribute) else None
            if dotted is not None and dotted.split(".")[0] not in OWNERS.values():
                aliases[target] = dotted
    return aliases


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        pairs = (
            zip(target.elts, node.value.elts, strict=False)
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            else [(target, node.value)]
        )
        for left, right in pairs:
            if isinstance(left, ast.Name):
                yield left.id, right


def _dotted(node: ast.Attribute, aliases: dict[str, str]) -> str | None:
    """`A.B` of `api.A.B`, `self._api.A.B`, `load().A.B`, `alias.B` or `engine.B`."""
    names: list[str] = []
    current: ast.expr = node
    while isinstance(current, ast.Attribute):
        root = _root(current, aliases)
        if root is not None and names:
            return ".".join([*filter(None, [root]), *reversed(names)])
        names.append(current.attr)
        current = current.value
    root = _root(current, aliases)
    return None if root is None else ".".join([*filter(None, [root]), *reversed(names)])


def _root(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The class or prefix that `node` stands for; an empty string is the module."""
    if isinstance(node, ast.Call):
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
        return "" if name == LOAD else None
    if isinstance(node, ast.Name):
        name = node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id != "self":
            return None
        name = node.attr.removeprefix("_")
    else:
        return None
    if name == API_NAME:
        return ""
    return aliases.get(name) or OWNERS.get(name)
