"""Schedulers, one a file, and the simulation that says what a schedule takes."""
