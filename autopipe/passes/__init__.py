"""The passes that turn a model file into a plan.

`frontend` reads the model. `analysis` and `cost` derive properties and costs of the graph.
`placement` chooses the stages and their devices, and `schedule` the order of their tasks. `lower`
builds the task graph. `pipeline` runs these passes in order, and `auto` runs them for all
strategies. `explain` explains a finished plan, and `export` writes trained weights.

The contract `passes` in setup.cfg defines which pass may import which other pass. From other
packages of autopipe, passes import only `ir`.
"""
