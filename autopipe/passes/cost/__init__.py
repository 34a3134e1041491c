"""What work, communication and memory cost: of a node, of a stage, of a placement; and what strategies share."""
