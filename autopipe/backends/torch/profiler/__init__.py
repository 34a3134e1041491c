"""Measuring what operators, tasks and exchanges take on the device at hand."""
