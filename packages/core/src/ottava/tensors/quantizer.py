"""``Quantizer``: turns high-precision tensors into quantized ones."""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch

from ottava.collectives import Group
from ottava.contract import NOTHING_STATED, Contract
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError
from ottava.formats import fp8_format
from ottava.kernels import HIGH_PRECISION, check_high_precision
from ottava.kernels.checks import check_dtype, check_epsilon, check_fits, check_scalar
from ottava.tensors.declaration import check_choice, check_flag
from ottava.tensors.dequantized_view import plain_values
from ottava.tensors.operand import Operand
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.tensors.tensor import QuantizedTensor, straight_through

_Choice = TypeVar("_Choice")
# A class that defines one of these has a contract of its own, or none.
_DECIDES_BYTES = ("quantize_impl", "quantization", "kernel")


class Option:
    """An option of a quantizer's class, which may be set at any time.

    Each value is checked before it is set. Where a value changes later,
    :meth:`Quantizer.option_changed` computes again whatever follows from the options.

    Args:
        checked: a function of the name of the option and a value. It returns the value to set, or
            raises an error of Ottava's.
    """

    # Without __get__, reading an option is reading an attribute of the instance.
    def __init__(self, checked: Callable[[str, Any], object]) -> None:
        self._checked = checked
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, quantizer: "Quantizer", value: object) -> None:
        checked_value = self._checked(self._name, value)
        options = quantizer.__dict__
        if self._name not in options:
            options[self._name] = checked_value
            return
        before = options[self._name]
        options[self._name] = checked_value
        try:
            quantizer.option_changed()
        except BaseException:
            options[self._name] = before
            raise


# To a type checker an option is its value, as a field of a dataclass is.


def fp8_option() -> torch.dtype:
    """The option ``fp8_dtype``: an FP8 element format, or DTypeError."""

    def checked(name: str, value: torch.dtype) -> torch.dtype:
        fp8_format(value)
        return value

    return Option(checked)  # type: ignore[return-value]


def flag_option() -> bool:
    """An option that is True or False; OptionError otherwise."""

    def checked(name: str, value: bool) -> bool:
        check_flag(name, value)
        return value

    return Option(checked)  # type: ignore[return-value]


def choice_option(choices: Sequence[_Choice]) -> _Choice:
    """An option that is one of some values of one type; OptionError otherwise."""

    def checked(name: str, value: _Choice) -> _Choice:
        check_choice(name, value, choices)
        return value

    return Option(checked)  # type: ignore[return-value]


def epsilon_option() -> float:
    """An option that is a finite number >= 0; OptionError otherwise."""

    def checked(name: str, value: float) -> float:
        check_epsilon(value)
        return float(value)

    return Option(checked)  # type: ignore[return-value]


class Quantizer(ABC):
    """Base class of quantizers. A subclass defines :meth:`quantize_impl`.

    Attributes:
        rowwise_usage: produce what fprop reads from an input or a weight, and dgrad from
            ``grad_output``.
        columnwise_usage: produce what dgrad reads from a weight, and wgrad from both of its
            operands.
        internal: return a bare storage instead of a tensor: no autograd, less overhead.
        optimize_for_gemm: allow a layout that only a GEMM reads.
    """

    #: Whether the quantizer refers to state that outlives a call; such quantizers compare by
    #: identity.
    stateful: ClassVar[bool] = False
    #: True for a user-defined quantizer whose :meth:`qgemm` is to be used instead of the shared
    #: GEMM.
    custom: bool = False
    #: Attributes that belong to the processes of a training: no file has them.
    process_attributes: ClassVar[tuple[str, ...]] = ()
    #: Whether an internal result may be an alias of the operand, which changes with it.
    aliases_operands: bool = False
    #: Whether results are in high precision. A layer whose quantizers are all of this kind computes
    #: in high precision.
    in_high_precision: bool = False
    #: Whether a weight that ``quantized_model_init`` makes under ``no_grad`` has no columns until
    #: these are asked for.
    columns_when_asked: ClassVar[bool] = False
    #: The rule for shards of a weight, an :class:`ottava.distributed.ShardRule`. It holds for the
    #: :meth:`quantize_impl` of the class that declares it: a subclass with another one declares its
    #: own, or none.
    shards: ClassVar[object] = None

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        check_flag("rowwise", rowwise)
        check_flag("columnwise", columnwise)
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])
        # It may come from a class that is no quantizer, beside this one among the bases.
        resolved = inspect.getattr_static(cls, "quantize_impl")
        if inspect.isfunction(resolved) and _takes_no_dtype(resolved):
            cls.quantize_impl = _with_dtype(resolved)  # type: ignore[method-assign]
        if _is_newer(cls, "quantize_impl", than="quantization"):
            cls.quantization = Quantizer.quantization  # type: ignore[method-assign]
        if any(_is_newer(cls, name, than="contract") for name in _DECIDES_BYTES):
            cls.contract = Quantizer.contract  # type: ignore[method-assign]

    @property
    def contract(self) -> Contract:
        """Every choice between values and the bytes of both usages, whichever are set.

        A class that says nothing of it has nothing stated, and so has a subclass that computes
        bytes by a method of its own: only the author of a quantizer knows what it does.
        """
        return NOTHING_STATED

    @abstractmethod
    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> QuantizedTensorStorage:
        """Quantize a checked, plain tensor for the usages set. ``dtype`` is the nominal dtype of
        the result.

        A subclass may define ``quantize_impl(self, tensor)`` instead: its results get the nominal
        dtype by themselves.
        """

    def quantization(
        self, device: torch.device, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], Operand | QuantizedTensorStorage]:
        """The function that a layer calls with each matrix ``[rows, columns]`` on ``device``.

        The function returns the result of :meth:`quantize_impl`, or an operand of the same tensors,
        without a storage around them. A layer asks for the function once, and calls it for every
        matrix. A subclass that has another :meth:`quantize_impl` gets this default, or defines its
        own.

        Args:
            device: of the matrices.
            dtype: the nominal dtype of the results.
        """
        return functools.partial(self.quantize_impl, dtype=dtype)

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensorStorage:
        """A result for the usages set, to be filled by :meth:`update_quantized`; errors as of
        :meth:`check_empty`."""
        sizes, place = self.check_empty(shape, dtype, device, requires_grad)
        with torch.no_grad():
            empty = self.empty_impl(sizes, dtype, place)
        if requires_grad and isinstance(empty, torch.Tensor):
            empty.requires_grad_(True)
        return empty

    def empty_impl(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> QuantizedTensorStorage:
        """A result of zeros, of checked arguments. By default zeros are quantized."""
        return self.copy().quantize_impl(torch.zeros(shape, dtype=dtype, device=device), dtype)

    def check_empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | int | None,
        requires_grad: bool,
    ) -> tuple[tuple[int, ...], torch.device]:
        """Shape and device of a :meth:`make_empty` with these arguments.

        Raises:
            ShapeError, DTypeError, DeviceError, OptionError: an argument is wrong.
        """
        if not _is_shape(shape):
            raise ShapeError(f"shape {shape!r}", expected="a sequence of integers")
        if any(size < 0 for size in shape):
            raise ShapeError(f"shape {tuple(shape)}", expected="sizes >= 0")
        check_dtype(dtype)
        self._check_usage()
        if requires_grad and self.internal:
            raise OptionError("requires_grad=True for a bare storage", expected="internal=False")
        if device is None:
            return tuple(shape), torch.get_default_device()
        return tuple(shape), as_device(device)

    def _check_usage(self) -> None:
        if not (self.rowwise_usage or self.columnwise_usage):
            raise OptionError(
                f"{type(self).__name__} has neither rowwise nor columnwise usage",
                expected="at least one",
                remedy="call set_usage(rowwise=True)",
            )

    # Any, because the result is a tensor, or a bare storage where ``internal`` is set.
    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensorStorage | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Quantize ``tensor`` (any shape; float32, bfloat16 or float16); differentiable,
        straight-through.

        Args:
            out: write into this quantized tensor and return it.
            dtype: nominal dtype of the result, the tensor's own by default.

        Raises:
            DTypeError: the tensor is not of a high-precision dtype, or nested.
            OptionError: neither usage is set.
            ShapeError, DeviceError: ``out`` does not fit.
        """
        tensor = _plain(tensor, "tensor")
        if dtype is not None and dtype not in HIGH_PRECISION:
            check_dtype(dtype)
        if out is not None:
            self.update_quantized(tensor, out)
            return out
        self._check_usage()
        nominal = dtype or tensor.dtype
        if self.internal or not (torch.is_grad_enabled() and tensor.requires_grad):
            return self.quantize_impl(tensor, nominal)
        return straight_through(tensor, lambda t, d: self.quantize_impl(t.detach(), d), nominal)

    def __call__(self, tensor: torch.Tensor, **options: Any) -> Any:
        return self.quantize(tensor, **options)

    def multi_quantize(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Quantize each tensor by itself."""
        return [self.quantize(tensor) for tensor in tensors]

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensorStorage:
        """Quantize ``src`` into ``dst`` in place; nothing happens when ``noop_flag`` holds 1.

        Raises:
            ShapeError, DeviceError, DTypeError: ``src`` or ``noop_flag`` does not fit, before
                anything is written.
        """
        if not isinstance(dst, QuantizedTensorStorage):
            raise DTypeError(
                f"destination is a {type(dst).__name__}", expected="a quantized tensor or storage"
            )
        src = _plain(src, "source")
        check_fits(src, tuple(dst.size()), dst.device, "source")
        if noop_flag is not None:
            check_scalar(noop_flag, src, "noop_flag")
        usages = dst.get_usages()
        if not any(usages.values()):
            raise dst._empty(" to write to")
        with torch.no_grad():
            quantized = self.with_usage(**usages).quantize_impl(src.detach(), src.dtype)
            dst.copy_from_storage(quantized, noop_flag=noop_flag)
        return dst

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Observe a tensor without quantizing it. Nothing to do unless the quantizer holds
        state."""

    def initialize(self, tensor: torch.Tensor) -> None:
        """Prepare for the first values of a weight that is to be kept quantized. Nothing to do
        without state."""

    def option_changed(self) -> None:
        """Called after an :class:`Option` was set to another value. A subclass computes again
        whatever follows from its options."""

    def is_quantizable(self, tensor: torch.Tensor) -> bool:
        """Whether :meth:`quantize` takes this tensor."""
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in HIGH_PRECISION:
            return False
        return tensor.layout == torch.strided and not tensor.is_nested

    def is_requantization_safe(self) -> bool:
        """Whether quantizing the same tensor again gives the same result.

        False by default, and for quantizers whose scales change from step to step.
        """
        return False

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Set the usages to produce; None leaves one as it is.

        Raises:
            OptionError: a usage is neither a bool nor None.
        """
        if rowwise is None:
            rowwise = self.rowwise_usage
        if columnwise is None:
            columnwise = self.columnwise_usage
        check_flag("rowwise", rowwise)
        check_flag("columnwise", columnwise)
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def get_usages(self) -> dict[str, bool]:
        """The usages set, ``{"rowwise": …, "columnwise": …}``."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def with_usage(self, rowwise: bool, columnwise: bool) -> Self:
        """This quantizer if it has these usages, else a copy that has."""
        if (self.rowwise_usage, self.columnwise_usage) == (rowwise, columnwise):
            return self
        copied = self.copy()
        copied.set_usage(rowwise=rowwise, columnwise=columnwise)
        return copied

    def for_usage(self, columnwise: bool) -> "Quantizer":
        """The quantizer that makes the data of one usage: this one, unless a subclass has one for
        each."""
        return self

    def for_shards(self, group: Group) -> "Quantizer":
        """The quantizer of one shard of a tensor whose other shards lie on the ranks of ``group``.

        All shards of one tensor share one scale. A quantizer whose scale depends on all of the
        tensor returns one that reduces over ``group``; the default is for quantizers whose scales
        do not, and returns this one.
        """
        return self

    def copy(self) -> Self:
        """A quantizer with the same configuration whose usages can be set by themselves."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def _by_identity(self) -> bool:
        return self.stateful or _holds_tensors(vars(self))

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other) or self._by_identity():
            return self is other
        return vars(self) == vars(other)

    def __hash__(self) -> int:
        # Options may be set while the quantizer is a key.
        return object.__hash__(self) if self._by_identity() else hash(type(self))

    def is_alike(self, other: "Quantizer") -> bool:
        """Whether ``other`` is of this class and has the same options, whatever the state of
        either.

        What belongs to the process, such as a group, may differ: a copy may have lost it.
        """
        return type(self) is type(other) and self._options() == other._options()

    def _options(self) -> dict[str, object]:
        """The attributes without tensors, which are state, and without those of the process."""
        return {
            name: value
            for name, value in vars(self).items()
            if name not in self.process_attributes and not isinstance(value, torch.Tensor)
        }

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"

    def qgemm(
        self,
        qx: torch.Tensor | QuantizedTensorStorage,
        qw: torch.Tensor | QuantizedTensorStorage,
        m_params: Any,
        out_dtype: torch.dtype,
        sx: torch.Tensor | None,
        sw: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        gemm_type: str = "fprop",
        qresult_x: torch.Tensor | QuantizedTensorStorage | None = None,
        qresult_w: torch.Tensor | QuantizedTensorStorage | None = None,
    ) -> torch.Tensor:
        """The product of two quantized operands; by default both are dequantized and multiplied in
        float32.

        Args:
            qx, qw: the operands: ``input`` and ``weight`` for fprop, ``grad_output`` and ``weight``
                for dgrad, ``grad_output`` and ``input`` for wgrad.
            m_params, sx, sw: for quantizers that need them; unused here. A subclass may give
                ``m_params`` any type.
            qresult_x, qresult_w: the quantized tensors that ``qx`` and ``qw`` came from, when these
                are bare.
        """
        if gemm_type not in ("fprop", "dgrad", "wgrad"):
            raise OptionError(f"gemm_type is {gemm_type!r}", expected="fprop, dgrad or wgrad")
        left = _as_float_matrix(qx if qresult_x is None else qresult_x)
        right = _as_float_matrix(qw if qresult_w is None else qresult_w)
        if gemm_type == "wgrad":
            left = left.t()
        if gemm_type == "fprop":
            right = right.t()
        result = left @ right
        if bias is not None:
            result = result + bias.to(torch.float32)
        if out is None:
            return result.to(out_dtype)
        return out.add_(result) if accumulate else out.copy_(result)


def _is_shape(shape: object) -> bool:
    if not isinstance(shape, Sequence):
        return False
    return all(isinstance(size, (int, torch.SymInt)) for size in shape)


def _as_float_matrix(operand: torch.Tensor | QuantizedTensorStorage) -> torch.Tensor:
    """The values of an operand in float32, as a matrix."""
    if isinstance(operand, QuantizedTensorStorage):
        values = operand.dequantize(torch.float32)
    else:
        values = operand.float()
    return values.reshape(-1, values.shape[-1])


def _is_newer(cls: type, name: str, than: str) -> bool:
    """Whether ``cls`` finds its method ``name`` in a class before the one that has ``than``."""
    for base in cls.__mro__:
        if than in vars(base):
            return False
        if name in vars(base):
            return True
    return False


def _takes_no_dtype(function: Callable[..., object]) -> bool:
    """Whether a ``quantize_impl`` takes a tensor, and no second argument by position."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) == 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _with_dtype(
    quantize_impl: Callable[[Quantizer, torch.Tensor], object],
) -> Callable[..., QuantizedTensorStorage]:
    """A ``quantize_impl(self, tensor)`` that also takes the nominal dtype of its result."""

    @functools.wraps(quantize_impl)
    def quantize(
        self: Quantizer, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        quantized = quantize_impl(self, tensor)
        if not isinstance(quantized, QuantizedTensorStorage):
            raise DTypeError(
                f"{type(self).__name__}.quantize_impl returned a {type(quantized).__name__}",
                expected="an ottava.QuantizedTensor or QuantizedTensorStorage",
                remedy="return what holds the quantized data",
            )
        if dtype is None or quantized.dtype == dtype:
            return quantized
        if isinstance(quantized, QuantizedTensor):
            return quantized.make_like(quantized, dtype=dtype)
        quantized._dtype = dtype
        return quantized

    return quantize


def as_device(device: torch.device | str | int) -> torch.device:
    """``device`` as a ``torch.device``, or DeviceError; whether this machine has it shows when it
    is used."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"device {device!r}", expected="the name of a device, such as 'cpu' or 'cuda:0'"
        ) from error


def _plain(tensor: torch.Tensor | QuantizedTensorStorage, name: str) -> torch.Tensor:
    """A plain tensor of high precision with the values of ``tensor``.

    Raises:
        DTypeError: ``tensor`` has no such values.
    """
    if isinstance(tensor, QuantizedTensorStorage):
        tensor = tensor.dequantize()
    check_high_precision(tensor, name)
    return plain_values(tensor)


def _holds_tensors(value: object) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_tensors(entry) for entry in value)
    return isinstance(value, torch.Tensor)
