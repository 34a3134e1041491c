"""The cost model: seconds and bytes of nodes, stages, collectives and messages.

The time of a node follows from a roofline model or from measurements. Strategies and schedulers
read the costs of stages from `stages`; searches over chains of operators read them from
`range_tables`. This package imports `ir` and `passes/analysis`.
"""
