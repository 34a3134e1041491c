"""Input samples: sources, their order and checks, batches of a rank; and outputs of inference."""
