"""Loggers that statistics are written to: nvdlfw-inspect's files, without its ``initialize()``, and
TensorBoard."""

import datetime
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from nvdlfw_inspect.logging import (  # type: ignore[import-untyped]
    BaseLogger,
    wrap_tensorboard_writer,
)

from ottava.errors import DTypeError, OptionError
from ottava.filesystem import open_text

_FOLDER = "nvdlfw_inspect_statistics_logs"


def own_rank() -> int:
    """The rank of this process; 0 where there is one process."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Statistic(NamedTuple):
    """A statistic of a tensor in a step.

    Attributes:
        step: the number of the step.
        layer, tensor, stat: the names.
        value: a number; for ``exponents`` the counts ``{exponent: count}``.
    """

    step: int
    layer: str
    tensor: str
    stat: str
    value: float | dict[int, int]


def write(statistic: Statistic, loggers: Iterable[Any]) -> None:
    """Log a statistic as nvdlfw-inspect does, under ``LAYER_TENSOR_STAT``.

    A histogram is written as a histogram by a logger that has a TensorBoard writer for histograms.
    Other loggers get a number for each exponent, under ``LAYER_TENSOR_STAT_EXPONENT``.
    """
    name = f"{statistic.layer}_{statistic.tensor}_{statistic.stat}"
    for logger in loggers:
        if not isinstance(statistic.value, dict):
            logger.log_scalar(name, statistic.value, statistic.step)
        elif hasattr(writer := getattr(logger, "tb_writer", None), "add_histogram"):
            _write_histogram(writer, name, statistic.value, statistic.step)
        else:
            for exponent, count in statistic.value.items():
                logger.log_scalar(f"{name}_{exponent}", count, statistic.step)


def _write_histogram(writer: Any, name: str, counts: dict[int, int], step: int) -> None:
    total = sum(counts.values())
    # A writer takes values instead of counts, so each exponent gets its share of a thousand values.
    shares = [(exponent, math.ceil(1000 * count / total)) for exponent, count in counts.items()]
    values = [float(exponent) for exponent, share in shares for _ in range(share)]
    if values:
        writer.add_histogram(name, torch.tensor(values), step)


class StatisticsFile(BaseLogger):  # type: ignore[misc]
    """A file for each rank with one line for each number, in nvdlfw-inspect's format.

    An earlier file is replaced. A file that cannot be written is an OptionError.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self.path = Path(log_dir) / _FOLDER / f"nvdlfw_inspect_globalrank-{own_rank()}.log"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_text(self.path)
        except OSError as error:
            raise OptionError(
                f"log_dir is {str(log_dir)!r}: {self.path} cannot be written: "
                f"{error.strerror or error}",
                expected="a folder, or where one can be made",
            ) from error

    def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
        """Write one line."""
        now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
        space = " \t\t\t\t "
        self._file.write(
            f"{now} - INFO - {name}{space}iteration={iteration:06d}{space}value={value:.4f}\n"
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def of_tensorboard(writer: Any) -> list[Any]:
    """A list with the logger of a TensorBoard writer; an empty list for None. A writer without
    ``add_scalar`` is a DTypeError."""
    if writer is None:
        return []
    if not callable(getattr(writer, "add_scalar", None)):
        raise DTypeError(
            f"tb_writer is a {type(writer).__name__}",
            expected="a torch.utils.tensorboard.SummaryWriter, or an object with its add_scalar",
        )
    return [wrap_tensorboard_writer(writer)]
