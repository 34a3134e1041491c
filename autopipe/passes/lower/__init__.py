"""From a plan to a `Program`: local operators, communication, and each rank's order."""
