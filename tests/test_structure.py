"""Measures of the structure and prose of the checkout that may only go down.

A change that improves a measure lowers its limit here. `python scripts/structure.py` and
`python scripts/prose.py` print the measures; the docstring of each limit gives its goal.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from scripts.prose import Total, collect_texts, totals_by_kind, word_count
from scripts.structure import (
    ROOT,
    imports,
    long_lines,
    node_writers,
    operator_names,
    parallel_assignments,
    syntax_trees,
    untested_folders,
    widest_module,
)


@cache
def prose() -> dict[str, Total]:
    """Return the counts of the package's texts by kind."""
    return totals_by_kind(collect_texts([ROOT / "autopipe"]))


LIMITS = {
    "operator names outside of operator tables": 797,
    "modules that name operators outside of operator tables": 56,
    "imports of the widest module": 22,
    "classes that construct nodes": 3,
    "lines over 100 columns": 0,
    "parallel assignments": 2,
}
"""Upper limits. Goals: 450 names in 20 modules, 18 imports, 1 class, 0 lines, 0 assignments."""


@cache
def measures() -> dict[str, int]:
    operators = operator_names(syntax_trees())
    return {
        "operator names outside of operator tables": operators.total(),
        "modules that name operators outside of operator tables": len(operators),
        "imports of the widest module": widest_module(syntax_trees())[1],
        "classes that construct nodes": len(node_writers(syntax_trees())),
        "lines over 100 columns": len(long_lines()),
        "parallel assignments": parallel_assignments(syntax_trees()),
    }


@pytest.mark.parametrize("measure", LIMITS)
def test_measures_do_not_exceed_their_limits(measure: str) -> None:
    assert measures()[measure] <= LIMITS[measure]


RATES = {"docstring": 19, "message": 15, "comment": 23}
"""Upper limits of weighted hits per 1,000 words of the package's texts. Goal: 30 each."""


@pytest.mark.parametrize("kind", RATES)
def test_texts_of_the_package_do_not_become_harder_to_read(kind: str) -> None:
    assert prose()[kind].rate <= RATES[kind]


def test_documentation_stays_readable() -> None:
    pages = totals_by_kind(
        collect_texts([ROOT / "docs", ROOT / "README.md", ROOT / "CHANGELOG.md"])
    )
    assert pages["paragraph"].rate <= 30


def test_each_folder_is_imported_by_a_test() -> None:
    assert untested_folders(syntax_trees(), syntax_trees(ROOT / "tests")) == []


def test_a_rank_imports_at_most_eighteen_modules() -> None:
    assert len(imports(syntax_trees())["autopipe.backends.torch.runtime.rank"]) <= 18


def test_hits_have_weights_and_code_is_ignored(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("What the plan holds stands in the file `what stands here`, in one place.\n")
    total = totals_by_kind(collect_texts([page]))["paragraph"]
    assert total.hits["what-clause"] == 1
    assert total.hits["stand-lie-come"] == 1
    assert total.words == word_count("What the plan holds stands in the file X in one place")
