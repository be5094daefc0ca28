"""The list of broken recipes: copies of the one in row_recipe.py, each with a defect, and the check
that names it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from row_recipe import SPEC, RowQuantizer, Rows, RowTensor

from ottava import RecipeSpec


@dataclass(frozen=True)
class Defect:
    """A broken recipe: the check that finds it, and what its message says."""

    name: str
    check: str
    message: str
    make: Callable[[], Any]
    spec: RecipeSpec


DEFECTS: list[Defect] = []


def broken(check: str, message: str, **flags: Any) -> Any:
    """Register a class, a quantizer, a storage or a tensor class or a recipe, by the check that it
    fails.

    ``message`` is searched for in the failure as a regular expression, ``flags`` are said in the
    spec.
    """

    def register(cls: Any) -> Any:
        DEFECTS.append(
            Defect(cls.__name__, check, message, _maker(cls), dataclasses.replace(SPEC, **flags))
        )
        return cls

    return register


def _maker(cls: Any) -> Callable[[], Any]:
    if issubclass(cls, Rows):
        return cls  # type: ignore[no-any-return]
    quantizer = cls
    if issubclass(cls, torch.Tensor):
        quantizer = _class(f"{cls.__name__}Quantizer", (RowQuantizer,), cls, tensor=cls)
    elif not issubclass(cls, RowQuantizer):
        tensor = _class(f"{cls.__name__}Tensor", (cls, RowTensor), cls)
        quantizer = _class(
            f"{cls.__name__}Quantizer", (RowQuantizer,), cls, storage=cls, tensor=tensor
        )
    return lambda: Rows(quantizer)


def _class(name: str, bases: tuple[type, ...], beside: type, **attributes: Any) -> Any:
    """A class in the module of another: pickles and other processes look for it by name."""
    module = sys.modules[beside.__module__]
    if not hasattr(module, name):
        setattr(module, name, type(name, bases, {"__module__": beside.__module__, **attributes}))
    return getattr(module, name)
