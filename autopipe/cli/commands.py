"""The table of commands, so that the group can list them without importing any."""

from __future__ import annotations

from typing import Final

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "inspect": ("autopipe.cli.inspect:inspect", "Say what a model is, and what of it is not supported."),
    "plan": ("autopipe.cli.plan:plan", "Decide which device computes what, and when."),
    "codegen": ("autopipe.cli.codegen:codegen", "Write one PyTorch program a device for a plan."),
    "launch": ("autopipe.cli.launch:launch", "Run a program's ranks on the devices at hand."),
    "verify": ("autopipe.cli.verify:verify", "Check that the ranks compute what one device computes."),
    "show": (
        "autopipe.cli.show:show",
        "Show a plan's or a schedule's timeline and memory, in the terminal or as a page.",
    ),
    "explain": (
        "autopipe.cli.explain:explain",
        "Say why a plan is as it is, and what other choices would have cost.",
    ),
    "compare": ("autopipe.cli.compare:compare", "Show plans side by side."),
    "schedule": ("autopipe.cli.schedule:schedule", "Search the best schedule of blocks given by hand."),
    "profile": ("autopipe.cli.profile:profile", "Measure what a model's operators take on the machine at hand."),
    "checkpoint": (
        "autopipe.cli.checkpoint.command:checkpoint",
        "Look at checkpoints, check them, write trained weights as ONNX.",
    ),
    "zoo": ("autopipe.cli.zoo:zoo", "Build models of the papers as ONNX files."),
    "bench": (
        "autopipe.cli.bench.command:bench",
        "Compute papers' tables again, beside their own, and hold predictions against runs.",
    ),
    "config": ("autopipe.cli.config:config", "Show and check configurations, list cluster presets."),
}
"""A command's name -> (`module:attribute` of its click command, what the list of commands says of it).

One line a command, in the order a user meets them.
"""
