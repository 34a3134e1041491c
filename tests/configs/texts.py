"""Configurations written in tests."""

from __future__ import annotations

from autopipe.configs.configuration import Configuration, merged_configuration
from autopipe.configs.yaml_source import read_text


def parse_configuration(text: str, source: str) -> Configuration:
    """The configuration written in a YAML text; `source` names it in errors."""
    return merged_configuration([read_text(text, source)])
