"""Immutable values that passes exchange: graph, problem, placement, schedule, plan and program.

`ir/ops` defines the operators; `ir/codec` reads and writes the values as JSON and YAML. This
package imports no other package of autopipe.
"""

VERSION = "0.1.0"
"""Version of autopipe."""
