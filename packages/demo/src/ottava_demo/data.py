"""The text to train on: the source code of Python's standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from ottava.errors import OttavaError

_MAX_BYTES = 4_000_000
_VALIDATION_EVERY = 10  # every tenth file is for validation


@dataclass(frozen=True)
class Corpus:
    """Byte values for training and for validation, uint8 ``[n]`` each; they share no file."""

    train: torch.Tensor
    validation: torch.Tensor


def load_corpus(max_bytes: int = _MAX_BYTES) -> Corpus:
    """The top-level modules of the standard library.

    Modules are read in the order of their names, until ``max_bytes`` bytes are reached.

    Raises:
        OttavaError: this Python has less than 100,000 bytes of such source.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for index, path in enumerate(sorted(folder.glob("*.py"))):
        content = path.read_bytes()
        texts[index % _VALIDATION_EVERY == 0].append(content)
        total += len(content)
        if total >= max_bytes:
            break
    if total < 100_000:
        raise OttavaError(
            f"only {total} bytes of Python source in {folder}",
            expected="the standard library's source",
            remedy="run the demo on a Python that ships it",
        )
    train, validation = (torch.frombuffer(bytearray(b"".join(t)), dtype=torch.uint8) for t in texts)
    return Corpus(train, validation)


def batch(
    data: torch.Tensor, size: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """``size`` random windows of ``data``, and the same windows shifted by one byte.

    Both are int64 of shape ``[size, length]``.
    """
    starts = torch.randint(0, data.numel() - length - 1, (size,), generator=generator)
    windows = torch.stack([data[s : s + length + 1] for s in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
