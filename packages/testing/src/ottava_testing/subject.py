"""``Subject`` is a recipe under test; it makes quantizers, weights, layers and models with it."""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import ottava
from ottava.errors import DTypeError, OptionError
from ottava.nn import Linear
from ottava.recipes.role import QuantizerRole
from ottava.recipes.spec import RecipeSpec
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage, Quantizer
from ottava_testing.compare import CheckFailed

#: The roles that a linear layer asks quantizers for.
ROLES = ("input", "weight", "grad_output")
#: The default name of the layers that the checks make.
LAYER = "layer"
RecipeLike = str | Path | ottava.Recipe | Callable[[], ottava.Recipe]


def _accept(names: Sequence[str]) -> None:
    """Replaces :meth:`ottava.Recipe.check_layers` and accepts any names."""


def _for_any_layers(recipe: ottava.Recipe) -> ottava.Recipe:
    """The same recipe, made to accept any layers.

    Its patterns may name layers that the models of the checks do not have.
    """
    object.__setattr__(recipe, "check_layers", _accept)
    return recipe


@dataclass(frozen=True)
class Source:
    """A description from which another process makes the same recipe.

    Attributes:
        name: the name of an installed recipe, or the path of a recipe file; None where ``recipe``
            has the recipe itself.
        options: the recipe's options, pickled.
        recipe: the recipe, pickled; empty where it has a name.
        modules: names and files of the modules that the pickles refer to, because some of them
            cannot be imported by name.
        spec: the spec whose promises are checked.
        layer_name: the name of the layers that the checks make.
    """

    name: str | None
    options: bytes
    recipe: bytes
    modules: tuple[tuple[str, str], ...]
    spec: RecipeSpec
    layer_name: str


@dataclass
class Subject:
    """A recipe under test.

    Args:
        given: the name of an installed recipe, the path of a recipe file, a recipe, or a function
            that makes one.
        options: the recipe's options, if ``given`` is a name or a file.
        spec: the spec whose promises are checked; by default that of the installed recipe, or else
            one with the default of every flag.
        layer_name: the name of the layers that the checks make; a recipe may depend on it.

    Raises:
        DTypeError: ``given`` is none of these.
        OptionError: there are options, and ``given`` takes none.
        RecipeNotFoundError, PluginError: as :func:`ottava.get_recipe`.
    """

    given: RecipeLike
    options: Mapping[str, Any] = field(default_factory=dict)
    spec: RecipeSpec = None  # type: ignore[assignment]
    layer_name: str = LAYER
    #: Names of the checks that are going to be run, if known, because some of them share an
    #: expensive preparation.
    check_names: frozenset[str] = frozenset()
    #: Results that checks keep for others of the same subject.
    results: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.options = dict(self.options or {})
        if isinstance(self.given, Path):
            self.given = str(self.given)
        if self.options and not isinstance(self.given, str):
            raise OptionError(
                "options for a recipe that is made already", expected="the name of a recipe"
            )
        if not isinstance(self.given, (str, ottava.Recipe)) and not callable(self.given):
            raise DTypeError(
                f"the recipe is a {type(self.given).__name__}",
                expected="a name, a recipe, or a function that makes one",
            )
        if self.spec is None:
            recipe = self.recipe()
            self.spec = _spec_of(self.given, recipe)
            if self.options or self.given != self.spec.name or self.layer_name != LAYER:
                # The installed spec describes the recipe without options and for any layer. With
                # options, or for this layer, it may be stateful where the spec is not.
                state = Linear(8, 8, recipe=recipe, name=self.layer_name)._binding.state
                self.spec = replace(self.spec, stateful=state is not None and state.stateful)
        elif not isinstance(self.spec, RecipeSpec):
            raise DTypeError(
                f"the spec is a {type(self.spec).__name__}", expected="an ottava.RecipeSpec"
            )

    @property
    def label(self) -> str:
        """The name of the recipe in reports."""
        return self.given if isinstance(self.given, str) else self.spec.name

    @property
    def bound(self) -> float:
        """The relative error that the recipe declares."""
        return float(self.spec.relative_error)

    def recipe(self) -> ottava.Recipe:
        """The recipe, as a new object unless the subject was given an object.

        Raises:
            DTypeError: the function made something else.
        """
        if isinstance(self.given, str):
            return _for_any_layers(ottava.get_recipe(self.given, **self.options))
        given: Any = self.given
        recipe: object = given if isinstance(given, ottava.Recipe) else given()
        if not isinstance(recipe, ottava.Recipe):
            raise DTypeError(
                f"the function made a {type(recipe).__name__}", expected="an ottava.Recipe"
            )
        return _for_any_layers(recipe)

    # -- quantizers and their results --

    def quantizer(
        self,
        role: str = "input",
        *,
        internal: bool = False,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> Quantizer:
        """A new quantizer for a role."""
        quantizer = self.recipe().quantizer(QuantizerRole("linear", role, self.layer_name)).copy()
        quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
        quantizer.internal = internal
        return quantizer

    def quantizers(self, **usages: bool) -> Iterator[tuple[str, Quantizer]]:
        """Yields a name for messages and a quantizer, two for each role.

        One has ``internal=True``, as layers use it; the other gives tensors.
        """
        for role in ROLES:
            for internal in (True, False):
                words = f"the quantizer of {role!r} with internal={internal}"
                yield words, self.quantizer(role, internal=internal, **usages)

    def quantized(
        self, **usages: bool
    ) -> Iterator[tuple[str, QuantizedTensorStorage, torch.Tensor]]:
        """Yields a name for messages, a quantized matrix ``[48, 40]`` and its values, for each
        quantizer.
        """
        from ottava_testing.compare import wide

        for words, quantizer in self.quantizers(**usages):
            dtype = torch.float32 if quantizer.internal else torch.bfloat16
            values = wide(48, 40, seed=3, dtype=dtype)
            storage = quantizer(values)
            yield f"the {type(storage).__name__} that {words} gives", storage, values

    def weight(self, values: torch.Tensor, **usages: bool) -> QuantizedTensor:
        """A weight of these values that is kept quantized.

        Raises:
            CheckFailed: the quantizer gives a bare storage, although the spec promises tensors.
        """
        quantizer = self.quantizer("weight", **usages)
        with torch.no_grad():
            quantizer.initialize(values)
            weight = quantizer.quantize(values.detach())
        if not isinstance(weight, QuantizedTensor):
            raise CheckFailed(
                f"the quantizer gives a {type(weight).__name__} when internal is False, and not a "
                f"QuantizedTensor, which quantized_weights=True in the spec promises"
            )
        return weight

    def keeps_state(self, quantizer: Quantizer) -> bool:
        """Whether a quantizer may hold state that its copies share.

        It may if both the spec of the recipe and the quantizer say that they are stateful.
        """
        return self.spec.stateful and quantizer.stateful

    # -- layers --

    def layer(
        self,
        columns: int,
        rows: int,
        *,
        dtype: torch.dtype = torch.float32,
        bias: bool = True,
        primary: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> Linear:
        """A linear layer under the recipe; with ``primary`` its weight is kept quantized."""
        recipe = self.recipe()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if not primary:
                return Linear(
                    columns,
                    rows,
                    bias=bias,
                    dtype=dtype,
                    recipe=recipe,
                    name=self.layer_name,
                    **options,
                )
            with ottava.quantized_model_init(recipe):
                return Linear(
                    columns,
                    rows,
                    bias=bias,
                    dtype=dtype,
                    recipe=recipe,
                    name=self.layer_name,
                    **options,
                )

    def model(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        primary: bool = False,
        seed: int = 0,
        width: int = 32,
        rows: int = 64,
    ) -> torch.nn.Sequential:
        """Two linear layers with a GELU between them, ``[*, width]`` to ``[*, width]``.

        The model is converted, which names the layers ``"0"`` and ``"2"``. If the subject has a
        name for its layers, the model is not converted, and the layers keep that name.
        """
        first = self.layer(width, rows, dtype=dtype, primary=primary, seed=seed)
        second = self.layer(rows, width, dtype=dtype, primary=primary, seed=seed + 1)
        net = torch.nn.Sequential(first, torch.nn.GELU(), second)
        if self.layer_name == LAYER:
            return ottava.convert(net, self.recipe())
        return net

    # -- another process --

    def source(self) -> Source:
        """The description from which another process makes this recipe.

        Raises:
            CheckFailed: the recipe or its options cannot be pickled, or another process could not
                import their classes.
        """
        name = self.given if isinstance(self.given, str) else None
        if name is not None and Path(name).exists():
            name = str(Path(name).resolve())
        recipe = b"" if name is not None else _pickle(self.recipe(), "the recipe")
        options = _pickle(self.options, "the options of the recipe")
        return Source(
            name, options, recipe, _modules_of(recipe, options), self.spec, self.layer_name
        )

    @classmethod
    def of_source(cls, source: Source) -> Subject:
        """The subject that a source describes, in another process."""
        given: RecipeLike = pickle.loads(source.recipe) if source.name is None else source.name
        return cls(given, pickle.loads(source.options), source.spec, source.layer_name)


def _spec_of(source: RecipeLike, recipe: ottava.Recipe) -> RecipeSpec:
    """The installed spec of a recipe, or one with the defaults of every flag."""
    specs = ottava.list_recipes()
    if isinstance(source, str):
        for spec in specs:
            if spec.name == source:
                return spec
        for spec in specs:
            if Path(source).suffix in spec.file_suffixes:
                return spec
    cls = type(recipe)
    reference = f"{cls.__module__}:{cls.__qualname__}"
    for spec in specs:
        if spec.name == recipe.name and spec.factory == reference:
            return spec
    name = re.sub(r"[^a-z0-9_-]", "-", (recipe.name or cls.__name__).lower()).strip("-_0123456789")
    return RecipeSpec(
        name=name or "recipe",
        summary=f"A {cls.__name__} without a spec",
        factory=f"{cls.__module__}:{cls.__name__}",
        stateful=recipe.stateful,
    )


def _pickle(value: Any, title: str) -> bytes:
    """A value as a pickle; ``title`` names it in messages.

    Raises:
        CheckFailed: it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        pickle.Pickler(buffer).dump(value)
    except Exception as error:
        raise CheckFailed(
            f"{title} cannot be sent to another process, which the checks on several processes "
            f"need: {error}. Define its classes and functions at the top of a module, or check it "
            f"by the name that it is installed under"
        ) from error
    return buffer.getvalue()


def _modules_of(*pickles: bytes) -> tuple[tuple[str, str], ...]:
    """Names and files of the modules that pickles refer to, except torch's and Ottava's.

    Raises:
        CheckFailed: a pickle refers to ``__main__``.
    """
    files: dict[str, str] = {}

    class Names(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module == "__main__":
                raise CheckFailed(
                    f"{name} stands in __main__ (a script, a notebook), where the other processes "
                    f"of this check do not find it. Define it in a module that can be imported"
                )
            file = getattr(sys.modules.get(module), "__file__", None)
            if file and not module.startswith(("torch.", "ottava.")):
                files[module] = str(Path(file).resolve())
            return super().find_class(module, name)

    for data in pickles:
        if data:
            Names(io.BytesIO(data)).load()
    return tuple(files.items())
