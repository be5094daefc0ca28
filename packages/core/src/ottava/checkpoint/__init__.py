"""Checkpoints: state dicts with quantized tensors as plain tensors, in safetensors files and
DCP."""

from ottava.checkpoint.flatten import flatten_state_dict, load_file, save_file, unflatten_state_dict
from ottava.checkpoint.model import load_model, save_model, without_state
from ottava.checkpoint.reading import read_state
from ottava.checkpoint.sharded import (
    is_complete,
    latest_checkpoint,
    load_sharded,
    save_sharded,
    save_step,
)

__all__ = [
    "flatten_state_dict",
    "is_complete",
    "latest_checkpoint",
    "load_file",
    "load_model",
    "load_sharded",
    "read_state",
]
__all__ += [
    "save_file",
    "save_model",
    "save_sharded",
    "save_step",
    "unflatten_state_dict",
    "without_state",
]
