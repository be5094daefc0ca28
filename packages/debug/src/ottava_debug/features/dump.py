"""A feature that writes the tensors of products to files."""

import hashlib
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import torch
from nvdlfw_inspect.logging import get_logger  # type: ignore[import-untyped]
from nvdlfw_inspect.registry import api_method  # type: ignore[import-untyped]

from ottava.checkpoint import save_file
from ottava.errors import OptionError
from ottava.filesystem import AnyPath
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.features.base import Feature, Target
from ottava_debug.located import BOOLEAN, Check
from ottava_debug.log_files import own_rank

#: The folder in ``log_dir``.
FOLDER = "tensor_dumps"
# The options that choose what is written.
_HIGH_PRECISION = "high_precision_tensor"
_QUANTIZED = "quantized_tensor"
_INTERNALS = "dump_quantized_internals"
# The largest number of characters of a layer's name in the name of a file.
_LONGEST = 100


def file_name(layer: str, tensor: str, step: int, number: int) -> str:
    """The name of a file: ``LAYER.TENSOR.step-000012.0.safetensors``.

    A layer's name that is too long or cannot be the name of a file is changed, and gets a digest,
    so that the names of two layers differ.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", layer).lstrip(".")[:_LONGEST]
    if safe != layer or not safe:
        digest = hashlib.blake2b(layer.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
        safe = f"{safe}-{digest}"
    return f"{safe}.{tensor}.step-{step:06d}.{number}.safetensors"


class DumpTensors(Feature):
    """Writes the tensors of products, each to a safetensors file
    ``log_dir/tensor_dumps/rank-00000/NAME``.

    The name is ``LAYER.TENSOR.step-STEP.NUMBER.safetensors``. The microbatches of a step are
    numbered from 0, and a weight is written once a step. :func:`ottava.checkpoint.load_file` and
    every tool for safetensors read the files.

    Options: ``tensors`` or ``tensors_struct``, ``freq`` and ranges of steps, and these, which
    choose the entries of a file:

    - ``high_precision_tensor``: the tensor, as ``high_precision``;
    - ``quantized_tensor``: the quantized values that products take, decoded to float32, as
      ``quantized``;
    - ``dump_quantized_internals``, with ``quantized_tensor``: the data and the scales, as
      ``internals.NAME``, which ``load_file`` turns into the quantized tensor ``internals``.

    Args:
        log_dir: the folder in which the folder of the files is created; None is that of
            nvdlfw-inspect.
    """

    by_tensor = True
    options: ClassVar[dict[str, Check]] = {
        _HIGH_PRECISION: BOOLEAN,
        _QUANTIZED: BOOLEAN,
        _INTERNALS: BOOLEAN,
    }

    def __init__(self, log_dir: AnyPath | None = None) -> None:
        self._log_dir = log_dir
        # The number of files of the current step, by layer's name and tensor.
        self._written: Counter[tuple[str, str]] = Counter()
        self._weights: set[Any] = set()
        self._warned: set[tuple[str, str]] = set()

    def check_target(self, target: Target, where: str) -> None:
        """Raise OptionError for options that choose nothing to write."""
        entries = {key for key in self.options if target.options.get(key)}
        if not entries:
            raise OptionError(
                f"{where}: nothing of {target.tensor} is to be written",
                expected=f"{_HIGH_PRECISION}: True, {_QUANTIZED}: True, or both",
            )
        if _INTERNALS in entries and _QUANTIZED not in entries:
            raise OptionError(
                f"{where}: {_INTERNALS} without {_QUANTIZED}", expected=f"{_QUANTIZED}: True, too"
            )

    @api_method  # type: ignore[untyped-decorator]
    def inspect_tensor(
        self,
        config: Any,
        layer_name: str,
        tensor_name: str,
        tensor: torch.Tensor,
        iteration: int = 0,
        rowwise_quantized_tensor: QuantizedTensorStorage | None = None,
        columnwise_quantized_tensor: QuantizedTensorStorage | None = None,
        layer: Any = None,
    ) -> None:
        """Write the entries that ``config`` chooses."""
        if tensor_name == "weight" and (layer_name if layer is None else layer) in self._weights:
            return
        quantized = rowwise_quantized_tensor
        if quantized is None:
            quantized = columnwise_quantized_tensor
        entries = self._entries(config, tensor, quantized)
        if config.get(_QUANTIZED) and quantized is None:
            self._warn_of_unquantized(layer_name, tensor_name)
        if not entries:
            return
        number = self._written[layer_name, tensor_name]
        path = self._folder() / file_name(layer_name, tensor_name, iteration, number)
        save_file(
            entries,
            path,
            metadata={"layer": layer_name, "tensor": tensor_name, "step": str(iteration)},
        )
        self._written[layer_name, tensor_name] += 1
        if tensor_name == "weight":
            self._weights.add(layer_name if layer is None else layer)

    def _entries(
        self, config: Any, tensor: torch.Tensor, quantized: QuantizedTensorStorage | None
    ) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        if config.get(_HIGH_PRECISION):
            entries["high_precision"] = tensor.detach()
        if config.get(_QUANTIZED) and quantized is not None:
            entries["quantized"] = quantized.dequantize(torch.float32).detach()
            if config.get(_INTERNALS):
                entries["internals"] = quantized
        return entries

    def _folder(self) -> Path:
        rank = own_rank()
        log_dir = get_logger().root_log_dir if self._log_dir is None else self._log_dir
        folder = Path(log_dir) / FOLDER / f"rank-{rank:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _warn_of_unquantized(self, layer: str, tensor: str) -> None:
        if (layer, tensor) not in self._warned:
            self._warned.add((layer, tensor))
            warnings.warn(
                f"{tensor} of layer {layer!r} is not quantized: its file has no such values",
                UserWarning,
                stacklevel=2,
            )

    def step(self) -> None:
        """Number the files of the next step from 0 again."""
        self._written.clear()
        self._weights.clear()
