"""Papers' tables and figures, computed again: one module a table, theirs and ours side by side."""
