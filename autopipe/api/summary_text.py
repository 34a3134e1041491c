"""One-line texts of the predictions of a plan, which `--json` contains too."""

from __future__ import annotations

from autopipe.ir.plan import Summary


def degrees_text(summary: Summary) -> str:
    """Return the degrees, the rate per device and the MFU; "" for a plan of an earlier version of
    autopipe.
    """
    if summary.degrees is None:
        return ""
    return f"{summary.degrees.text}; {rate_text(summary)}"


def rate_text(summary: Summary) -> str:
    """Return what a device processes per second and the MFU, such as `758 tokens/s per device, MFU
    35.1%`.
    """
    rate, unit = summary.rate_per_device
    mfu = "" if summary.mfu is None else f", MFU {summary.mfu:.1%}"
    return f"{number_text(rate)} {unit} per device{mfu}"


def number_text(number: float) -> str:
    """Return a number with three significant digits, or as an integer if it has more before the
    point.
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
