"""Everything from the file to the plan: `frontend` reads, `analysis` and `cost` weigh, `placement`
and `schedule` decide, `lower` makes the task graph; `pipeline` runs them in that order, `auto` over
all strategies, `explain` and `export` look back.

It imports ir alone; which pass may import which stands in setup.cfg (contract `passes`).
"""
