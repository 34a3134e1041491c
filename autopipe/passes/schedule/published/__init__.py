"""Schedules as their papers publish them."""
