"""What features have in common: which products and tensors of a layer, in which steps, with which
options."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ottava.errors import OptionError, OttavaError
from ottava_debug.located import Located, kind_of, names, truth, unknown
from ottava_debug.products import TENSORS

GEMMS = tuple(TENSORS)
EVERY_TENSOR = tuple(dict.fromkeys(tensor for tensors in TENSORS.values() for tensor in tensors))
#: What is done where a feature raises: it is switched off for the layer, with a warning, or the
#: error is raised.
ON_ERROR = ("warn", "raise")

#: ``check(value)`` gives the value that is meant, or raises an error of Ottava.
Check = Callable[[Any], Any]


def _step(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise OptionError(f"is {kind_of(value)}", expected="a step, or -1 for no end")
    return value


def _frequency(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"is {kind_of(value)}", expected="a number of steps, from 1")
    return value


def _ranges(value: Any) -> list[tuple[int, int]]:
    expected = "ascending pairs [start, end], ends included, no overlap, the last end -1 for none"
    pairs = value if isinstance(value, list) else [value]
    for number, pair in enumerate(pairs):
        ordered = (
            isinstance(pair, (list, tuple))
            and len(pair) == 2
            and all(type(step) is int for step in pair)
        )
        if not ordered or not (
            0 <= pair[0] <= pair[1] or (pair[1] == -1 and number == len(pairs) - 1)
        ):
            raise OptionError(f"has {kind_of(pair)}", expected=expected)
        if number and pairs[number - 1][1] > pair[0]:
            raise OptionError(f"has {kind_of(pair)} after {pairs[number - 1]!r}", expected=expected)
    return [(start, end) for start, end in pairs]


def _on_error(value: Any) -> str:
    if value not in ON_ERROR:
        raise OptionError(f"is {kind_of(value)}", expected=" or ".join(ON_ERROR))
    return str(value)


#: Options that every feature has.
COMMON: dict[str, Check] = {
    "start_step": _step,
    "end_step": _step,
    "start_end_list": _ranges,
    "freq": _frequency,
    "on_error": _on_error,
}


def checked(given: Located, key: str, check: Check, what: str) -> Any:
    """What the value at a key means. OptionError: it is not allowed; the message names ``what``,
    key and line."""
    try:
        return check(given[key])
    except OttavaError as error:
        text = f"{given.where(key)}: {what}: {key} {error.what}"
        raise OptionError(text, expected=error.expected, remedy=error.remedy) from error


@dataclass(frozen=True)
class Target:
    """A tensor of a product, or any (None), with the options that hold for it."""

    gemm: str | None
    tensor: str | None
    options: Mapping[str, Any]

    def active(self, step: int) -> bool:
        """Whether the step is among those chosen: ends are included, and the end -1 is none."""
        get = self.options.get
        if step % get("freq", 1):
            return False
        one = (get("start_step", 0), get("end_step", -1))
        ranges = get("start_end_list") or [one]
        return any(start <= step and (end == -1 or step <= end) for start, end in ranges)


class Feature:
    """A feature: what is done to the tensors of some layers, or seen of them.

    A class of one's own may derive from it. It has any of the methods below, marked by
    ``nvdlfw_inspect.registry.api_method``, and is registered by
    ``nvdlfw_inspect.registry.Registry.register_feature`` in a file of a folder that
    ``initialize(feature_dirs=…)`` is given. Methods are called by keywords, with those of these
    arguments that they take:

    - ``fp8_gemm_enabled(config, layer_name, gemm, iteration)``: False has the product take high
      precision.
    - ``modify_tensor_enabled(config, layer_name, gemm, tensor_name, iteration)``: whether to call
      ``modify_tensor``.
    - ``modify_tensor(config, layer_name, gemm, tensor_name, tensor, iteration)``: the values that
      are taken instead, or a quantized tensor.
    - ``inspect_tensor_enabled(config, layer_name, tensor_name, iteration)``, then
      ``inspect_tensor(config, layer_name, tensor_name, tensor, iteration,
      rowwise_quantized_tensor, columnwise_quantized_tensor)``: once for each tensor.
    - ``inspect_tensor_postquantize_enabled(config, layer_name, gemm, tensor_name, iteration)``,
      then ``inspect_tensor_postquantize(config, layer_name, gemm, tensor_name, tensor, rowwise,
      iteration)``: each quantized operand of a product.
    - ``step()``: after each step.

    A tensor that ``modify_tensor`` is given is a copy. Those that others are given must not be
    changed in place.
    """

    #: Whether a configuration names products, and tensors.
    by_gemm: ClassVar[bool] = False
    by_tensor: ClassVar[bool] = False
    #: Options besides :data:`COMMON`, and those of them that must be there.
    options: ClassVar[dict[str, Check]] = {}
    required: ClassVar[tuple[str, ...]] = ()

    def targets(self, config: Mapping[str, Any], what: str) -> list[Target]:
        """What a configuration says, pairs of products and tensors.

        Args:
            what: what errors call the feature.

        Raises:
            OptionError: something in it is not allowed; the message names the line.
        """
        given = config if isinstance(config, Located) else Located(config)
        if "enabled" in given:
            truth(given, "enabled", what)
        found = []
        for gemm, at_gemm in (
            self._levels(given, "gemm", GEMMS, what) if self.by_gemm else [(None, given)]
        ):
            tensors = TENSORS.get(str(gemm), EVERY_TENSOR)
            for tensor, at in (
                self._levels(at_gemm, "tensor", EVERY_TENSOR, what)
                if self.by_tensor
                else [(None, at_gemm)]
            ):
                options = self._checked(at, what)
                # In lists for several products a tensor is meant for those that have it.
                if tensor is None or tensor in tensors:
                    found.append(Target(gemm, tensor, options))
        nothing_to_do = [] in (given.get("gemms"), given.get("tensors"))
        if not found and not nothing_to_do:
            raise OptionError(
                f"{given.where()}: {what} names no tensor of the products that it names",
                expected=_pairs(),
            )
        return found

    def _levels(
        self, given: Located, key: str, known: tuple[str, ...], what: str
    ) -> Iterator[tuple[str, Located]]:
        """Names of products or tensors, each with what holds for it: of a structure, its own keys
        over the others."""
        several, structure = f"{key}s", f"{key}s_struct"
        if structure in given:
            if not isinstance(given[structure], list) or not given[structure]:
                where = f"{given.where(structure)}: {what}: {structure}"
                raise OptionError(
                    f"{where} is {kind_of(given[structure])}",
                    expected=f"a list of mappings with {key}",
                )
            for item in given[structure]:
                if not isinstance(item, Located) or key not in item:
                    where = item.where() if isinstance(item, Located) else given.where(structure)
                    raise OptionError(
                        f"{where}: {what}: an item of {structure} has no {key}",
                        expected=f"{key}: NAME",
                    )
                for name in names(item, key, what, known):
                    yield name, item.over(given, key, several, structure)
        elif several in given:
            for name in names(given, several, what, known):
                yield name, given.over(Located({}), several)
        else:
            self._check_keys(given, what)
            expected = f"{several}: [{', '.join(known)}], or {structure}"
            raise OptionError(f"{given.where()}: {what} names no {several}", expected=expected)

    def _check_keys(self, given: Located, what: str) -> None:
        levels = ["gemms", "gemms_struct"] if self.by_gemm else []
        levels += ["tensors", "tensors_struct"] if self.by_tensor else []
        known = [*COMMON, *self.options, "enabled", *levels]
        for key in given:
            if key not in known:
                raise unknown(given.where(key), f"{what} has no key", key, known)

    def _checked(self, given: Located, what: str) -> dict[str, Any]:
        self._check_keys(given, what)
        checks = {**COMMON, **self.options}
        found = {key: checked(given, key, checks[key], what) for key in given if key in checks}
        for key in self.required:
            if key not in found:
                raise OptionError(f"{given.where()}: {what} has no {key}", expected=f"{key}: …")
        return found

    def put_together(self) -> None:
        """Called on every rank after a step in which a configuration has the feature act, before
        :meth:`step`."""

    def step(self) -> None:
        """Called after each step."""


def _pairs() -> str:
    return "; ".join(f"of {gemm} {', '.join(tensors)}" for gemm, tensors in TENSORS.items())
