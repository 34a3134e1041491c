"""A schedule in the CSV of `torch.distributed.pipelining`: a row a rank, computation alone."""

from __future__ import annotations

from autopipe.cli.drawing.picture import Picture


def orders_csv(picture: Picture) -> str:
    """Each device's tasks in order as stage, action (F, B, I or W) and micro-batch, such as `0F0,0F1,1F0`.

    Blocks have the stages that their names tell, numbered in order of their first mention.
    """
    rows = (",".join(f"{bar.stage}{bar.phase.value}{bar.unit}" for bar in row) for row in picture.rows)
    return "".join(f"{row}\n" for row in rows)
