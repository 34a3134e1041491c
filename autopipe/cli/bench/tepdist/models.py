"""Problems of the paper: models of the zoo on V100 of 32 GB, trained in fp32."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.cli.bench.zoo_graph import Settings, zoo_graph
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.problem import Mode, Optimizer, Problem
from autopipe.passes.cost.roofline import annotate

CLUSTER = "tepdist-m8"
"""Preset: the paper's servers of eight devices on NVLink, 100 Gb/s between them."""

MACHINE = (
    "V100-32GB by data sheet (fp32, 75% of the peak in products, 60% in convolutions), eight a server, 50 GB/s in it, "
    "12.5 GB/s between"
)

SGD, ADAM = Optimizer(), Optimizer("adamw")


@dataclass(frozen=True, slots=True)
class Training:
    """Steps of a model of the zoo, with its loss, on so many devices."""

    model: str
    settings: Settings
    devices: int
    batch: int
    """Samples of a step."""
    optimizer: Optimizer = SGD
    memory_limit: int | None = None
    """Bytes a device; its own memory where there is none."""
    largest: int | None = None
    """Samples of the largest micro-batch that a strategy may choose; those of a step where there is no limit."""

    @property
    def free(self) -> Problem:
        """The problem where a strategy chooses micro-batches, and stages recompute if memory asks for it."""
        largest = self.largest or self.batch
        sizes = tuple(size for size in range(1, largest + 1) if largest % size == 0)
        return self._problem(largest, "auto", sizes)

    def given(self, micro_batch_size: int) -> Problem:
        """The problem on micro-batches of one size, without recomputation."""
        return self._problem(micro_batch_size, "none", ())

    def _problem(self, micro_batch_size: int, recompute: str, sizes: tuple[int, ...]) -> Problem:
        graph = zoo_graph(self.model, self.settings, micro_batch_size)
        return Problem(
            graph,
            annotate(graph),
            build_cluster(cluster_preset(CLUSTER), self.devices, None, None),
            self.batch,
            self.batch // micro_batch_size,
            Mode.TRAIN,
            "loss",
            self.optimizer,
            recompute=recompute,
            memory_limit=self.memory_limit,
            micro_batch_sizes=sizes,
        )


def step_flops(problem: Problem) -> float:
    """Operations of a step's forwards and backwards; what recomputation repeats is not counted."""
    return problem.micro_batches * sum(work.forward_flops + work.backward_flops for work in problem.work)
