"""Modes of a run other than plain training: dry run, blocking communication, validation,
generation, and recorded steps for verification.
"""
