"""The reference names every key, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from autopipe.configs.configuration import Configuration, top_level_flags
from autopipe.ir.codec import schema_keys
from scripts.reference_pages import configuration_page, generated_pages


def test_every_key_and_flag_is_explained() -> None:
    rows = [
        line.split(" | ") for line in configuration_page().splitlines() if line.startswith("| `")
    ]
    names = [row[0].removeprefix("| ").strip("`") for row in rows]
    assert {key.name for key in schema_keys(Configuration)} <= set(names)
    assert {
        "optimizer.lr",
        "constraints[].split",
        "loss.cross_entropy.logits",
        "strategy.…",
    } <= set(names)
    assert all(len(row[3]) > 5 for row in rows), "a key has no docstring"
    text = configuration_page()
    assert all(f"Flag: `{flag}`" in text for flag in top_level_flags())
    assert '| `strategy.name` | text | `"auto"` |' in text


def test_the_script_writes_it(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "reference_pages.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    written = {
        path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8")
        for path in tmp_path.rglob("*.md")
    }
    assert written == generated_pages()
