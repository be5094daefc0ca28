"""``ottava analyze``: what each recipe would make of a checkpoint or a model, tensor by tensor."""
