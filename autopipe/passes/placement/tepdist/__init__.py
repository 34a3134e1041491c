"""TePDist: stages, the mesh of each, micro-batches and splits in one search (Alibaba PAI, 2023):
`strategy` tries meshes, `intra_stage` the splits of their stages, by the `levels` on cones and
`segments`, solved as `integer_programs`.

It imports what stands below placement (schedule, sharding, partition, cost, analysis, solvers), and
no other strategy.
"""
