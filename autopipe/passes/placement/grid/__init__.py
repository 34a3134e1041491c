"""Pipeline, data and tensor parallelism multiplied, as large models are run by hand."""
