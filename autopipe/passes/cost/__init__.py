"""Costs of work, communication and memory: of a node, of a stage, of a placement; and parts that strategies share."""
