"""A feature that writes the tensors of products to files."""

import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import torch
from nvdlfw_inspect.logging import get_logger  # type: ignore[import-untyped]

from ottava.checkpoint import save_file
from ottava.errors import OptionError
from ottava.filesystem import AnyPath
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.features.base import Target
from ottava_debug.features.observing import Observed, Observing
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


class DumpTensors(Observing):
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

    options: ClassVar[dict[str, Check]] = {
        _HIGH_PRECISION: BOOLEAN,
        _QUANTIZED: BOOLEAN,
        _INTERNALS: BOOLEAN,
    }

    def __init__(self, log_dir: AnyPath | None = None) -> None:
        super().__init__()
        self._log_dir = log_dir
        # The number of files of the current step, by layer's name and tensor.
        self._written: Counter[tuple[str, str]] = Counter()

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

    def observe(self, config: Any, observed: Observed) -> None:
        """Write the entries that ``config`` chooses."""
        if self.is_known_weight(observed):
            return
        quantized = observed.columnwise if observed.rowwise is None else observed.rowwise
        if config.get(_QUANTIZED) and quantized is None:
            self.warn_of_unquantized(observed, ": its file has no such values")
        entries = self._entries(config, observed.values, quantized)
        if not entries:
            return
        layer, tensor, step = observed[1:4]
        path = self._folder() / file_name(layer, tensor, step, self._written[layer, tensor])
        save_file(entries, path, metadata={"layer": layer, "tensor": tensor, "step": str(step)})
        self._written[layer, tensor] += 1

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

    def step(self) -> None:
        """Number the files of the next step from 0 again."""
        super().step()
        self._written.clear()
