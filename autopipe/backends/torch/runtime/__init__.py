"""What generated programs import: this and torch, nothing else of autopipe."""
