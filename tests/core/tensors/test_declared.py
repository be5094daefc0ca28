"""What a class that only declares its inner tensors has: constructors, sizes, empty results,
tensors."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from rows import E4M3, OneScaleTensor, RowQuantizer, Rows, RowStorage, RowTensor

import ottava
from ottava import (
    Float8Tensor,
    Float8TensorStorage,
    GridQuantizer,
    GridTensorStorage,
    Layout,
    QuantizedTensor,
    QuantizedTensorStorage,
    prepare_for_saving,
    restore_from_saved,
)
from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.tensors import InnerTensor, StaticField, as_data


def parts(*shape: int) -> dict[str, Any]:
    return {"codes": torch.zeros(shape, dtype=torch.uint8), "scale_inv": torch.ones(*shape[:-1], 1)}


def test_a_storage_is_built_from_its_declaration() -> None:
    given = parts(3, 4)
    storage = RowStorage(**given, dtype=torch.bfloat16)
    assert storage._codes is given["codes"]
    assert storage._scale_inv is given["scale_inv"]
    assert storage.size() == storage.shape == (3, 4)
    assert storage.size(-1) == 4
    assert storage.numel() == 12
    assert storage.dtype == torch.bfloat16
    assert storage._quantizer is None
    assert storage.nbytes == 12 + 12
    assert storage.dequantize().dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"codes": None, "scale_inv": None}, "no 'dtype'"),
        ({"dtype": torch.float32, "data": None}, "unknown keyword 'data'"),
    ],
)
@pytest.mark.parametrize("cls", [RowStorage, OneScaleTensor])
def test_other_keywords_are_refused(cls: Any, keywords: Any, said: str) -> None:
    if cls is OneScaleTensor:
        keywords = {
            "codes": torch.zeros(2, 2, dtype=torch.uint8),
            "dtype": torch.float32,
            "data": None,
        }
        said = "unknown keyword 'data'"
    with pytest.raises(OptionError, match=rf"{cls.__name__} was given an? ?{said}|{said}.*codes"):
        cls(**keywords)


def test_a_static_field_of_a_tensor_is_required() -> None:
    class Tagged(QuantizedTensor):
        inner_tensors = (InnerTensor("_codes", "codes"),)
        static_fields = (StaticField("_tag", "tag"),)

    with pytest.raises(OptionError, match=r"Tagged was given no 'tag'.*codes, tag"):
        Tagged(codes=torch.zeros(2), dtype=torch.float32)
    assert Tagged(codes=torch.zeros(2), dtype=torch.float32, tag=3)._tag == 3


def test_a_storage_without_data_has_no_size() -> None:
    storage = RowStorage(dtype=torch.float32)
    with pytest.raises(UsageError, match="holds no data"):
        storage.size()
    with pytest.raises(UsageError, match="holds no data"):
        QuantizedTensorStorage().size()


def test_a_tensor_is_built_from_its_declaration() -> None:
    tensor = RowTensor(**parts(3, 4), dtype=torch.bfloat16, requires_grad=True)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.shape == (3, 4)
    assert tensor.dtype == torch.bfloat16
    assert tensor.requires_grad
    assert tensor.is_contiguous()
    assert [field.argument for field in RowTensor.all_static_fields()] == ["shape", "dtype"]
    assert RowTensor(**parts(3, 4), dtype=torch.float32, shape=(12,)).shape == (12,)


@pytest.mark.parametrize("given", [{}, {"scale_inv": torch.ones(3, 1)}])
def test_a_tensor_needs_data(given: Any) -> None:
    with pytest.raises(UsageError, match="RowTensor needs"):
        RowTensor(dtype=torch.float32, **given)


def test_the_shape_serves_where_the_first_is_not_held() -> None:
    tensor = RowTensor(scale_inv=torch.ones(3, 1), dtype=torch.float32, shape=(3, 4))
    assert tensor.shape == (3, 4)


def test_a_tensor_takes_its_values_from_the_storage_class() -> None:
    x = torch.randn(5, 8)
    quantizer = RowQuantizer()
    tensor = quantizer(x)
    bare = copy.copy(quantizer)
    bare.internal = True
    assert type(tensor) is RowTensor
    assert type(bare(x)) is RowStorage
    assert torch.equal(tensor.dequantize(), bare(x).dequantize())
    codes = tensor._codes.view(E4M3).double() * tensor._scale_inv.double()
    assert torch.equal(tensor.dequantize(torch.float64), codes.float().double())
    assert tensor.bfloat16().dtype == torch.bfloat16


def test_everything_else_is_derived() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    tensor = RowQuantizer()(x)
    tensor.dequantize().square().sum().backward()
    assert torch.equal(x.grad, 2 * tensor.dequantize().detach())
    tensor = RowQuantizer()(x.detach())
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    for other in (
        torch.load(file, weights_only=True),
        copy.deepcopy(tensor),
        tensor.clone(),
        restore_from_saved(*prepare_for_saving(tensor))[0],
        tensor.to("cpu", copy=True),
    ):
        assert type(other) is RowTensor
        assert torch.equal(other.dequantize(), tensor.dequantize())
    changed = tensor.clone()
    changed.mul_(2)
    assert torch.equal(changed.dequantize(), 2 * tensor.dequantize())


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3, 4)])
def test_an_empty_result_is_made_by_default(shape: Any) -> None:
    made = RowQuantizer().make_empty(shape, dtype=torch.float16, requires_grad=True)
    assert made.shape == shape
    assert made.dtype == torch.float16
    assert made.requires_grad
    x = torch.randn(shape)
    RowQuantizer().update_quantized(x, made)
    assert torch.equal(made.dequantize(torch.float32), RowQuantizer()(x).dequantize())


def test_an_empty_result_of_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ShapeError):
        RowQuantizer().make_empty((-1, 2))
    quantizer = RowQuantizer()
    quantizer.internal = True
    with pytest.raises(OptionError):
        quantizer.make_empty((1, 2), requires_grad=True)


@pytest.mark.parametrize("primary", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_layer_compiles(primary: bool) -> None:
    torch.manual_seed(0)
    with ottava.quantized_model_init(Rows(), enabled=primary):
        layer = ottava.nn.Linear(8, 4, recipe=Rows())
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).square().sum().backward()
    eager = (x.grad.clone(), layer.weight.grad.clone())
    x.grad = layer.weight.grad = None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x).square().sum().backward()
    assert torch.equal(x.grad, eager[0])
    assert torch.equal(layer.weight.grad, eager[1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": None},
        {"dtype": torch.int32},
        {"dtype": "float"},
        {"codes": 3},
        {"scale_inv": [1.0]},
    ],
)
def test_values_of_a_wrong_kind_are_refused(wrong: Any) -> None:
    right = {**parts(2, 4), "dtype": torch.float32}
    assert RowTensor(**right).shape == (2, 4)
    with pytest.raises(DTypeError):
        RowTensor(**(right | wrong))
    with pytest.raises(DTypeError, match="nominal dtype None"):
        RowTensor(**parts(2, 4))
    if "dtype" not in wrong:
        with pytest.raises(DTypeError):
            RowStorage(**(right | wrong))


class Graded(QuantizedTensorStorage):
    """A storage with a value that may be left out."""

    inner_tensors = (InnerTensor("_bytes", "bytes", gather=True),)
    static_fields = (StaticField("_dtype", "dtype"), StaticField("_grade", "grade", default=3))

    @classmethod
    def check_declared(cls, declared: dict[str, Any]) -> dict[str, Any]:
        return declared | {"bytes": as_data(declared["bytes"], torch.float8_e5m2, "bytes")}

    def dequantize(self, dtype: Any = None) -> torch.Tensor:
        return self._bytes.to(dtype or self.dtype)  # type: ignore[attr-defined,no-any-return]


def test_what_is_left_out_has_its_default() -> None:
    for given in (torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.float8_e5m2)):
        made: Any = Graded(bytes=given, dtype=torch.float32)
        assert made._grade == 3
        assert made._bytes.dtype == torch.uint8
        tensors, spec = made.flatten_storage()
        assert spec.static == (torch.float32, 3)
        again: Any = spec.rebuild(tensors)
        assert (type(again), again._grade, again._bytes) == (Graded, 3, made._bytes)
    empty: Any = Graded(bytes=None, dtype=torch.float32, grade=4)
    assert empty._grade == 4
    with pytest.raises(DTypeError, match=r"bytes is of torch.float32.*float8_e5m2"):
        Graded(bytes=torch.zeros(2, 2), dtype=torch.float32)


class Tagged(GridTensorStorage):
    """Data on a grid with a value that its quantizer need not say."""

    static_fields = (*GridTensorStorage.static_fields, StaticField("_tag", "tag", default=3))


class Labelled(GridTensorStorage):
    """Data on a grid with a value that its quantizer has to say."""

    static_fields = (*GridTensorStorage.static_fields, StaticField("_label", "label"))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_quantizer_leaves_fields_to_their_defaults(compiled: bool) -> None:
    quantizer = GridQuantizer(Layout(torch.float8_e4m3fn, (1, 32)))
    quantizer.internal, x = True, torch.randn(8, 64)
    expected = quantizer(x).dequantize()
    quantizer.storage_class = Tagged  # type: ignore[misc]

    def run(x: torch.Tensor) -> Any:
        made = quantizer(x)
        return made.dequantize(), made._tag

    values, tag = torch.compile(run, backend="eager", fullgraph=True)(x) if compiled else run(x)
    assert torch.equal(values, expected)
    assert tag == 3
    quantizer.storage_class = Labelled  # type: ignore[misc]
    with pytest.raises(OptionError, match=r"Labelled was given no 'label'"):
        quantizer(x)


def test_keywords_that_nobody_declares_are_named() -> None:
    for cls in (Float8Tensor, Float8TensorStorage):
        given = {
            "dtype": torch.float32,
            "fp8_scale_inv": torch.ones(()),
            "data": torch.zeros(2, 2, dtype=torch.uint8),
        }
        with pytest.raises(OptionError, match="no 'fp8_dtype'"):
            cls(**given)
        with pytest.raises(OptionError, match="unknown keyword 'scale'"):
            cls(**given, fp8_dtype=torch.float8_e4m3fn, scale=1)


def test_what_a_product_keeps_is_outdated_by_a_write_to_any_alias() -> None:
    one, other = (
        Graded(bytes=torch.zeros(2, 2, dtype=torch.uint8), dtype=torch.float32) for _ in range(2)
    )
    other.share_writes(one)
    cache, tensor, made = one.gemm_cache(), torch.zeros(2), []
    assert cache is not None
    for write in (lambda: None, other.mark_written, lambda: tensor.add_(1)):
        write()
        for _ in range(2):
            cache.get(False, (tensor,), lambda: made.append(0))
    assert len(made) == 3
    assert one.gemm_cache() is cache
    # A write through an alias that no longer counts with this one says nothing of it.
    one.share_writes(Graded(bytes=None, dtype=torch.float32))
    assert one.gemm_cache() is not cache
