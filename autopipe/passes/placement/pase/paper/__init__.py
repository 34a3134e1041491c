"""PaSE's own search space and cost model, to reproduce its tables: splits as the paper has them, executable or not."""
