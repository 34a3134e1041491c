"""Orders that somebody else chose."""
