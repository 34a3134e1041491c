"""Files that users write and that ship with autopipe: YAML schemas, clusters, recipes and the model zoo."""
