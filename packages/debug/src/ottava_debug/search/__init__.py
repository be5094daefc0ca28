"""``ottava bisect``: a captured step is run again, with operands quantized and not, until what
breaks it is found."""
