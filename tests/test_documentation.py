"""Checks of README.md, CONTRIBUTING.md and docs/: links, module paths, and the list of pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
}
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
MODULE = re.compile(
    r"`(?P<path>(?:autopipe/|tests/|scripts/|benchmarks/|examples/|ir/|passes/|backends/|configs/"
    r"|api/|cli/)[\w./-]*)`"
)
"""A file or folder of the checkout, or of the package if it starts with one of its folders."""
CODE = re.compile(r"```.*?```", re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as mkdocs and GitHub derive them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    wrong = []
    for link in LINK.finditer(CODE.sub("", PAGES[page])):
        target = (ROOT / page).parent / link["path"] if link["path"] else ROOT / page
        anchor = link["anchor"]
        if not target.exists() or (anchor and anchor not in anchors(target.read_text("utf-8"))):
            wrong.append(link[0])
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    missing = {
        path
        for path in (found["path"] for found in MODULE.finditer(PAGES[page]))
        if not (ROOT / path).exists() and not (ROOT / "autopipe" / path).exists()
    }
    assert not missing


def test_every_page_is_in_the_navigation_once() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        assert isinstance(children, list | type({}.values()))
        return [page for child in children for page in pages(child)]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(
        page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")
    )
