"""``ottava new-recipe`` writes a complete recipe package to start from."""
