"""Strategy `graphpipe`: pipeline stages that keep parallel branches of a model parallel (Jeon et
al., "GraphPipe", 2024).

- `series_parallel` decomposes the graph into a series-parallel tree and a chain of blocks;
- `stage_costs` computes the cost of each contiguous range of blocks as a stage;
- `search` finds the minimum number of devices on which all stages meet a target time;
- `micro_batch_search` searches target times and micro-batch sizes;
- `strategy` is the placement strategy.

The package imports schedule, sharding, partition, cost, analysis and solvers, but no other
strategy.
"""
