"""The table of commands, so that the group can list them without importing any."""

from __future__ import annotations

from typing import Final

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "plan": ("autopipe.cli.plan:plan", "Decide which device computes what, and when."),
    "codegen": ("autopipe.cli.codegen:codegen", "Write one PyTorch program a device for a plan."),
    "verify": ("autopipe.cli.verify:verify", "Check that the ranks compute what one device computes."),
    "zoo": ("autopipe.cli.zoo:zoo", "Build models of the papers as ONNX files."),
    "config": ("autopipe.cli.config:config", "Show and check configurations, list cluster presets."),
}
"""A command's name -> (`module:attribute` of its click command, what the list of commands says of it).

One line a command, in the order a user meets them.
"""
