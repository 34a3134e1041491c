"""Modes of a run other than plain training or inference: dry run, blocking communication,
validation, token generation, and recording for verification.
"""
