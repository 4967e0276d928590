"""Only plugins/kv.py computes, compares or defaults page counts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("plugins", "builder", "runtime", "scripts")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
OWNER = ROOT / "plugins" / "kv.py"
COUNTS = {
    "num_pages",
    "max_pages_per_seq",
    "minimum_pages",
    "retained_pages",
    "kv_pool_pages",
    "TOKENS_PER_PAGE",
    "tokens_per_page",
    "MAX_KV_POOL_PAGES",
}
PAGE_SIZE = 128


def _names(node: ast.AST) -> set[str]:
    """Names that an expression reads, without looking into calls, which own their result."""
    found: set[str] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if isinstance(current, ast.Attribute):
            found.add(current.attr)
        elif isinstance(current, ast.Name):
            found.add(current.id)
        if not isinstance(current, ast.Call):
            pending.extend(ast.iter_child_nodes(current))
    return found


def violations(source: str) -> list[str]:
    """Places that do page arithmetic, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg) and node.arg == "num_pages":
            found.append(f"{node.lineno}: takes a raw page count")
        elif isinstance(node, ast.BinOp):
            constants = {n.value for n in (node.left, node.right) if isinstance(n, ast.Constant)}
            divides = isinstance(node.op, ast.FloorDiv | ast.Mod | ast.Mult)
            if _names(node) & COUNTS or (divides and PAGE_SIZE in constants):
                found.append(f"{node.lineno}: page arithmetic `{ast.unparse(node)}`")
        elif isinstance(node, ast.AugAssign):
            if (_names(node.target) | _names(node.value)) & COUNTS:
                found.append(f"{node.lineno}: page arithmetic `{ast.unparse(node)}`")
        elif isinstance(node, ast.Compare):
            # `is None` asks whether the user gave a count, which compares nothing.
            identity = all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
            if not identity and _names(node) & COUNTS:
                found.append(f"{node.lineno}: compares page counts `{ast.unparse(node)}`")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page_count_has_one_owner(path: Path) -> None:
    if path == OWNER:
        return
    assert violations(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(num_pages): ...",
        "x = pool.num_pages + 1",
        "x = batch * pool.max_pages_per_seq",
        "x = tokens // TOKENS_PER_PAGE",
        "x = position % 128",
        "x += spec.pool.num_pages",
        "if page < pool.num_pages: ...",
        "assert free + used == pool.num_pages",
    ],
)
def test_the_lock_sees(source: str) -> None:
    assert violations(source) != []


def test_the_owner_would_not_pass() -> None:
    assert violations(OWNER.read_text(encoding="utf-8")) != []
