"""A recipe package from outside the project."""
