"""State dicts with quantized tensors as plain tensors, for safetensors, DCP, or whatever takes tensors by name."""

from ottava.checkpoint.files import load_file, save_file
from ottava.checkpoint.flatten import flatten_state_dict, unflatten_state_dict

__all__ = ["flatten_state_dict", "load_file", "save_file", "unflatten_state_dict"]
