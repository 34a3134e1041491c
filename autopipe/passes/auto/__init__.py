"""Strategy `auto`: search all strategies and schedules for the plan with the shortest simulated
step.

`candidates` lists the candidates, which are strategies with their options. `search` tries them,
`choose` controls the order of the search, `workers` runs strategies in other processes, and
`plan_cache` stores results between runs. This package may import all modules that create a plan.
Only `explain`, `export`, `api` and `cli` import it.
"""
