"""The best plan that any strategy and any schedule give, and what every other one would have cost."""
