"""The generated pages of docs/ equal the declarations of commands, keys, options and operators."""

from __future__ import annotations

import functools
from pathlib import Path

from autopipe.cli.main import COMMANDS
from autopipe.configs.configuration import OPTION_FLAGS, top_level_flags
from autopipe.configs.zoo import MODELS
from scripts.reference_pages import GENERATED, generated_pages

DOCS = Path(__file__).parents[2] / "docs"


@functools.cache
def generated() -> dict[str, str]:
    """Return the text of each generated page by its path below docs/."""
    return generated_pages()


def test_pages_in_the_documentation_are_up_to_date() -> None:
    for name, text in generated().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, (
            f"{name}: run: python scripts/reference_pages.py docs"
        )


def test_no_page_is_left_over() -> None:
    found = {
        path.relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*.md")
        if path.read_text(encoding="utf-8").startswith(GENERATED)
    }
    assert found == set(generated())


def test_every_command_and_flag_of_a_configuration_is_explained() -> None:
    text = generated()["reference/commands.md"]
    headings = [line.split()[2] for line in text.splitlines() if line.startswith("## autopipe ")]
    assert set(headings) == set(COMMANDS)
    plan = text.split("## autopipe plan [MODEL]")[1].split("\n## ")[0]
    rows = {row.split("`")[1]: row for row in plan.splitlines() if row.startswith("| `")}
    own = {"-o", "--from", "--annotate", "--dump-after", "--force", "--no-cache"}
    assert {
        *top_level_flags(),
        *OPTION_FLAGS,
        *own,
        "--config",
        "--set",
        "--dim",
        "--batch-axis",
    } == set(rows)
    assert all(len(row.rsplit(" | ", 1)[1]) > 10 for row in rows.values()), "a flag has no help"
    assert "autopipe plan gpt.onnx --gpus 4\n" in plan
    assert "| `--device` | `auto` or `cuda` or `cpu` | `auto` |" in text
    assert "| `--max-restarts` | an integer from 0 |  |" in text
    assert "| `--start-timeout` | a number from 0 | `1800` |" in text


def test_every_strategy_scheduler_and_model_is_explained() -> None:
    options = generated()["reference/strategies.md"]
    for name in ("data_parallel", "manual", "pipedream", "1f1b", "gpipe"):
        assert f"### {name}\n" in options
    assert "| `max_stages` |" in options
    models = generated()["reference/models.md"]
    assert all(f"## {name}\n" in models for name in MODELS)
    assert models.count("| `seed` |") == 1, "keys of all models stand once"
    assert "| `layers` |" in models.split("## gpt\n")[1].split("\n## ")[0]
