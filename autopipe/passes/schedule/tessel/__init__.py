"""Lin et al., "Tessel" (HPCA 2024): the search for a block schedule's repetend, its warm-up and its
cool-down.

`model` has bounds and rules, `periodic` the repetend, `search` its ends and puts them together;
`stage_blocks` and `scheduler` apply it to stages. May import ir, solvers and what else is in
schedule.
"""
