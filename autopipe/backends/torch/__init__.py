"""PyTorch: emission, runtime, launcher, checkpoint."""
