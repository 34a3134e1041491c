"""One-line texts about a plan: its parallel degrees and predictions, and its optimizer."""

from __future__ import annotations

from autopipe.ir.plan import Summary
from autopipe.ir.training import LRScheduler, Training
from autopipe.ir.words import plural


def degrees_text(summary: Summary) -> str:
    """Return the parallel degrees, the throughput of a device and the MFU; "" for a plan of a
    version of autopipe that did not record degrees.
    """
    if summary.degrees is None:
        return ""
    return f"{summary.degrees.text}; {rate_text(summary)}"


def rate_text(summary: Summary) -> str:
    """Return the throughput of a device and the MFU (model FLOPs utilisation), such as `758
    tokens/s per device, MFU 35.1%`.
    """
    rate, unit = summary.rate_per_device
    mfu = "" if summary.mfu is None else f", MFU {summary.mfu:.1%}"
    return f"{number_text(rate)} {unit} per device{mfu}"


def number_text(number: float) -> str:
    """Return a number with three significant digits, or as an integer if it is 100 or larger."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def update_text(name: str, lr: float, scheduler: LRScheduler, training: Training) -> str:
    """Return the optimizer and its settings, for example `adamw, lr 0.001 with 100 warm-up steps,
    then cosine decay; max_norm 1`.
    """
    text = f"{name}, lr {lr:g}"
    rate = []
    if scheduler.warmup_steps:
        rate.append(f"{scheduler.warmup_steps} {plural(scheduler.warmup_steps, 'warm-up step')}")
    if scheduler.decay_type != "constant":
        last = (
            ""
            if scheduler.decay_ratio is None
            else f" in the last {scheduler.decay_ratio:.0%} of the steps"
        )
        floor = f" to {scheduler.min_lr_factor * lr:g}" if scheduler.min_lr_factor else ""
        rate.append(f"{scheduler.decay_type} decay{last}{floor}")
    text += f" with {', then '.join(rate)}" if rate else ""
    batches = training.gradient_accumulation_steps
    more = {
        "max_norm": training.max_norm,
        "ema_decay": training.ema_decay,
        "gradient_accumulation_steps": None if batches == 1 else batches,
    }
    return "; ".join(
        [text, *(f"{key} {value:g}" for key, value in more.items() if value is not None)]
    )
