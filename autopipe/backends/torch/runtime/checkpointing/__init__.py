"""Saving a run's training state while it goes on, and going on from it under any plan of the same model."""
