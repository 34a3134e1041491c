"""Pipeline stages by integer program."""

from autopipe.passes.placement.tepdist.division.divide import StageDivision, divide

__all__ = ["StageDivision", "divide"]
