"""The five shapes of placement that Tessel is evaluated on, for real models."""
