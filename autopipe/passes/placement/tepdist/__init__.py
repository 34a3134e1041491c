"""Strategy `tepdist`: searches stages, their device meshes, micro-batch size and splits (Alibaba
PAI, "TePDist", 2023).

`strategy` runs the outer search over meshes. `intra_stage` searches the splits inside the stages.
`levels` contains the solvers O2, O3 and O4, which use the cones and segments of `segments` and the
`integer_programs`.

This package imports schedule, sharding, partition, cost, analysis and solvers, and no other
strategy.
"""
