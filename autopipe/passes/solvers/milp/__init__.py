"""The door to integer linear programs: CBC through PuLP, and HiGHS through scipy.

No solver is taken at its word: every answer's constraints are checked again, with the program's own numbers.
"""

from autopipe.passes.solvers.milp.model import Builder, Model
from autopipe.passes.solvers.milp.solve import MilpResult, SolverName, Status, solve

__all__ = ["Builder", "MilpResult", "Model", "SolverName", "Status", "solve"]
