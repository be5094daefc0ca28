"""``ottava analyze --served``: the numerics of a trainer and of a server, side by side."""
