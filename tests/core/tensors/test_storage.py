"""What derives from a storage's declaration, and saving for backward."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, ClassVar

import pytest
import torch

from ottava import (
    Float8Tensor,
    Float8TensorStorage,
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_saved,
)
from ottava.errors import OptionError, ShapeError, UsageError
from ottava.tensors import InnerTensor, StaticField, columnwise_layout


class PairStorage(QuantizedTensorStorage):
    """A third party's storage: it declares three tensors and defines shape and values, nothing
    else."""

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_codes", "codes", usage="rowwise", gather=True),
        InnerTensor("_columns", "columns", usage="columnwise"),
        InnerTensor("_scale", "scale"),
    )
    static_fields: ClassVar[tuple[StaticField, ...]] = (StaticField("_bits", "bits"),)

    def __init__(
        self, *, codes: Any, columns: Any, scale: Any, bits: int, quantizer: Any = None
    ) -> None:
        self._codes, self._columns, self._scale, self._bits = codes, columns, scale, bits
        self._quantizer = quantizer

    def size(self, dim: int | None = None) -> Any:
        held = self._codes if self._codes is not None else self._columns
        return held.size() if dim is None else held.size(dim)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (self._codes.float() * self._scale).to(dtype or torch.float32)


def make_pair() -> PairStorage:
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4)
    return PairStorage(codes=codes, columns=codes + 1, scale=torch.tensor(0.5), bits=7)


def same(a: Any, b: Any) -> bool:
    pairs = zip(a.inner_list(), b.inner_list(), strict=True)
    return type(a) is type(b) and all(
        (x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in pairs
    )


def test_flatten_and_build_give_the_storage_back() -> None:
    pair = make_pair()
    tensors, spec = pair.flatten_storage()
    built = spec.build(tensors)
    assert same(pair, built)
    assert built._bits == 7
    assert hash(spec) == hash(pair.flatten_storage()[1])


def test_declared_storages_clone_copy_pickle_and_count() -> None:
    pair = make_pair()
    clone = pair.clone_storage()
    pair._codes.add_(1)
    assert torch.equal(clone._codes, pair._codes - 1)
    assert pair.nbytes == 12 + 12 + 4
    again = pickle.loads(pickle.dumps(pair))
    assert same(pair, again)
    assert same(pair, copy.deepcopy(pair))
    buffer = io.BytesIO()
    torch.save(pair, buffer)
    buffer.seek(0)
    assert same(pair, torch.load(buffer, weights_only=True))
    with pytest.raises(UsageError):
        pair.quantize_(torch.zeros(3, 4))


def test_update_usage_drops_and_refuses() -> None:
    pair = make_pair()
    pair.update_usage(columnwise_usage=False)
    assert pair.get_usages() == {"rowwise": True, "columnwise": False}
    assert pair._columns is None
    with pytest.raises(UsageError, match="columnwise"):
        pair.update_usage(columnwise_usage=True)
    with pytest.raises(OptionError, match="neither"):
        pair.update_usage(rowwise_usage=False)
    assert pair._codes is not None


def test_methods_release_and_take_back() -> None:
    pair = make_pair()
    copy_of = make_pair()
    tensors, returned = pair.prepare_for_saving()
    assert returned is pair
    assert pair.inner_list() == [None, None, None]
    extra = torch.ones(1)
    assert pair.restore_from_saved([*tensors, extra]) == [extra]
    assert same(pair, copy_of)
    with pytest.raises(ShapeError):
        pair.restore_from_saved(tensors[:1])
    pair.clear()
    assert pair.nbytes == 0
    assert "no readable data" in repr(pair)


def test_any_mix_is_saved_and_restored_in_either_order(quantizer: Quantizer) -> None:
    tensor = quantizer(torch.randn(4, 6))
    plain = torch.randn(3)
    pair = make_pair()
    tensors, objects = prepare_for_saving(tensor, None, plain, pair)
    for arguments in ((tensors, objects), (objects, tensors), (tuple(tensors), objects)):
        a, b, c, d = restore_from_saved(*arguments)
        assert same(a, tensor)
        assert isinstance(a, Float8Tensor)
        assert b is None
        assert c is plain
        assert same(d, pair)
    assert restore_from_saved(*prepare_for_saving(None, None)) == [None, None]
    assert restore_from_saved(*prepare_for_saving()) == []
    with pytest.raises(ShapeError):
        restore_from_saved(tensors[:-1], objects)


def test_saving_through_autograd(quantizer: Quantizer) -> None:
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            tensors, ctx.objects = prepare_for_saving(quantizer(x), x, None)
            ctx.save_for_backward(*tensors)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            q, x, nothing = restore_from_saved(ctx.saved_tensors, ctx.objects)
            assert nothing is None
            return q.dequantize() + x

    x = torch.randn(5, requires_grad=True)
    Keep.apply(x).sum().backward()
    assert torch.equal(x.grad, quantizer(x.detach()).dequantize() + x.detach())


def test_float8_storage_serves_both_usages_from_one_buffer_here(quantizer: Quantizer) -> None:
    quantizer.internal = True
    stored = quantizer(torch.randn(4, 6))
    assert type(stored) is Float8TensorStorage
    assert stored._transpose is None
    assert stored.get_usages() == {"rowwise": True, "columnwise": True}
    stored.update_usage(rowwise_usage=False)
    assert stored._data is not None


def test_float8_storage_with_hoppers_layout(quantizer: Quantizer) -> None:
    x = torch.randn(2, 3, 5)
    quantizer.internal = True
    with columnwise_layout("transpose"):
        stored = quantizer(x)
        values = stored.dequantize()
        assert stored._transpose.shape == (5, 2, 3)
        assert torch.equal(stored._transpose, stored._data.movedim(-1, 0))
        stored.update_usage(rowwise_usage=False)
        assert stored._data is None
        assert stored.get_usages() == {"rowwise": False, "columnwise": True}
        assert stored.size() == (2, 3, 5)
        assert torch.equal(stored.dequantize(), values)
        stored.update_usage(rowwise_usage=True)
        assert torch.equal(stored.dequantize(), values)
        stored.update_usage(columnwise_usage=False)
        assert stored._transpose is None
        stored.update_usage(columnwise_usage=True)
        assert torch.equal(stored._transpose, stored._data.movedim(-1, 0))
