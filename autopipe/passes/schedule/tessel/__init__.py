"""Schedule search of Lin et al., "Tessel" (HPCA 2024): finds the steady state of a block schedule,
and its warm-up and cool-down. A block is one phase of one stage; its steady state repeats with a
fixed period.

`model` contains bounds and constraints, `periodic` searches the steady state (the paper's
repetend), and `search` adds warm-up and cool-down. `stage_blocks` and `scheduler` apply the search
to the stages of a placement.

A block graph contains the blocks of one micro-batch. If a placement has several pipelines, the
block graph contains a group of micro-batches, one per pipeline; this package then calls such a
group a micro-batch.
"""
