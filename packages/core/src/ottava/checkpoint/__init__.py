"""State dicts with quantized tensors as plain tensors, for safetensors, DCP, or whatever takes tensors by name."""

from ottava.checkpoint.convert import Conversion, convert_file
from ottava.checkpoint.distributed import load_sharded, save_sharded, save_step
from ottava.checkpoint.files import load_file, save_file
from ottava.checkpoint.flatten import flatten_state_dict, unflatten_state_dict
from ottava.checkpoint.folder import is_complete, latest_checkpoint
from ottava.checkpoint.model import load_model, save_model
from ottava.checkpoint.pieces import ShardedSource
from ottava.checkpoint.reader import SafetensorsFile
from ottava.checkpoint.sources import TensorSource, open_source, register_source

__all__ = [
    "Conversion",
    "SafetensorsFile",
    "ShardedSource",
    "TensorSource",
    "convert_file",
    "flatten_state_dict",
    "is_complete",
    "latest_checkpoint",
    "load_file",
    "load_model",
    "load_sharded",
    "open_source",
    "register_source",
    "save_file",
    "save_model",
    "save_sharded",
    "save_step",
    "unflatten_state_dict",
]
