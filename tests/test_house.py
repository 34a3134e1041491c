"""The package's own shape: sizes of files, import circles, words of names and docstrings, length of the docs."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autopipe"
BANNED = frozenset(
    [
        "later",
        "posed",
        "foreseen",
        "lying",
        "company",
        "crew",
        "crowd",
        "former",
        "medley",
        "alike",
        "wished",
        "wishes",
        "asked",
        "hub",
        "hubs",
        "absent",
        "rivals",
        "rival",
        "shown",
        "compared",
        "contrast",
        "valueless",
        "pulse",
        "beat",
        "meeting",
        "turns",
        "roots",
        "departures",
        "arrival",
        "departure",
        "rings",
        "decided",
        "ordered",
        "tried",
        "narrowed",
        "narrowing",
        "lack",
        "ahead",
        "gang",
        "laid",
        "talking",
    ]
)
"""Words of the old dialect: each has a term that PyTorch, Megatron, ONNX or a paper uses."""
MOST_LINES = 700
DOCUMENTATION_WORDS = 35_000


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of every module, by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def lengths() -> dict[str, int]:
    """Lines of each file of the package."""
    return {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}


def test_no_file_is_longer_than_a_reader_holds() -> None:
    assert {name: lines for name, lines in lengths().items() if lines > MOST_LINES} == {}


def test_files_are_ideas_and_not_functions() -> None:
    assert statistics.median(lengths().values()) >= 140


def named() -> Iterator[tuple[str, str]]:
    """(place, name) of every module, class and function."""
    for module, tree in trees().items():
        yield module, module.rpartition(".")[2]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}:{node.lineno}", node.name


def words_of(name: str) -> set[str]:
    """The words of a name in snake or camel case."""
    return set(re.findall("[a-z]+", re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()))


def test_words_of_the_old_dialect_stay_away() -> None:
    assert [f"{place} {name}" for place, name in named() if words_of(name) & BANNED] == []


@pytest.mark.parametrize("pattern", [r"(What|Whether|Those)\b", r"(?s).*\bso many\b"])
def test_docstrings_say_what_a_thing_is(pattern: str) -> None:
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
    """Modules of the package that a module imports anywhere, for types too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
    return (found & known) - {module}


def test_no_modules_import_one_another_in_a_circle() -> None:
    known = set(trees())
    graph = {module: imports_of(module, tree, known) for module, tree in trees().items()}
    while leaves := {module for module, needs in graph.items() if not needs & set(graph)}:
        graph = {module: needs for module, needs in graph.items() if module not in leaves}
    readers = {module for needs in graph.values() for module in needs}
    assert sorted(set(graph) & readers) == []


def test_the_documentation_is_short() -> None:
    assert (
        sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md"))
        <= DOCUMENTATION_WORDS
    )
