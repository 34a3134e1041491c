#!/usr/bin/env python3
"""Print measures of the structure of the package: `python scripts/structure.py`.

`tests/test_structure.py` compares these measures with limits that may only go down.
"""

from __future__ import annotations

import ast
import functools
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx.defs

ROOT = Path(__file__).parents[1]
OPERATOR_TABLES = (
    "autopipe.ir.ops",
    "autopipe.backends.torch.codegen",
    "autopipe.backends.torch.runtime.operators",
    "autopipe.passes.frontend.decompositions",
    "autopipe.passes.frontend.fusion",
    "autopipe.configs.zoo",
)
"""Packages that may name ONNX operators freely.

The first three define operators and implement them. Decompositions and fusions are tables of
patterns: each replaces one group of nodes, and a new operator changes none of them. The models of
the zoo are graphs, written as calls that name operators.
"""
WRITERS = {
    "Node",
    "Step",
    "_add",
    "_append",
    "_node",
    "_visit",
    "_with_numbers",
    "add",
    "append",
    "replacement_node",
    "make_node",
    "node",
}
"""Functions and classes that construct a node of the operator that an argument names."""
_OPERATORS_THAT_ARE_WORDS = {"If", "Max", "Min", "Size", "Shape", "Not", "And", "Or"}
"""Operator names that also occur as ordinary strings."""

Trees = Mapping[str, ast.Module]


@functools.cache
def syntax_trees(folder: Path = ROOT / "autopipe") -> Trees:
    """Return the syntax tree of each module below `folder`, by dotted name."""
    trees = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def imported_names(tree: ast.Module) -> set[str]:
    """Return the modules and members that a module imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            names.update(each.name for each in node.names)
    return names


def imports(trees: Trees) -> dict[str, set[str]]:
    """Return the modules of `trees` that each of them imports, type-checking imports included."""
    return {
        module: (imported_names(tree) & trees.keys()) - {module} for module, tree in trees.items()
    }


def widest_module(trees: Trees) -> tuple[str, int]:
    """Return the module that imports the most modules of the package, and their number."""
    graph = imports(trees)
    module = max(graph, key=lambda name: len(graph[name]))
    return module, len(graph[module])


@functools.cache
def _operators() -> frozenset[str]:
    return (
        frozenset(schema.name for schema in onnx.defs.get_all_schemas()) - _OPERATORS_THAT_ARE_WORDS
    )


def operator_names(trees: Trees) -> Counter[str]:
    """Return how often each module outside `OPERATOR_TABLES` names an ONNX operator."""
    operators = _operators()
    counts: Counter[str] = Counter()
    for module, tree in trees.items():
        if module.startswith(OPERATOR_TABLES):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                counts[module] += node.value in operators
    return +counts


def written_operator_names(trees: Trees) -> int:
    """Return how many of the names that `operator_names` counts are arguments of `WRITERS`."""
    total = 0
    for module, tree in trees.items():
        if module.startswith(OPERATOR_TABLES):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in WRITERS:
                total += sum(
                    isinstance(each, ast.Constant) and each.value in _operators()
                    for each in node.args
                )
    return total


def parallel_assignments(trees: Trees) -> int:
    """Return the number of statements such as `a, b = c, d`."""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        for tree in trees.values()
        for node in ast.walk(tree)
    )


def long_lines(folder: Path = ROOT / "autopipe", columns: int = 100) -> list[str]:
    """Return the positions of lines that are longer than `columns`."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted(folder.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > columns
    ]


def node_writers(trees: Trees) -> list[str]:
    """Return the classes of the frontend that construct graph nodes."""
    return [
        f"{module}.{part.name}"
        for module, tree in trees.items()
        if module.startswith("autopipe.passes.frontend")
        for part in ast.walk(tree)
        if isinstance(part, ast.ClassDef)
        and any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"Node", "NodeProto"}
            for node in ast.walk(part)
        )
    ]


def untested_folders(trees: Trees, tests: Trees) -> list[str]:
    """Return the packages of which no test imports a module."""
    imported: set[str] = set().union(*map(imported_names, tests.values()))
    packages = {module.rpartition(".")[0] for module in trees} - {"", "autopipe"}
    tested = imported | {name.rpartition(".")[0] for name in imported & trees.keys()}
    return sorted(packages - tested)


def main() -> None:
    """Print the measures that need no command to run."""
    trees = syntax_trees()
    functions = [
        node.end_lineno - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    module, count = widest_module(trees)
    operators = operator_names(trees)
    print(f"modules: {len(trees)}")
    median = statistics.median(functions)
    print(f"functions: {len(functions)}, median {median:.0f} lines, longest {max(functions)}")
    print(f"most imports: {module} ({count})")
    print(f"lines over 100 columns: {len(long_lines())}")
    print(f"parallel assignments: {parallel_assignments(trees)}")
    print(f"operator names outside of tables: {operators.total()} in {len(operators)} modules")
    print(f"operators of nodes that these modules write: {written_operator_names(trees)}")
    print(f"classes that construct nodes: {', '.join(node_writers(trees))}")
    untested = untested_folders(trees, syntax_trees(ROOT / "tests"))
    print(f"folders that no test imports: {', '.join(untested) or 'none'}")


if __name__ == "__main__":
    main()
