"""From a `Program` to Python text."""
