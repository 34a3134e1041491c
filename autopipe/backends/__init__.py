"""Where programs run: emission, runtimes and launchers."""
