"""The generated pages of docs/ equal the declarations of commands, keys, options and operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.cli.main import COMMANDS
from autopipe.configs.configuration import OPTION_FLAGS, flags
from autopipe.configs.zoo import MODELS
from scripts.reference_pages import GENERATED, commands_page, models_page, options_page, pages

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", sorted(pages()))
def test_the_page_in_the_documentation_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == pages()[name], (
        "run: python scripts/reference_pages.py docs"
    )


def test_no_page_is_left_over() -> None:
    generated = {
        path.relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*.md")
        if path.read_text(encoding="utf-8").startswith(GENERATED)
    }
    assert generated == set(pages())


def test_every_command_and_flag_of_a_configuration_is_explained() -> None:
    text = commands_page()
    headings = [line.split()[2] for line in text.splitlines() if line.startswith("## autopipe ")]
    assert set(headings) == set(COMMANDS)
    plan = text.split("## autopipe plan [MODEL]")[1].split("\n## ")[0]
    rows = {row.split("`")[1]: row for row in plan.splitlines() if row.startswith("| `")}
    own = {"-o", "--from", "--annotate", "--dump-after", "--force", "--no-cache"}
    assert {*flags(), *OPTION_FLAGS, *own, "--config", "--set", "--dim", "--batch-axis"} == set(
        rows
    )
    assert all(len(row.rsplit(" | ", 1)[1]) > 10 for row in rows.values()), "a flag has no help"
    assert "autopipe plan gpt.onnx --gpus 4\n" in plan
    assert "| `--device` | `auto` or `cuda` or `cpu` | `auto` |" in text
    assert "| `--max-restarts` | an integer from 0 |  |" in text
    assert "| `--start-timeout` | a number from 0 | `1800` |" in text


def test_every_strategy_scheduler_and_model_is_explained() -> None:
    options = options_page()
    for name in ("data_parallel", "manual", "pipedream", "1f1b", "gpipe"):
        assert f"### {name}\n" in options
    assert "| `max_stages` |" in options
    models = models_page()
    assert all(f"## {name}\n" in models for name in MODELS)
    assert models.count("| `seed` |") == 1, "keys of all models stand once"
    assert "| `layers` |" in models.split("## gpt\n")[1].split("\n## ")[0]
