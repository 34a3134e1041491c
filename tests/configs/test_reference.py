"""The reference names every key, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from autopipe.configs.configuration import Configuration, flags
from autopipe.configs.reference import reference
from autopipe.ir.codec import keys


def test_every_key_and_flag_is_explained() -> None:
    rows = [line.split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    names = [row[0].removeprefix("| ").strip("`") for row in rows]
    assert {key.name for key in keys(Configuration)} <= set(names)
    assert {"optimizer.lr", "constraints[].split", "loss.cross_entropy.logits", "strategy.…"} <= set(names)
    assert all(len(row[3]) > 5 for row in rows), "a key has no docstring"
    text = reference()
    assert all(f"Flag: `{flag}`" in text for flag in flags())
    assert '| `strategy.name` | text | `"auto"` |' in text


def test_the_module_prints_it() -> None:
    printed = subprocess.run([sys.executable, "-m", "autopipe.configs.reference"], capture_output=True, check=True)
    assert printed.stdout.decode() == reference()


def test_the_page_in_the_documentation_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference-configuration.md"
    advice = "python -m autopipe.configs.reference > docs/reference-configuration.md"
    assert page.read_text(encoding="utf-8").startswith(reference()), f"run: {advice}"
