"""One-line texts of the predictions of a plan, which `--json` contains too."""

from __future__ import annotations

from autopipe.ir.plan import Summary


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
