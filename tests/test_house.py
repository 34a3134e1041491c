"""Checks of the package's source text: no import cycles, and docstrings that open with a noun or a
verb.
"""

from __future__ import annotations

import ast
import re
from itertools import pairwise

import pytest

from autopipe.ir.words import bytes_text, plural
from scripts.structure import imports, syntax_trees


@pytest.mark.parametrize("pattern", [r"(What|Whether|Those)\b", r"(?s).*\bso many\b"])
def test_docstrings_open_with_a_noun_or_a_verb(pattern: str) -> None:
    wrong = []
    for module, tree in syntax_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                strings = (each.value for each in node.body if isinstance(each, ast.Expr))
                texts = (
                    each.value
                    for each in strings
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                )
                wrong += [f"{module}: {text[:60]}" for text in texts if re.match(pattern, text)]
    assert wrong == []


def test_no_import_cycles() -> None:
    graph = imports(syntax_trees())
    while leaves := {module for module, needs in graph.items() if not needs & set(graph)}:
        graph = {module: needs for module, needs in graph.items() if module not in leaves}
    readers = {module for needs in graph.values() for module in needs}
    assert sorted(set(graph) & readers) == []


NOUNS = (
    "angle|array|attempt|batch|block|branch|byte|candidate|cell|channel|character|checkpoint|choice|class|column|condition|"
    "constraint|copy|core|delay|device|digit|dimension|edge|element|entry|epoch|example|exchange|expert|factor|feature|"
    "file|gradient|group|head|input|item|launch|layer|level|limit|line|link|machine|message|micro-batch|minute|model|node|"
    "number|operand|operation|operator|option|output|pair|parameter|part|period|piece|pipeline|plan|position|process|"
    "processor|program|prompt|rank|record|repetition|replica|restart|row|sample|schedule|second|sequence|shape|shard|"
    "solution|stage|step|string|table|task|tensor|thread|token|unit|value|variable"
)
PLURALS = re.compile(
    r"( (?:more |rank |other |finite )?)(axes|"
    + "|".join(plural(2, noun) for noun in sorted(NOUNS.split("|"), key=len, reverse=True))
    + r")\b(?![-/'’]| or groups)"
)
NO_NUMBERS = re.compile(
    r"[A-Z][A-Z_]+$"  # A constant is never 1.
    r"|\w*_text\(|' ?'?,?.*'\.join\(|^2 \* |sorted\(|_sizes_text"
    r"|^(job\.nodes|how|whose|rank\.device\.type|path\.stat\(\)\.st_size)$"
)
"""Expressions in front of a plural that are texts, several numbers, or larger than 1."""


def test_nouns_behind_numbers_agree_with_them() -> None:
    wrong = []
    for module, tree in syntax_trees().items():
        for node in ast.walk(tree):
            for value, text in pairwise(node.values if isinstance(node, ast.JoinedStr) else ()):
                if not isinstance(value, ast.FormattedValue) or not isinstance(text, ast.Constant):
                    continue
                counted = ast.unparse(value.value)
                is_text = value.conversion == ord("r") or NO_NUMBERS.search(counted)
                if PLURALS.match(text.value) and not is_text:
                    wrong.append(
                        f"{module}:{value.lineno}: {{{counted}}}{text.value[:30]}: use plural()"
                    )
    assert wrong == []


def test_the_check_of_nouns_finds_what_it_should() -> None:
    for text in (" stages of", " micro-batches", " more devices", " entries,", " axes"):
        assert PLURALS.match(text)
    for text in (" samples/s", " stage", " stagesets", " devices or groups"):
        assert not PLURALS.match(text)


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [
        (1, "stage", "stage"),
        (0, "stage", "stages"),
        (2, "micro-batch", "micro-batches"),
        (2, "entry", "entries"),
        (2, "delay", "delays"),
        (2, "axis", "axes"),
        (2, "process", "processes"),
    ],
)
def test_plurals(count: int, noun: str, expected: str) -> None:
    assert plural(count, noun) == expected


def test_verbs_follow_their_nouns() -> None:
    assert [plural(count, "node is", "nodes are") for count in (1, 2)] == ["node is", "nodes are"]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 B"), (1, "1 B"), (874_000, "854 KiB"), (3.1 * 2**30, "3.10 GiB"), (2**62, "4.00 EiB")],
)
def test_sizes_have_the_largest_unit_that_they_reach(size: float, expected: str) -> None:
    assert bytes_text(size) == expected
