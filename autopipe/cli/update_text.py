"""How a run updates its parameters, in a line."""

from __future__ import annotations

from autopipe.ir.training import LRScheduler, Training


def update_line(name: str, lr: float, scheduler: LRScheduler, training: Training) -> str:
    """Such as `adamw, lr 0.001 with 100 warm-up steps, then cosine; max_norm 1`."""
    text, rate = f"{name}, lr {lr:g}", []
    if scheduler.warmup_steps:
        rate.append(f"{scheduler.warmup_steps} warm-up step{'s' if scheduler.warmup_steps > 1 else ''}")
    if scheduler.decay_type != "constant":
        last = "" if scheduler.decay_ratio is None else f" in the last {scheduler.decay_ratio:.0%} of the steps"
        floor = f" to {scheduler.min_lr_factor * lr:g}" if scheduler.min_lr_factor else ""
        rate.append(f"{scheduler.decay_type} decay{last}{floor}")
    text += f" with {', then '.join(rate)}" if rate else ""
    batches = training.gradient_accumulation_steps
    more = {
        "max_norm": training.max_norm,
        "ema_decay": training.ema_decay,
        "gradient_accumulation_steps": None if batches == 1 else batches,
    }
    return "; ".join([text, *(f"{key} {value:g}" for key, value in more.items() if value is not None)])
