"""The base class of features: their options, and their choice of products, tensors and steps."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nvdlfw_inspect.registry import api_method  # type: ignore[import-untyped]

from ottava.errors import OptionError
from ottava_debug.located import Check, Located, allowed, kind_of
from ottava_debug.operands import TENSORS

GEMMS = tuple(TENSORS)
EVERY_TENSOR = tuple(dict.fromkeys(tensor for tensors in TENSORS.values() for tensor in tensors))
#: The reactions to a feature that raises: ``"warn"`` switches it off for the layer with a warning,
#: ``"raise"`` raises the error.
ON_ERROR = ("warn", "raise")


def _is_integer(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _ranges(value: Any) -> list[tuple[int, int]]:
    expected = "ascending pairs [start, end], ends included, no overlap, the last end -1 for none"
    pairs = value if isinstance(value, list) else [value]
    for number, pair in enumerate(pairs):
        if not _is_range(pair, is_last=number == len(pairs) - 1):
            raise OptionError(f"has {kind_of(pair)}", expected=expected)
        if number and pairs[number - 1][1] > pair[0]:
            raise OptionError(f"has {kind_of(pair)} after {pairs[number - 1]!r}", expected=expected)
    return [(start, end) for start, end in pairs]


def _is_range(pair: Any, *, is_last: bool) -> bool:
    """Whether a value is a pair of steps ``[start, end]``; the end of the last one may be -1."""
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        return False
    if not all(type(step) is int for step in pair):
        return False
    start, end = pair
    return 0 <= start <= end or (end == -1 and is_last)


_STEP = allowed(lambda value: _is_integer(value, -1), "a step, or -1 for no end")
#: Options that every feature has.
COMMON: dict[str, Check] = {
    "start_step": _STEP,
    "end_step": _STEP,
    "start_end_list": _ranges,
    "freq": allowed(lambda value: _is_integer(value, 1), "a number of steps, from 1"),
    "on_error": allowed(lambda value: value in ON_ERROR, " or ".join(ON_ERROR)),
}


@dataclass(frozen=True)
class Target:
    """A tensor of a product, with its options.

    Attributes:
        gemm: the product; None for every product.
        tensor: the tensor; None for every tensor.
        options: the options.
    """

    gemm: str | None
    tensor: str | None
    options: Mapping[str, Any]

    def active(self, step: int) -> bool:
        """Whether the options choose the step.

        The ends of ranges are included, and an end of -1 is no end.
        """
        get = self.options.get
        if step % get("freq", 1):
            return False
        one = (get("start_step", 0), get("end_step", -1))
        ranges = get("start_end_list") or [one]
        return any(start <= step and (end == -1 or step <= end) for start, end in ranges)


class Feature:
    """A feature, which modifies or observes the tensors of some layers.

    Users may derive classes from it. Such a class has any of the methods below, marked by
    ``nvdlfw_inspect.registry.api_method``, and is registered by
    ``nvdlfw_inspect.registry.Registry.register_feature``, in a file of a folder that
    ``initialize(feature_dirs=…)`` names. Methods are called by keywords, with those of the
    following arguments that they accept:

    - ``fp8_gemm_enabled(config, layer_name, gemm, iteration)``: False makes the product take
      operands in high precision.
    - ``modify_tensor_enabled(config, layer_name, gemm, tensor_name, iteration)``: whether to call
      ``modify_tensor``.
    - ``modify_tensor(config, layer_name, gemm, tensor_name, tensor, iteration)``: returns the
      values that replace the tensor, or a quantized tensor.
    - ``inspect_tensor_enabled(config, layer_name, tensor_name, iteration)``, then
      ``inspect_tensor(config, layer_name, tensor_name, tensor, iteration,
      rowwise_quantized_tensor, columnwise_quantized_tensor)``: called once for each tensor.
    - ``inspect_tensor_postquantize_enabled(config, layer_name, gemm, tensor_name, iteration)``,
      then ``inspect_tensor_postquantize(config, layer_name, gemm, tensor_name, tensor, rowwise,
      iteration)``: called for each quantized operand of a product.
    - ``step()``: called after each step.

    ``modify_tensor`` gets a copy of the tensor. The other methods must not change tensors in place.
    """

    #: Whether a configuration names products.
    by_gemm: ClassVar[bool] = False
    #: Whether a configuration names tensors.
    by_tensor: ClassVar[bool] = False
    #: The options besides :data:`COMMON`, and those of them that are required.
    options: ClassVar[dict[str, Check]] = {}
    required: ClassVar[tuple[str, ...]] = ()

    def targets(self, config: Mapping[str, Any], title: str) -> list[Target]:
        """The pairs of products and tensors that a configuration names, with their options.

        Args:
            config: the feature's options in the configuration.
            title: the name of the feature in errors.

        Raises:
            OptionError: a key or value is not allowed; the message names the line.
        """
        located = config if isinstance(config, Located) else Located(config, title=title)
        if "enabled" in located:
            located.truth("enabled")
        targets = []
        for gemm, at_gemm in self._levels(located, "gemm", GEMMS, self.by_gemm):
            tensors = TENSORS.get(str(gemm), EVERY_TENSOR)
            for tensor, at_tensor in self._levels(at_gemm, "tensor", EVERY_TENSOR, self.by_tensor):
                options = self._options(at_tensor)
                # A list of tensors for several products may name tensors that only some have.
                if tensor is None or tensor in tensors:
                    targets.append(Target(gemm, tensor, options))
                    self.check_target(targets[-1], located.where())
        has_empty_list = [] in (located.get("gemms"), located.get("tensors"))
        if not targets and not has_empty_list:
            raise OptionError(
                f"{located.where()} names no tensor of the products that it names",
                expected="; ".join(f"of {gemm} {', '.join(TENSORS[gemm])}" for gemm in GEMMS),
            )
        return targets

    def check_target(self, target: Target, where: str) -> None:
        """Raise OptionError, which begins with ``where``, for a target that is not allowed."""

    def _levels(
        self, config: Located, key: str, every: tuple[str, ...], is_named: bool
    ) -> Iterable[tuple[str | None, Located]]:
        """The named products (``key`` ``"gemm"``) or tensors, each with its configuration; None
        where configurations do not name them."""
        several = f"{key}s"
        structure = f"{key}s_struct"
        if not is_named:
            return [(None, config)]
        if structure in config:
            return self._items(config, key, every)
        if several in config:
            rest = Located({}).over(config, several)
            return [(name, rest) for name in config.names(several, every)]
        config.check_keys(self._keys())
        raise OptionError(
            f"{config.where()} names no {several}",
            expected=f"{several}: [{', '.join(every)}], or {structure}",
        )

    def _items(
        self, config: Located, key: str, every: tuple[str, ...]
    ) -> Iterator[tuple[str, Located]]:
        """The products or tensors of a list of mappings, whose keys take precedence over those
        around the list."""
        structure = f"{key}s_struct"
        items = config[structure]
        if not isinstance(items, list) or not items:
            raise OptionError(
                f"{config.where(structure)}: {structure} is {kind_of(items)}",
                expected=f"a list of mappings with {key}",
            )
        for item in items:
            if not isinstance(item, Located) or key not in item:
                raise OptionError(
                    f"{config.where(structure)}: an item of {structure} has no {key}",
                    expected=f"{key}: NAME",
                )
            merged = item.over(config, f"{key}s", structure)
            rest = Located({}).over(merged, key)
            for name in merged.names(key, every):
                yield name, rest

    def _keys(self) -> list[str]:
        """The keys that a configuration may have."""
        keys = [*COMMON, *self.options, "enabled"]
        if self.by_gemm:
            keys += ["gemms", "gemms_struct"]
        if self.by_tensor:
            keys += ["tensors", "tensors_struct"]
        return keys

    def _options(self, config: Located) -> dict[str, Any]:
        config.check_keys(self._keys())
        checks = {**COMMON, **self.options}
        options = {key: config.value(key, checks[key]) for key in config if key in checks}
        for key in self.required:
            if key not in options:
                raise OptionError(f"{config.where()} has no {key}", expected=f"{key}: …")
        return options

    def put_together(self) -> None:
        """Called on every rank after a step that the configuration chooses, before
        :meth:`step`."""

    def step(self) -> None:
        """Called after each step."""


class Modifying(Feature):
    """A feature that modifies the tensors of products that a configuration names."""

    by_gemm = by_tensor = True

    @api_method  # type: ignore[untyped-decorator]
    def modify_tensor_enabled(
        self, config: Any, layer_name: str, gemm: str, tensor_name: str, iteration: int = 0
    ) -> bool:
        """True, because this is called only for the tensors that the configuration names."""
        return True
