"""Checks of the package's source text: no import cycles, and docstrings that open with a noun or a verb."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autopipe"


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every module of the package, by dotted module name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("pattern", [r"(What|Whether|Those)\b", r"(?s).*\bso many\b"])
def test_docstrings_open_with_a_noun_or_a_verb(pattern: str) -> None:
    wrong = []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                strings = (each.value for each in node.body if isinstance(each, ast.Expr))
                texts = (
                    each.value for each in strings if isinstance(each, ast.Constant) and isinstance(each.value, str)
                )
                wrong += [f"{module}: {text[:60]}" for text in texts if re.match(pattern, text)]
    assert wrong == []


def imports_of(module: str, tree: ast.Module, known: set[str]) -> set[str]:
    """Return the modules of the package that `module` imports anywhere, type-checking imports included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
    return (found & known) - {module}


def test_no_import_cycles() -> None:
    known = set(trees())
    graph = {module: imports_of(module, tree, known) for module, tree in trees().items()}
    while leaves := {module for module, needs in graph.items() if not needs & set(graph)}:
        graph = {module: needs for module, needs in graph.items() if module not in leaves}
    readers = {module for needs in graph.values() for module in needs}
    assert sorted(set(graph) & readers) == []
