"""``Subject``: a recipe under test, and what is made with it."""

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
#: The name of the layers, where no other is asked for.
LAYER = "layer"
Given = str | Path | ottava.Recipe | Callable[[], ottava.Recipe]


def _accept(names: Sequence[str]) -> None:
    """Stands for :meth:`ottava.Recipe.check_layers`."""


def _for_any_layers(recipe: ottava.Recipe) -> ottava.Recipe:
    """The recipe, whose patterns may name layers that the models of the checks do not have."""
    object.__setattr__(recipe, "check_layers", _accept)
    return recipe


@dataclass(frozen=True)
class Source:
    """How another process makes the same recipe.

    Attributes:
        name: of an installed recipe, or the path of a recipe file; None where ``recipe`` is it.
        options: the recipe's options, pickled.
        recipe: a recipe, pickled.
        modules: the files of modules that the pickles name, for those that cannot be imported by
            name.
        spec: the spec to check by.
        layer_name: the name of the layers to check with.
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
        recipe: the name of an installed recipe, the path of a recipe file, a recipe, or a function
            that makes one.
        options: for the name or the file.
        spec: what the recipe says of itself; by default that of the installed recipe, or one with
            the defaults of every flag, where there is none of that name.
        layer_name: of the layers that it is checked with, which a recipe may go by.

    Raises:
        DTypeError: ``recipe`` is none of these.
        OptionError: ``options`` for something that takes none.
        RecipeNotFoundError, PluginError: as :func:`ottava.get_recipe`.
    """

    given: Given
    options: Mapping[str, Any] = field(default_factory=dict)
    spec: RecipeSpec = None  # type: ignore[assignment]
    layer_name: str = LAYER
    #: Names of the checks that are going to be run, where that is known: some share an expensive
    #: preparation.
    wanted: frozenset[str] = frozenset()
    #: What such checks keep.
    kept: dict[str, Any] = field(default_factory=dict)

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
                # The installed spec speaks of the recipe by its name alone; others may be put
                # together otherwise.
                state = Linear(8, 8, recipe=recipe, name=self.layer_name)._binding.state
                self.spec = replace(self.spec, stateful=state is not None and state.stateful)
        elif not isinstance(self.spec, RecipeSpec):
            raise DTypeError(
                f"the spec is a {type(self.spec).__name__}", expected="an ottava.RecipeSpec"
            )

    @property
    def label(self) -> str:
        """What it is called in reports."""
        return self.given if isinstance(self.given, str) else self.spec.name

    @property
    def bound(self) -> float:
        """The relative error that the recipe declares."""
        return float(self.spec.relative_error)

    def recipe(self) -> ottava.Recipe:
        """The recipe, made anew where that is possible.

        Raises:
            DTypeError: the function made something else.
        """
        if isinstance(self.given, str):
            return _for_any_layers(ottava.get_recipe(self.given, **self.options))
        given: Any = self.given
        made: object = given if isinstance(given, ottava.Recipe) else given()
        if not isinstance(made, ottava.Recipe):
            raise DTypeError(
                f"the function made a {type(made).__name__}", expected="an ottava.Recipe"
            )
        return _for_any_layers(made)

    # -- quantizers and what they give --

    def quantizer(
        self,
        role: str = "input",
        *,
        internal: bool = False,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> Quantizer:
        """A new quantizer for a role."""
        made = self.recipe().quantizer(QuantizerRole("linear", role, self.layer_name)).copy()
        made.set_usage(rowwise=rowwise, columnwise=columnwise)
        made.internal = internal
        return made

    def quantizers(self, **usages: bool) -> Iterator[tuple[str, Quantizer]]:
        """A quantizer for each role, as layers use it (internal) and for tensors, each with words
        for messages."""
        for role in ROLES:
            for internal in (True, False):
                words = f"the quantizer of {role!r} with internal={internal}"
                yield words, self.quantizer(role, internal=internal, **usages)

    def quantized(
        self, **usages: bool
    ) -> Iterator[tuple[str, QuantizedTensorStorage, torch.Tensor]]:
        """A quantized matrix by each quantizer, with words for messages and the values that it was
        made of."""
        from ottava_testing.compare import wide

        for words, quantizer in self.quantizers(**usages):
            values = wide(
                48, 40, seed=3, dtype=torch.float32 if quantizer.internal else torch.bfloat16
            )
            made = quantizer(values)
            yield f"the {type(made).__name__} that {words} gives", made, values

    def weight(self, values: torch.Tensor, **usages: bool) -> QuantizedTensor:
        """A weight that is kept quantized.

        Raises:
            CheckFailed: the quantizer gives a bare storage, in spite of what the spec promises.
        """
        quantizer = self.quantizer("weight", **usages)
        with torch.no_grad():
            quantizer.initialize(values)
            made = quantizer.quantize(values.detach())
        if not isinstance(made, QuantizedTensor):
            raise CheckFailed(
                f"the quantizer gives a {type(made).__name__} when internal is False, and not a "
                f"QuantizedTensor, which "
                "quantized_weights=True in the spec promises"
            )
        return made

    def keeps_state(self, quantizer: Quantizer) -> bool:
        """Whether a quantizer may hold state that its copies share: one that says so, of a recipe
        that says so."""
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
        """A linear layer under the recipe, with ``primary`` one whose weight is kept quantized."""
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
        """Two layers with something between them, ``[*, width]`` to ``[*, width]``, converted.

        Converting names them ``"0"`` and ``"2"``; where another name is asked for they keep that.
        """
        layers = [self.layer(width, rows, dtype=dtype, primary=primary, seed=seed)]
        layers += [self.layer(rows, width, dtype=dtype, primary=primary, seed=seed + 1)]
        net = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
        return ottava.convert(net, self.recipe()) if self.layer_name == LAYER else net

    # -- another process --

    def source(self) -> Source:
        """How another process makes this recipe.

        Raises:
            CheckFailed: the recipe or its options cannot be pickled, or another process could not
                import their classes.
        """
        named = self.given if isinstance(self.given, str) else None
        if named is not None and Path(named).exists():
            named = str(Path(named).resolve())
        recipe = b"" if named is not None else _pickled(self.recipe(), "the recipe")
        options = _pickled(self.options, "the options of the recipe")
        return Source(
            named, options, recipe, _modules_of(recipe, options), self.spec, self.layer_name
        )

    @classmethod
    def of_source(cls, source: Source) -> Subject:
        """The subject that a source describes, in another process."""
        given: Given = pickle.loads(source.recipe) if source.name is None else source.name
        return cls(given, pickle.loads(source.options), source.spec, source.layer_name)


def _spec_of(given: Given, recipe: ottava.Recipe) -> RecipeSpec:
    """The installed spec of a recipe, or one with the defaults of every flag."""
    specs = ottava.list_recipes()
    if isinstance(given, str):
        for spec in specs:
            if spec.name == given:
                return spec
        for spec in specs:
            if Path(given).suffix in spec.file_suffixes:
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


def _pickled(value: Any, what: str) -> bytes:
    buffer = io.BytesIO()
    try:
        pickle.Pickler(buffer).dump(value)
    except Exception as error:
        raise CheckFailed(
            f"{what} cannot be sent to another process, which the checks on several processes "
            f"need: {error}. Define "
            "its classes and functions at the top of a module, or check it by the name that it is "
            "installed under"
        ) from error
    return buffer.getvalue()


def _modules_of(*pickles: bytes) -> tuple[tuple[str, str], ...]:
    """Modules that pickles name, with their files."""
    found: dict[str, str] = {}

    class Names(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module == "__main__":
                raise CheckFailed(
                    f"{name} stands in __main__ (a script, a notebook), where the other processes "
                    f"of this check do not "
                    "find it. Define it in a module that can be imported"
                )
            file = getattr(sys.modules.get(module), "__file__", None)
            if file and not module.startswith(("torch.", "ottava.")):
                found[module] = str(Path(file).resolve())
            return super().find_class(module, name)

    for data in pickles:
        if data:
            Names(io.BytesIO(data)).load()
    return tuple(found.items())
