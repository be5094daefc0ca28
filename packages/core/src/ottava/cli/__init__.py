"""The ``ottava`` command."""
