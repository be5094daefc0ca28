"""``DelayedScaling``: the recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ottava.errors import OptionError
from ottava.formats import Format
from ottava.recipes.base import Recipe
from ottava.recipes.role import QuantizerRole
from ottava_delayed.quantizer import Float8Quantizer
from ottava_delayed.state import DelayedScalingState
from ottava_delayed.update import update

AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor]
ScaleAlgorithm = Callable[[torch.Tensor, torch.Tensor, float, "DelayedScaling"], torch.Tensor]


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Per-tensor FP8 whose scales come from the amaxes of past steps.

    Attributes:
        margin: scales are divided by 2^margin, so that values up to 2^margin times the amax are
            not clamped.
        fp8_format: ``Format.HYBRID`` (E4M3 forward, E5M2 for gradients), ``Format.E4M3`` or
            ``Format.E5M2``.
        amax_history_len: the number of steps that an amax is remembered, the current step included.
        amax_compute_algo: ``"max"`` of the history, its ``"most_recent"`` entry, or a function that
            takes the histories ``[amax_history_len, slots]``, with the current step in row 0, and
            returns the amaxes ``[slots]``.
        scaling_factor_compute_algo: a function ``(amax [slots], scale [slots], fp8_max, recipe)``
            that returns the new scales ``[slots]``, instead of ``(fp8_max * 2^-margin) / amax``. It
            is called once for the slots of each format.
        reduce_amax: use the largest amaxes of all ranks of autocast's ``amax_reduction_group``, or
            of the default group where autocast names none. One all-reduce serves all layers, when
            a region is entered.
        backward: what the backward pass reads, as :attr:`ottava.recipes.Recipe.backward` says.

    A slot that recorded no amax in a step keeps its scale and history, under any algorithm.

    Raises:
        OptionError: a field has a value that is not allowed.
    """

    name: ClassVar[str] = "delayed"
    stateful: ClassVar[bool] = True
    #: Whether a user's function computes amaxes or scales; it follows from the fields.
    by_functions = True

    margin: float = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScaleAlgorithm | None = None
    reduce_amax: bool = True
    backward: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        # With a margin beyond 64, a format's maximum times 2^-margin would no longer be exact.
        is_number = isinstance(self.margin, (int, float)) and not isinstance(self.margin, bool)
        if not is_number or not -64 <= self.margin <= 64:
            raise OptionError(f"margin is {self.margin!r}", expected="a number from -64 to 64")
        if not isinstance(self.fp8_format, Format):
            raise OptionError(
                f"fp8_format is {self.fp8_format!r}",
                expected=f"one of {', '.join(f'Format.{f.name}' for f in Format)}",
            )
        length = self.amax_history_len
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise OptionError(f"amax_history_len is {length!r}", expected="a positive integer")
        amax_algorithm, scale_algorithm = self.amax_compute_algo, self.scaling_factor_compute_algo
        if not callable(amax_algorithm) and amax_algorithm not in ("max", "most_recent"):
            raise OptionError(
                f"amax_compute_algo is {amax_algorithm!r}",
                expected="'max', 'most_recent' or a function",
            )
        if scale_algorithm is not None and not callable(scale_algorithm):
            raise OptionError(
                f"scaling_factor_compute_algo is {scale_algorithm!r}", expected="None or a function"
            )
        if not isinstance(self.reduce_amax, bool):
            raise OptionError(f"reduce_amax is {self.reduce_amax!r}", expected="True or False")
        by_functions = callable(amax_algorithm) or scale_algorithm is not None
        # The dataclass is frozen, so an ordinary assignment would raise.
        object.__setattr__(self, "by_functions", by_functions)

    @property
    def reduces_amaxes(self) -> bool:  # type: ignore[override]
        return self.reduce_amax

    def fp8_dtype(self, role: QuantizerRole) -> torch.dtype:
        """The element format of a role: the backward format for gradients, otherwise the forward
        format."""
        element = self.fp8_format.backward if role.is_gradient else self.fp8_format.forward
        return element.torch_dtype

    def make_quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: Any = None
    ) -> Float8Quantizer:
        """A quantizer with its own state; the quantizers of a layer share the layer's state."""
        scale, amax = torch.ones(1, dtype=torch.float32), torch.zeros(1, dtype=torch.float32)
        return Float8Quantizer(scale, amax, self.fp8_dtype(role))

    def make_state(
        self, roles: Sequence[QuantizerRole], *, amax_reduction_group: Any = None
    ) -> DelayedScalingState:
        return DelayedScalingState(self, roles, amax_reduction_group=amax_reduction_group)

    # ``update`` names its parameters as the base class does.
    update_states = update  # type: ignore[assignment]
