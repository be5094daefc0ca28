"""Classes of third parties that declare their inner tensors: construction, rows, and what a
declaration may leave out. The conformance kit checks what is derived for every tensor."""

from __future__ import annotations

import copy
import itertools
from typing import Any, ClassVar

import pytest
import torch

from ottava import (
    GridQuantizer,
    GridTensorStorage,
    Layout,
    QuantizedTensor,
    QuantizedTensorStorage,
    prepare_for_saving,
    restore_from_saved,
)
from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.tensors import DequantizedView, InnerTensor, StaticField, as_data
from tests.cases import told
from tests.comparing import assert_same
from tests.copying import by_file, by_pickle
from tests.samples import wide
from tests.strangers import (
    E4M3,
    AloneRows,
    OneScaleTensor,
    RowStorage,
    RowTensor,
    SilentOneScale,
)
from tests.strided import ROWS, check_places

QUANTIZERS: dict[str, Any] = {"rows": AloneRows(), "one scale": SilentOneScale()}
BOTH = pytest.mark.parametrize("name", QUANTIZERS)


class PairStorage(QuantizedTensorStorage):
    """It has a constructor and a shape of its own, and defines its values."""

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

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (self._codes.float() * self._scale).to(dtype or torch.float32)


class BlockTensor(QuantizedTensor):
    """A scale for each two rows, which are one row of the scales."""

    inner_tensors = (
        InnerTensor("_codes", "codes", gather=True),
        InnerTensor("_scales", "scales", gather=True, block_rows=2),
    )

    def dequantize_impl(self, dtype: torch.dtype) -> torch.Tensor:
        scales = self._scales.repeat_interleave(2, 0)[: len(self._codes)]
        return (self._codes.float() * scales).to(dtype)


class Graded(QuantizedTensorStorage):
    """A storage with a value that may be left out."""

    inner_tensors = (InnerTensor("_bytes", "bytes", gather=True),)
    static_fields = (StaticField("_dtype", "dtype"), StaticField("_grade", "grade", default=3))

    @classmethod
    def check_declared(cls, declared: dict[str, Any]) -> dict[str, Any]:
        return declared | {"bytes": as_data(declared["bytes"], torch.float8_e5m2, "bytes")}


def parts(*shape: int) -> dict[str, Any]:
    return {"codes": torch.zeros(shape, dtype=torch.uint8), "scale_inv": torch.ones(*shape[:-1], 1)}


@BOTH
def test_guards_of_compiled_code_serve_tensors_that_differ_in_values_alone(name: str) -> None:
    """As torch asks, so that nothing is compiled again for each tensor."""
    one, other = (QUANTIZERS[name](wide(4, 8, seed=seed)) for seed in (0, 1))
    alone = QUANTIZERS[name](wide(4, 8))
    alone.update_quantizer(None)
    known, *others = (
        tensor.__tensor_flatten__()[1]
        for tensor in (one, other, other.to_dtype(torch.bfloat16), alone)
    )
    assert [type(one).__metadata_guard__(known, each) for each in others] == [True, False, False]


# -- construction --


def test_a_storage_and_a_tensor_are_built_from_their_declaration() -> None:
    given = parts(3, 4)
    storage = RowStorage(**given, dtype=torch.bfloat16)
    assert storage._codes is given["codes"]
    assert (storage.size(), storage.numel(), storage.nbytes) == ((3, 4), 12, 24)
    assert storage.dequantize().dtype == torch.bfloat16
    tensor = RowTensor(**parts(3, 4), dtype=torch.bfloat16, requires_grad=True)
    assert (tensor.shape, tensor.dtype, tensor.requires_grad) == ((3, 4), torch.bfloat16, True)
    assert RowTensor(**parts(3, 4), dtype=torch.float32, shape=(12,)).shape == (12,)
    only_scales = {"scale_inv": torch.ones(3, 1), "dtype": torch.float32}
    assert RowTensor(**only_scales, shape=(3, 4)).shape == (3, 4)
    for values in (torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(2, 2).to(torch.float8_e5m2)):
        graded: Any = Graded(bytes=values, dtype=torch.float32)
        tensors, spec = graded.flatten_storage()
        for made in (graded, spec.rebuild(tensors)):
            assert (type(made), made._grade, made._bytes.dtype) == (Graded, 3, torch.uint8)


class Tagged(GridTensorStorage):
    """Data on a grid with a value that its quantizer need not say."""

    static_fields = (*GridTensorStorage.static_fields, StaticField("_tag", "tag", default=3))


class Labelled(GridTensorStorage):
    """Data on a grid with a value that its quantizer has to say."""

    static_fields = (*GridTensorStorage.static_fields, StaticField("_label", "label"))


def by(storage_class: Any) -> GridQuantizer:
    quantizer = GridQuantizer(Layout(E4M3, (1, 32)))
    quantizer.internal, quantizer.storage_class = True, storage_class  # type: ignore[misc]
    return quantizer


RIGHT = {**parts(2, 4), "dtype": torch.float32}
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "keyword of a tensor": (
        lambda: RowTensor(**RIGHT, data=None),
        OptionError,
        "RowTensor was given an unknown keyword 'data'",
    ),
    "keyword of a storage": (lambda: RowStorage(**RIGHT, data=None), OptionError, "keyword 'data'"),
    "codes": (lambda: OneScaleTensor(**RIGHT | {"codes": 3}), DTypeError, "'codes' is a int"),
    "scale": (
        lambda: RowStorage(**RIGHT | {"scale_inv": [1.0]}),
        DTypeError,
        "'scale_inv' is a list",
    ),
    "dtype": (lambda: RowTensor(**RIGHT | {"dtype": torch.int32}), DTypeError, "nominal dtype"),
    "no dtype": (lambda: RowStorage(**parts(2, 4)), OptionError, "was given no 'dtype'.*codes"),
    "no data": (lambda: RowTensor(dtype=torch.float32), UsageError, "RowTensor needs"),
    "no size": (lambda: RowStorage(dtype=torch.float32).size(), UsageError, "holds no data"),
    "no size of nothing": (lambda: QuantizedTensorStorage().size(), UsageError, "holds no data"),
    "no device": (lambda: QuantizedTensorStorage().device, UsageError, "holds no data"),
    "no values": (
        lambda: Graded(bytes=None, dtype=torch.float32).dequantize(),
        NotImplementedError,
        r"define dequantize\(\)",
    ),
    "floats": (
        lambda: Graded(bytes=torch.zeros(2, 2), dtype=torch.float32),
        DTypeError,
        r"bytes is of torch.float32.*float8_e5m2",
    ),
    "no label": (lambda: by(Labelled)(wide(8, 64)), OptionError, "Labelled was given no 'label'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_the_declaration_is_refused(case: str) -> None:
    call, error, match = REFUSED[case]
    with pytest.raises(error, match=match):
        call()


@pytest.mark.xdist_group("compiler")
def test_a_quantizer_leaves_fields_to_their_defaults() -> None:
    x, quantizer = wide(8, 64), by(Tagged)
    expected = by(GridTensorStorage)(x).dequantize()

    def run(x: torch.Tensor) -> Any:
        made = quantizer(x)
        return made.dequantize(), made._tag

    for function in (run, torch.compile(run, backend="eager", fullgraph=True)):
        values, tag = function(x)
        assert_same(values, expected)
        assert tag == 3


def test_a_storage_with_a_constructor_is_copied_saved_and_dropped_by_its_declaration() -> None:
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4)
    one = PairStorage(codes=codes, columns=codes + 1, scale=torch.tensor(0.5), bits=7)
    tensors, spec = one.flatten_storage()
    for made in (
        spec.build(tensors),
        one.clone_storage(),
        copy.deepcopy(one),
        by_pickle(one),
        by_file(one),
        PairStorage(**one.get_metadata()),
        restore_from_saved(*prepare_for_saving(one))[0],
    ):
        assert (type(made), made._bits, made.nbytes) == (PairStorage, 7, 12 + 12 + 4)
        assert_same(made.inner_list(), one.inner_list())
    with pytest.raises(UsageError, match="no quantizer"):
        one.quantize_(torch.zeros(3, 4))
    # What a backward pass keeps has no rows.
    kept, spec = copy.deepcopy(one).flatten_columnwise()
    assert spec.build(kept).get_usages() == {"rowwise": False, "columnwise": True}
    released, _ = one.prepare_for_saving()
    with pytest.raises(ShapeError, match="1 saved tensors for PairStorage"):
        one.restore_from_saved(released[:1])
    with pytest.raises(DTypeError, match="not a list of tensors"):
        one.restore_from_saved([1, 2, 3])
    extra = torch.ones(1)
    assert one.restore_from_saved([*released, extra]) == [extra]
    one.update_usage(columnwise_usage=False)
    assert one.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(UsageError, match="no columnwise data"):
        one.update_usage(columnwise_usage=True)
    with pytest.raises(OptionError, match="neither"):
        one.update_usage(rowwise_usage=False)


# -- rows --


@BOTH
def test_rows_keep_the_class_and_other_views_give_values(name: str) -> None:
    tensor = QUANTIZERS[name](torch.randn(7, 4))
    values = tensor.dequantize()
    for take in (
        lambda t: t[2:5],
        lambda t: t[3:3],
        lambda t: t[9:12],
        lambda t: t[2:][1:3],
        lambda t: t.narrow(0, 2, 4),
        lambda t: t.split([2, 5])[1],
        lambda t: t.chunk(3)[1],
    ):
        part = take(tensor)
        assert type(part) is type(tensor)
        assert_same(part.dequantize(), take(values))
        if part.numel():
            storages = [t._codes.untyped_storage().data_ptr() for t in (part, tensor)]
            assert storages[0] == storages[1]
    for take in (lambda t: t[::2], lambda t: t[:, :2], lambda t: t.split(2, 1)[0]):
        assert type(take(tensor)) is DequantizedView
        assert_same(take(tensor).clone(), take(values))
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        tensor.split([1, 2])
    check_places(QUANTIZERS[name](torch.randn(96, 64)), ROWS)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.copy_(torch.full((2, 8), 3.0)),
        lambda rows: rows.mul_(2),
        lambda rows: rows[:1].zero_(),
        lambda rows: rows.detach().copy_(torch.ones(2, 8)),
    ],
    ids=["copy_", "mul_", "a row of the rows", "an alias"],
)
def test_writes_to_rows(change: Any) -> None:
    """Rows with scales of their own are written in the whole; one scale is not changed for all."""
    tensor = AloneRows()(torch.randn(5, 8))
    expected = tensor.dequantize()
    change(tensor[1:3])
    change(expected[1:3])
    assert_same(tensor.dequantize()[[0, 3, 4]], expected[[0, 3, 4]])
    assert_same(tensor.dequantize()[1:3], AloneRows()(expected[1:3]).dequantize())
    tensor = SilentOneScale()(torch.randn(5, 8))
    before = tensor.dequantize()
    with pytest.raises(UsageError, match=r"rest of the tensor.*tensor\[index\] = values"):
        change(tensor[1:3])
    assert_same(tensor.dequantize(), before)
    tensor[1:3] = before[1:3] = torch.full((2, 8), 3.0)
    assert_same(tensor.dequantize(), SilentOneScale()(before).dequantize())


def test_rows_of_equal_scales_take_over_the_bytes() -> None:
    x = torch.randn(4, 8)
    tensor, other = SilentOneScale()(x), SilentOneScale()(x)
    other._codes.random_(0, 100)
    tensor[1:3].copy_(other[0:2])
    assert_same(tensor._codes[1:3], other._codes[0:2])
    assert_same(tensor._codes[0], SilentOneScale()(x)._codes[0])
    tensor = AloneRows()(x)
    tensor[1:3].quantize_(torch.full((2, 8), 9.0), noop_flag=torch.ones(1))
    assert_same(tensor.dequantize(), AloneRows()(x).dequantize())
    tensor[2] = AloneRows()(torch.ones(8))
    assert_same(tensor.dequantize()[2], torch.ones(8))


@BOTH
def test_padding_takes_rows_as_they_are(name: str) -> None:
    """Also rows whose own largest value would give another scale; beside zeros any scale is
    right."""
    quantizer = QUANTIZERS[name]
    tensor = quantizer(torch.tensor([[1.0, 0.3]] * 3 + [[100.0, 7.0]]))
    for source in (tensor, tensor[:3]):
        padded = tensor.new_zeros((6, 2))
        assert type(padded) is type(tensor)
        assert not padded.dequantize().any()
        rows = padded[: len(source)]
        rows.copy_(source)
        assert_same(rows._codes, source._codes)
        assert_same(padded.dequantize()[: len(source)], source.dequantize())
    padded[:3].copy_(torch.full((3, 2), 50.0))
    assert_same(padded.dequantize()[:3], quantizer(torch.full((3, 2), 50.0)).dequantize())
    on_meta = tensor.to("meta")
    on_meta.new_zeros((6, 2))[:4].copy_(on_meta)
    for made in (torch.empty_like(on_meta, device="cpu"), on_meta.new_zeros(6, 2, device="cpu")):
        assert type(made) is type(tensor)
        made.copy_(torch.full(made.shape, 3.0))
        assert_same(made.dequantize(), quantizer(torch.full(made.shape, 3.0)).dequantize())
    tensor.update_quantizer(None)
    for plain in (tensor.new_zeros((6, 2)), torch.zeros_like(tensor)):
        assert type(plain) is torch.Tensor


def test_blocks_of_rows_are_not_cut() -> None:
    tensor = BlockTensor(
        codes=torch.arange(20, dtype=torch.uint8).view(5, 4),
        scales=torch.tensor([[1.0], [2.0], [3.0]]),
        dtype=torch.float32,
    )
    values = tensor.dequantize()
    for start, stop in itertools.combinations(range(6), 2):
        with told(start, stop):
            part, is_whole = tensor[start:stop], start % 2 == 0 and (stop % 2 == 0 or stop == 5)
            assert (type(part) is BlockTensor) is is_whole
            found = part.dequantize() if is_whole else part.clone()
            assert_same(found, values[start:stop])


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
    # A write through an alias that no longer counts with this one says nothing of it.
    one.share_writes(Graded(bytes=None, dtype=torch.float32))
    assert one.gemm_cache() is not cache
