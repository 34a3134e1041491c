"""Schedule search of Lin et al., "Tessel" (HPCA 2024): the steady state of a block schedule, and
its warm-up and cool-down.

`model` contains bounds and constraints, `periodic` searches the steady state (the paper's
repetend), and `search` adds warm-up and cool-down. `stage_blocks` and `scheduler` apply the search
to the stages of a placement.

A block graph contains the blocks of one micro-batch. If a placement has several pipelines, it
contains those of a group of micro-batches, one per pipeline; such a group is called a micro-batch
here.
"""
