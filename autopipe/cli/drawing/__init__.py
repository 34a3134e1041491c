"""Pictures of a plan: in the terminal, as SVG, as a page, as a trace."""
