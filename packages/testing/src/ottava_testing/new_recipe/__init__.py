"""``ottava new-recipe``: a complete recipe package to start from."""
