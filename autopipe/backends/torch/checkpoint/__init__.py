"""Checkpoints on disk: their form, their folder, and reading them; numpy at most, so that no torch is needed."""
