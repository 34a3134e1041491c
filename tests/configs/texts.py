"""Configurations written in tests."""

from __future__ import annotations

from autopipe.configs.configuration import Configuration, effective
from autopipe.configs.yaml_source import read_text


def parse_configuration(text: str, source: str) -> Configuration:
    """The configuration written in a YAML text; `source` names it in errors."""
    return effective([read_text(text, source)])
