"""``ottava demo``: a small GPT on the standard library's source code, in BF16 and in every recipe."""
