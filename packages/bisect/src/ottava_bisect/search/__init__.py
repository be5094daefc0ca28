"""``ottava bisect``: replays a captured step with some operands quantized, to find those that break
it."""
