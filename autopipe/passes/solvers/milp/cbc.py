"""CBC, the solver that PuLP brings: PuLP writes the program and reads the answer.

CBC is started here, not by PuLP: its time limit does not hold in the first relaxation, which may last minutes.
"""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import AutopipeError
from autopipe.passes.solvers.milp.claim import Limits, SolverReport
from autopipe.passes.solvers.milp.model import Model

if TYPE_CHECKING:
    from pulp import LpProblem

_GRACE_S = 1.0
"""From the end of the time limit until CBC is told to stop, and from then until it is ended."""
_LOWER_BOUND = re.compile(r"^Lower bound:\s*(\S+)", re.MULTILINE)


def by_cbc(model: Model, limits: Limits, start: NDArray[np.float64] | None) -> SolverReport:
    """Run CBC on one thread, begun from the values `start` where there are some.

    Raises AutopipeError where PuLP has no CBC for this machine.
    """
    import pulp

    solver = pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False)
    if not solver.available():
        raise AutopipeError("PuLP has no CBC for this machine", hint="let HiGHS solve integer programs")
    with tempfile.TemporaryDirectory(prefix="autopipe-cbc-") as folder:
        program, answer, begun = (Path(folder) / name for name in ("program.mps", "answer.sol", "start.mst"))
        problem = _problem(model, start)
        variables, names, constraints, _ = problem.writeMPS(str(program), rename=1)
        command = [solver.path, str(program)]
        if start is not None:
            solver.writesol(str(begun), problem, variables, names, constraints)
            command += ["-mips", str(begun)]
        command += f"-sec {limits.seconds} -timeMode elapsed -threads 1 -randomSeed {limits.seed + 1}".split()
        command += f"-randomCbcSeed {limits.seed + 1} -ratio {limits.gap} -allow 0".split()
        if limits.nodes is not None:
            command += f"-maxNodes {limits.nodes}".split()
        log = _run([*command, "-solve", "-printingOptions", "all", "-solution", str(answer)], limits.seconds)
        if not answer.exists():
            return SolverReport()
        status, by_name, *_, sol_status = solver.readsol_MPS(str(answer), problem, variables, names, constraints)
    values = np.zeros(model.variables)
    for name, value in by_name.items():
        values[int(name[1:])] = value
    # The first line speaks of the linear relaxation too: only these two say that there are values.
    found = sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    told = _LOWER_BOUND.search(log)
    bound = float(told[1]) if told else -np.inf
    if sol_status == pulp.LpSolutionOptimal and limits.gap == 0:
        bound = model.objective(values)
    return SolverReport(
        values if found else None,
        bound,
        status == pulp.LpStatusInfeasible and sol_status == pulp.LpSolutionInfeasible,
        status == pulp.LpStatusUnbounded,
    )


def _problem(model: Model, start: NDArray[np.float64] | None) -> LpProblem:
    """The model in PuLP's terms; variable i is named `x{i}`, and a row with two bounds is written twice."""
    import pulp

    problem = pulp.LpProblem("autopipe")
    kinds = np.where(model.integral, pulp.LpInteger, pulp.LpContinuous).tolist()
    finite = [
        [None if abs(each) == np.inf else each for each in bounds.tolist()] for bounds in (model.lower, model.upper)
    ]
    variables = [
        problem.add_variable(f"x{index}", lower, upper, kind)
        for index, (lower, upper, kind) in enumerate(zip(*finite, kinds, strict=True))
    ]
    for variable, value in zip(variables, start.tolist() if start is not None else (), strict=False):
        variable.setInitialValue(value, check=False)
    problem += pulp.LpAffineExpression(list(zip(variables, model.cost.tolist(), strict=True)))
    starts, columns, values = model.starts.tolist(), model.columns.tolist(), model.values.tolist()
    for row, (lower, upper) in enumerate(zip(model.row_lower.tolist(), model.row_upper.tolist(), strict=True)):
        terms = [(variables[columns[place]], values[place]) for place in range(starts[row], starts[row + 1])]
        sides = [(lower, pulp.LpConstraintEQ)] if lower == upper else []
        sides = sides or [(lower, pulp.LpConstraintGE), (upper, pulp.LpConstraintLE)]
        for side, (limit, sense) in enumerate(sides):
            if abs(limit) < np.inf:
                expression = pulp.LpAffineExpression()
                for variable, value in terms:
                    expression.addterm(variable, value)
                problem.addConstraint(pulp.LpConstraint(expression, sense, f"r{row}_{side}", limit))
    return problem


def _run(command: list[str], seconds: float) -> str:
    """Output of CBC; it is told to stop, and at last ended, where it does not keep its time."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            return process.communicate(timeout=seconds + _GRACE_S)[0]
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        except BaseException:
            process.kill()
            raise
        try:
            return process.communicate(timeout=_GRACE_S)[0]
        except subprocess.TimeoutExpired:
            return ""
        finally:
            process.kill()
