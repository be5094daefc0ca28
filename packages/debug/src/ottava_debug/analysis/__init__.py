"""``ottava analyze``: how well each recipe would represent a checkpoint or a model, by tensor."""
