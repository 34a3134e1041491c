"""The search for splits inside a stage: configurations of nodes, what they cost, tables of a min-sum problem."""
