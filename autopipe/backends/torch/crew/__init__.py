"""Ranks that stay: processes of one gloo world that run program after program, so that torch starts only once."""
