"""The values every pass works on, frozen and without behaviour of their own: graph, problem,
placement, schedule, plan, program; `ir/ops` has a row an operator, `codec` reads and writes
documents. May import numpy and nothing of ours.
"""

VERSION = "0.1.0"
"""Of autopipe."""
