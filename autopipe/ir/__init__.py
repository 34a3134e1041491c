"""Immutable values that the planning passes exchange: graph, problem, placement, schedule, plan and
program.

`ir/ops` defines the operators. `ir/codec` converts the values to JSON and YAML and back. This
package imports no other package of autopipe.
"""

VERSION = "0.1.0"
"""Version of autopipe."""
