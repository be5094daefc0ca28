"""``Subject`` is a recipe under test; it makes quantizers, weights, layers and models with it."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

import ottava
from ottava.errors import DTypeError, OptionError
from ottava.nn import Linear
from ottava.recipes.role import QuantizerRole
from ottava.recipes.spec import RecipeSpec
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage, Quantizer
from ottava_testing.compare import CheckFailed, close, require_same, wide

#: The roles that a linear layer asks quantizers for.
ROLES = ("input", "weight", "grad_output")
#: The default name of the layers that the checks make.
LAYER = "layer"
#: What recipes that can be sent to another process consist of.
_REMEDY = "Define its classes and functions at the top of a module, or check it by its name"
RecipeLike = str | Path | ottava.Recipe | Callable[[], ottava.Recipe]


def _accept(names: Sequence[str]) -> None:
    """Replaces :meth:`ottava.Recipe.check_layers` and accepts any names."""


def _with_promises(spec: RecipeSpec, promises: Mapping[str, Any]) -> RecipeSpec:
    """A spec with other values in some fields; a list stands for a tuple, as in JSON."""
    names = [f.name for f in fields(RecipeSpec) if f.name not in ("name", "factory")]
    for name in promises:
        if name not in names:
            raise OptionError(f"{name!r} is no promise of a spec", expected=", ".join(names))
    values: dict[str, Any] = {}
    for name, value in promises.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return replace(spec, **values)


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
        promises: fields of the spec, in the place of those that it has.

    Raises:
        DTypeError: ``given`` is none of these.
        OptionError: there are options, and ``given`` takes none; or a promise is no field of a
            spec, or has a value that is not allowed.
        RecipeNotFoundError, PluginError: as :func:`ottava.get_recipe`.
    """

    given: RecipeLike
    options: Mapping[str, Any] = field(default_factory=dict)
    spec: RecipeSpec = None  # type: ignore[assignment]
    layer_name: str = LAYER
    promises: Mapping[str, Any] = field(default_factory=dict)
    #: Names of the checks that are going to be run, if known, because some of them share an
    #: expensive preparation.
    check_names: frozenset[str] = frozenset()
    #: The failure messages of checks on several processes, by name; None where one passed.
    outcomes: dict[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.options = dict(self.options or {})
        if isinstance(self.given, Path):
            self.given = str(self.given)
        if self.options and not isinstance(self.given, str):
            words = "options for a recipe that is made already"
            raise OptionError(words, expected="the name of a recipe")
        if not isinstance(self.given, (str, ottava.Recipe)) and not callable(self.given):
            words = f"the recipe is a {type(self.given).__name__}"
            raise DTypeError(words, expected="a name, a recipe, or a function that makes one")
        if self.spec is None:
            self.spec = self._default_spec()
        elif not isinstance(self.spec, RecipeSpec):
            words = f"the spec is a {type(self.spec).__name__}"
            raise DTypeError(words, expected="an ottava.RecipeSpec")
        self.spec = _with_promises(self.spec, self.promises)

    def _default_spec(self) -> RecipeSpec:
        """The installed spec of the recipe, or one with the defaults of every flag."""
        recipe = self.recipe()
        spec = _spec_of(self.given, recipe)
        if not self.options and self.given == spec.name and self.layer_name == LAYER:
            return spec
        # The installed spec describes the recipe without options and for any layer. With options,
        # or for this layer, it may be stateful or stochastic where the spec is not.
        state = Linear(8, 8, recipe=recipe, name=self.layer_name)._binding.state
        stochastic = self._rounds_at_random(recipe)
        if stochastic is None:
            stochastic = spec.stochastic
        return replace(spec, stateful=state is not None and state.stateful, stochastic=stochastic)

    def _rounds_at_random(self, recipe: ottava.Recipe) -> bool | None:
        """Whether a layout of the layer's quantizers says so; None where quantizers that have no
        layout may do it."""
        quantizers = [recipe.quantizer(self._role(role)) for role in ROLES]
        sides = [quantizer.for_usage(usage) for quantizer in quantizers for usage in (False, True)]
        layouts = [getattr(side, "layout", None) for side in sides]
        known = [layout for layout in layouts if isinstance(layout, ottava.Layout)]
        if any(layout.stochastic for layout in known):
            return True
        return False if len(known) == len(layouts) else None

    def _role(self, role: str) -> QuantizerRole:
        """A role of the layers that the checks make."""
        return QuantizerRole("linear", role, self.layer_name)

    @property
    def label(self) -> str:
        """The name of the recipe in reports."""
        return self.given if isinstance(self.given, str) else self.spec.name

    @property
    def bound(self) -> float:
        """The relative error that the recipe declares."""
        return float(self.spec.relative_error)

    @property
    def is_coarse(self) -> bool:
        """Whether the format has so few bits that small steps of an optimizer are lost in it."""
        return self.bound >= 0.2

    @property
    def loose(self) -> float:
        """A wider bound, for values that are few or uneven, or quantized twice."""
        return min(0.5, 4 * self.bound)

    def agree(self, title: str, actual: Any, expected: Any, bound: float | None = None) -> None:
        """Compare bytes, or, if the recipe is not deterministic, values within ``bound``.

        Each side is a tensor or a list of tensors. The bound is twice the recipe's by default.

        Raises:
            CheckFailed: they differ; the message begins with ``title``.
        """
        if self.spec.deterministic:
            require_same(f"{title} has", actual, expected)
            return
        ones, others = ([v] if isinstance(v, torch.Tensor) else v for v in (actual, expected))
        for one, other in zip(ones, others, strict=True):
            close(title, one, other, 2 * self.bound if bound is None else bound)

    def recipe(self) -> ottava.Recipe:
        """The recipe, as a new object unless the subject was given an object.

        It accepts any layers, because its patterns may name some that the checks do not have.

        Raises:
            DTypeError: the function made something else.
        """
        given: Any = self.given
        recipe: object = given
        if isinstance(given, str):
            recipe = ottava.get_recipe(given, **self.options)
        elif not isinstance(given, ottava.Recipe):
            recipe = given()
        if not isinstance(recipe, ottava.Recipe):
            words = f"the function made a {type(recipe).__name__}"
            raise DTypeError(words, expected="an ottava.Recipe")
        object.__setattr__(recipe, "check_layers", _accept)
        return recipe

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
        quantizer = self.recipe().quantizer(self._role(role)).copy()
        quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
        quantizer.internal = internal
        return quantizer

    def quantizers(self, **usages: bool) -> Iterator[tuple[str, Quantizer]]:
        """Yields a title and a quantizer, two for each role.

        One has ``internal=True``, as layers use it; the other gives tensors.
        """
        for role in ROLES:
            for internal in (True, False):
                title = f"the quantizer of {role!r} with internal={internal}"
                yield title, self.quantizer(role, internal=internal, **usages)

    def storages(self, **usages: bool) -> Iterator[tuple[str, QuantizedTensorStorage]]:
        """Yields a title and a quantized matrix ``[48, 40]`` for each quantizer.

        Those of internal quantizers are of float32, and the others of bfloat16.
        """
        for title, quantizer in self.quantizers(**usages):
            dtype = torch.float32 if quantizer.internal else torch.bfloat16
            storage = quantizer(wide(48, 40, seed=3, dtype=dtype))
            yield f"the {type(storage).__name__} by {title}", storage

    def weight(self, values: torch.Tensor | None = None, **usages: bool) -> Any:
        """A weight that is kept quantized; by default of some values ``[48, 40]``.

        Raises:
            CheckFailed: the quantizer gives a bare storage, although the spec promises tensors.
        """
        values = wide(48, 40) if values is None else values
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

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Yields the name of the class of quantized weights, and a function that makes one.

        The weight is a parameter; the function's argument are its values.
        """

        def make(values: torch.Tensor | None = None) -> Any:
            return torch.nn.Parameter(self.weight(values))

        yield type(self.weight()).__name__, make

    def keeps_state(self, quantizer: Quantizer) -> bool:
        """Whether a quantizer may hold state that its copies share.

        It may if both the spec of the recipe and the quantizer say that they are stateful.
        """
        return self.spec.stateful and quantizer.stateful

    # -- layers --

    @property
    def kinds_of_weights(self) -> tuple[bool, ...]:
        """The values of ``primary`` that the recipe allows."""
        return (False, True) if self.spec.quantized_weights else (False,)

    def layer(
        self, columns: int, rows: int, *, primary: bool = False, seed: int = 0, **options: Any
    ) -> Linear:
        """A linear layer under the recipe; with ``primary`` its weight is kept quantized."""
        recipe = self.recipe()
        context = ottava.quantized_model_init(recipe) if primary else contextlib.nullcontext()
        with torch.random.fork_rng(devices=[]), context:
            torch.manual_seed(seed)
            return Linear(columns, rows, recipe=recipe, name=self.layer_name, **options)

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
        return ottava.convert(net, self.recipe()) if self.layer_name == LAYER else net

    # -- another process --

    def source(self) -> bytes:
        """A pickle from which :meth:`of_source` makes this subject in another process.

        Raises:
            CheckFailed: the recipe or its options cannot be pickled, or another process could not
                import their classes.
        """
        given = self.given if isinstance(self.given, str) else self.recipe()
        if isinstance(given, str) and Path(given).exists():
            given = str(Path(given).resolve())
        try:
            recipe = pickle.dumps((given, self.options))
        except Exception as error:
            raise CheckFailed(
                f"the recipe cannot be sent to another process, which the checks on several "
                f"processes need: {error}. {_REMEDY}"
            ) from error
        return pickle.dumps((_modules_of(recipe), recipe, self.spec, self.layer_name))

    @classmethod
    def of_source(cls, source: bytes, import_from: Callable[[str, str], None]) -> Subject:
        """The subject of a source.

        ``import_from`` gets the names and files of the modules that the recipe needs.
        """
        modules, recipe, spec, layer_name = pickle.loads(source)
        for module, file in modules.items():
            import_from(module, file)
        given, options = pickle.loads(recipe)
        return cls(given, options, spec, layer_name)


def _spec_of(given: RecipeLike, recipe: ottava.Recipe) -> RecipeSpec:
    cls = type(recipe)
    reference = f"{cls.__module__}:{cls.__qualname__}"
    suffix = Path(given).suffix if isinstance(given, str) else None
    for fits in (
        lambda s: s.name == given,
        lambda s: suffix in s.file_suffixes,
        lambda s: s.name == recipe.name and s.factory == reference,
    ):
        specs = [spec for spec in ottava.list_recipes() if fits(spec)]
        if specs:
            return specs[0]
    name = re.sub(r"[^a-z0-9_-]", "-", (recipe.name or cls.__name__).lower()).strip("-_0123456789")
    return RecipeSpec(
        name=name or "recipe",
        summary=f"A {cls.__name__} without a spec",
        factory=f"{cls.__module__}:{cls.__name__}",
        stateful=recipe.stateful,
    )


def _modules_of(data: bytes) -> dict[str, str]:
    """Names and files of the modules that a pickle refers to, except torch's and Ottava's.

    Raises:
        CheckFailed: the pickle refers to ``__main__``.
    """
    files: dict[str, str] = {}

    class Names(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module == "__main__":
                raise CheckFailed(
                    f"{name} stands in __main__ (a script, a notebook), where the other processes "
                    f"of this check do not find it. {_REMEDY}"
                )
            file = getattr(sys.modules.get(module), "__file__", None)
            if file and not module.startswith(("torch.", "ottava.")):
                files[module] = str(Path(file).resolve())
            return super().find_class(module, name)

    Names(io.BytesIO(data)).load()
    return files
