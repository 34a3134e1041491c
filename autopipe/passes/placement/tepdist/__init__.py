"""Strategy `tepdist`: searches pipeline stages, the device mesh of each stage, the micro-batch size
and the splits of all operators (Alibaba PAI, "TePDist", 2023).

`strategy` runs the outer search over stages, meshes and micro-batch sizes. `intra_stage` searches
the splits inside the stages. `levels` contains the solvers O2, O3 and O4 for these splits, which
use the cones and segments of `segments` and the `integer_programs`.

This package imports schedule, sharding, partition, cost, analysis and solvers, and no other
strategy.
"""
