"""A package with recipes and quantizer factories that recipe files name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.fake_plugins import hook
from tests.published import published

_RECIPES = ("Alpha", "Keeper", "Needy", "Raising")
_FACTORIES = ("weights", "asks", "wrong", "fails", "keeps", "alpha")
_PLUGIN = hook(
    "return [RecipeSpec(name=n.lower(), summary='s', factory=f'recipe_file_impl:{n}')"
    f" for n in {_RECIPES}]"
) + hook(
    "return [FactorySpec(name=n, summary='s', factory=f'recipe_file_impl:{n}')"
    f" for n in {_FACTORIES}]",
    "ottava_quantizer_factories",
)
_IMPL = """
from dataclasses import dataclass
from typing import ClassVar

import torch

import ottava
from ottava import Format, GridQuantizer, Layout, Recipe
from ottava.errors import OptionError


class Q(GridQuantizer):
    def __init__(self, dtype, recipe=None, group=None):
        super().__init__(Layout(dtype, (None, None)))
        self.recipe, self.group, self.fp8_dtype = recipe, group, dtype


class Kept(Q):
    stateful = True


@dataclass(frozen=True)
class Alpha(Recipe):
    name: ClassVar[str] = "alpha"
    fp8_format: Format = Format.HYBRID
    flag: bool = False
    epsilon: float = 0.0
    shape: tuple[int, ...] = (1, 1)
    rounding: str = "up"

    def __post_init__(self):
        if not isinstance(self.flag, bool):
            raise OptionError(f"flag is {self.flag!r}", expected="True or False")

    def make_quantizer(self, role, *, amax_reduction_group=None):
        element = self.fp8_format.backward if role.is_gradient else self.fp8_format.forward
        return Q(element.torch_dtype, self, amax_reduction_group)


class Keeper(Recipe):
    name = "keeper"
    stateful = True

    def make_quantizer(self, role, *, amax_reduction_group=None):
        return Kept(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Needy(Recipe):
    name: ClassVar[str] = "needy"
    scale: float

    def make_quantizer(self, role, *, amax_reduction_group=None):
        return Q(torch.float8_e4m3fn, self)


class Raising(Keeper):
    def __init__(self):
        raise ValueError("at build")


def weights(role):
    return Q(torch.float8_e5m2, "weights") if role.tensor_type == "weight" else None


def asks(role):
    return ottava.QuantizerRequest(Alpha(flag=True))


def wrong(role):
    return 3


def fails(role):
    raise ZeroDivisionError("in the factory")


def keeps(role):
    return Kept(torch.float8_e4m3fn)


def alpha(role):
    raise AssertionError("the recipe of this name serves")
"""


@pytest.fixture(scope="module")
def published_for_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package, found while the tests of a module run."""
    modules = {"recipe_file_plugin": _PLUGIN, "recipe_file_impl": _IMPL}
    with published(tmp_path_factory.mktemp("packages"), "recipe-files", **modules):
        yield
