"""The passes from the model file to the plan.

`frontend` reads the model. `analysis` and `cost` examine the graph. `placement` and `schedule`
choose stages and order. `lower` builds the task graph. `pipeline` runs these passes in order,
`auto` runs them for all strategies, and `explain` and `export` use the finished plan.

The contract `passes` in setup.cfg defines which pass may import which. Outside of this package,
passes import only `ir`.
"""
