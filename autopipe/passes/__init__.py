"""Transforms between the values of `autopipe.ir`."""
