"""What users write and what ships with autopipe: YAML schemas, clusters, recipes and the model zoo."""
