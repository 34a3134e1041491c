"""The data every pass works on, and nothing else."""
