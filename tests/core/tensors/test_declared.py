"""Classes of third parties that declare their inner tensors: everything else is derived."""

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


def pair() -> PairStorage:
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4)
    return PairStorage(codes=codes, columns=codes + 1, scale=torch.tensor(0.5), bits=7)


def parts(*shape: int) -> dict[str, Any]:
    return {"codes": torch.zeros(shape, dtype=torch.uint8), "scale_inv": torch.ones(*shape[:-1], 1)}


# -- compiled code --


@BOTH
def test_guards_serve_tensors_that_differ_in_values_alone(name: str) -> None:
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


def test_a_storage_is_built_from_its_declaration() -> None:
    given = parts(3, 4)
    storage = RowStorage(**given, dtype=torch.bfloat16)
    assert storage._codes is given["codes"]
    assert (storage.size(), storage.shape, storage.size(-1)) == ((3, 4), (3, 4), 4)
    assert (storage.numel(), storage.nbytes, storage.dtype) == (12, 24, torch.bfloat16)
    assert storage._quantizer is None
    assert storage.dequantize().dtype == torch.bfloat16
    for empty in (RowStorage(dtype=torch.float32), QuantizedTensorStorage()):
        for ask in (empty.size, lambda e=empty: e.device):
            with pytest.raises(UsageError, match="holds no data"):
                ask()
    with pytest.raises(NotImplementedError, match=r"define dequantize\(\)"):
        Graded(bytes=None, dtype=torch.float32).dequantize()


def test_a_tensor_is_built_from_its_declaration() -> None:
    tensor = RowTensor(**parts(3, 4), dtype=torch.bfloat16, requires_grad=True)
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.shape, tensor.dtype) == ((3, 4), torch.bfloat16)
    assert tensor.requires_grad
    assert tensor.is_contiguous()
    assert [field.argument for field in RowTensor.all_static_fields()] == ["shape", "dtype"]
    assert RowTensor(**parts(3, 4), dtype=torch.float32, shape=(12,)).shape == (12,)
    only_scales = {"scale_inv": torch.ones(3, 1), "dtype": torch.float32}
    assert RowTensor(**only_scales, shape=(3, 4)).shape == (3, 4)
    for given in ({"dtype": torch.float32}, only_scales):
        with pytest.raises(UsageError, match="RowTensor needs"):
            RowTensor(**given)


@pytest.mark.parametrize("cls", [RowStorage, RowTensor, OneScaleTensor])
def test_wrong_keywords_and_values_are_refused(cls: Any) -> None:
    right = {**parts(2, 4), "dtype": torch.float32}
    assert cls(**right).shape == (2, 4)
    for error, match, wrong in (
        (OptionError, f"{cls.__name__} was given an unknown keyword 'data'", {"data": None}),
        (DTypeError, "'codes' is a int", {"codes": 3}),
        (DTypeError, "'scale_inv' is a list", {"scale_inv": [1.0]}),
    ):
        with pytest.raises(error, match=match):
            cls(**right | wrong)
    for wrong in (None, torch.int32, "float"):
        if cls is not RowStorage:
            with pytest.raises(DTypeError, match="nominal dtype"):
                cls(**right | {"dtype": wrong})
    if cls is RowStorage:
        with pytest.raises(OptionError, match=r"was given no 'dtype'.*codes"):
            RowStorage(**parts(2, 4))


def test_fields_have_defaults_or_are_required() -> None:
    class Tagged(QuantizedTensor):
        inner_tensors = (InnerTensor("_codes", "codes"),)
        static_fields = (StaticField("_tag", "tag"),)

    with pytest.raises(OptionError, match=r"Tagged was given no 'tag'.*codes, tag"):
        Tagged(codes=torch.zeros(2), dtype=torch.float32)
    assert Tagged(codes=torch.zeros(2), dtype=torch.float32, tag=3)._tag == 3
    for given in (torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.float8_e5m2)):
        made: Any = Graded(bytes=given, dtype=torch.float32)
        tensors, spec = made.flatten_storage()
        again: Any = spec.rebuild(tensors)
        for storage in (made, again):
            assert (type(storage), storage._grade, storage._bytes.dtype) == (Graded, 3, torch.uint8)
    assert Graded(bytes=None, dtype=torch.float32, grade=4)._grade == 4
    with pytest.raises(DTypeError, match=r"bytes is of torch.float32.*float8_e5m2"):
        Graded(bytes=torch.zeros(2, 2), dtype=torch.float32)


class Tagged(GridTensorStorage):
    """Data on a grid with a value that its quantizer need not say."""

    static_fields = (*GridTensorStorage.static_fields, StaticField("_tag", "tag", default=3))


class Labelled(GridTensorStorage):
    """Data on a grid with a value that its quantizer has to say."""

    static_fields = (*GridTensorStorage.static_fields, StaticField("_label", "label"))


@pytest.mark.xdist_group("compiler")
def test_a_quantizer_leaves_fields_to_their_defaults() -> None:
    quantizer = GridQuantizer(Layout(E4M3, (1, 32)))
    quantizer.internal, x = True, wide(8, 64)
    expected = quantizer(x).dequantize()
    quantizer.storage_class = Tagged  # type: ignore[misc]

    def run(x: torch.Tensor) -> Any:
        made = quantizer(x)
        return made.dequantize(), made._tag

    for function in (run, torch.compile(run, backend="eager", fullgraph=True)):
        values, tag = function(x)
        assert_same(values, expected)
        assert tag == 3
    quantizer.storage_class = Labelled  # type: ignore[misc]
    with pytest.raises(OptionError, match=r"Labelled was given no 'label'"):
        quantizer(x)


# -- what is derived --


def test_a_storage_is_copied_saved_and_dropped_by_its_declaration() -> None:
    one, two = pair(), pair()
    tensors, spec = one.flatten_storage()
    assert hash(spec) == hash(two.flatten_storage()[1])
    for made in (
        spec.build(tensors),
        one.clone_storage(),
        copy.deepcopy(one),
        by_pickle(one),
        by_file(one),
        PairStorage(**one.get_metadata()),
        restore_from_saved(*prepare_for_saving(one))[0],
    ):
        assert type(made) is PairStorage
        assert made._bits == 7
        assert_same(made.inner_list(), one.inner_list())
    assert one.nbytes == 12 + 12 + 4
    clone = one.clone_storage()
    one._codes.add_(1)
    assert_same(clone._codes, one._codes - 1)
    with pytest.raises(UsageError, match="no quantizer"):
        one.quantize_(torch.zeros(3, 4))
    two.update_usage(columnwise_usage=False)
    assert two.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(UsageError, match="no columnwise data"):
        two.update_usage(columnwise_usage=True)
    with pytest.raises(OptionError, match="neither"):
        two.update_usage(rowwise_usage=False)
    # What a backward pass keeps has no rows.
    kept, spec = pair().flatten_columnwise()
    assert kept[0] is None
    assert spec.build(kept).get_usages() == {"rowwise": False, "columnwise": True}
    before = one.inner_list()
    released, same = one.prepare_for_saving()
    assert same is one
    assert one.inner_list() == [None] * 3
    extra = torch.ones(1)
    assert one.restore_from_saved([*released, extra]) == [extra]
    assert_same(one.inner_list(), before)
    with pytest.raises(ShapeError, match="1 saved tensors for PairStorage"):
        one.restore_from_saved(released[:1])
    with pytest.raises(DTypeError, match="not a list of tensors"):
        one.restore_from_saved([1, 2, 3])
    one.clear()
    assert "no readable data" in repr(one)


@BOTH
def test_a_tensor_has_what_every_quantized_tensor_has(name: str) -> None:
    quantizer, x = QUANTIZERS[name], torch.randn(6, 8, requires_grad=True)
    tensor = quantizer(x)
    tensor.dequantize().square().sum().backward()
    assert_same(x.grad, 2 * tensor.dequantize().detach())
    tensor = tensor.detach()
    exact = (tensor._codes.view(E4M3).float() * tensor._scale_inv).double()
    assert_same(tensor.dequantize(torch.float64), exact)
    bare = copy.copy(quantizer)
    bare.internal = True
    if name == "rows":
        assert type(bare(x.detach())) is RowStorage
        assert_same(bare(x.detach()).dequantize(), tensor.dequantize())
    for other in (
        by_file(tensor),
        copy.deepcopy(tensor),
        tensor.clone(),
        restore_from_saved(*prepare_for_saving(tensor))[0],
        tensor.to("cpu", copy=True),
        torch.empty_like(tensor).copy_(tensor),
    ):
        assert type(other) is type(tensor)
        assert_same(other.inner_list(), tensor.inner_list())
        doubled = other.clone().mul_(2)
        assert_same(doubled.dequantize(), 2 * tensor.dequantize())
    for new in (torch.randn(2, 3), quantizer(torch.randn(7, 3)), quantizer(torch.randn(7, 3))[2:]):
        changed = quantizer(torch.randn(5, 8))
        changed.data = new
        expected = new if isinstance(new, QuantizedTensor) else quantizer(new)
        assert (changed.shape, changed.storage_offset()) == (new.shape, expected.storage_offset())
        assert_same(changed.dequantize(), expected.dequantize())
    for shape in ((), (0,), (3,), (2, 0), (2, 3, 4)):
        made = quantizer.make_empty(shape, dtype=torch.float16, requires_grad=True)
        assert (made.shape, made.dtype, made.requires_grad) == (shape, torch.float16, True)
        quantizer.update_quantized(torch.ones(shape), made)
        expected = quantizer(torch.ones(shape)).dequantize()
        assert_same(made.dequantize(torch.float32), expected)


# -- rows --


@BOTH
def test_rows_keep_the_class_and_other_views_give_values(name: str) -> None:
    tensor = QUANTIZERS[name](torch.randn(7, 4))
    values = tensor.dequantize()
    for take in (
        lambda t: t[2:5],
        lambda t: t[3:3],
        lambda t: t[:],
        lambda t: t[-2:],
        lambda t: t[9:12],
        lambda t: t[2:][1:3],
        lambda t: t.narrow(0, 2, 4),
        lambda t: t.split(3)[2],
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
    before = tensor.dequantize()
    tensor[1:3].quantize_(torch.full((2, 8), 9.0), noop_flag=torch.ones(1))
    assert_same(tensor.dequantize(), before)
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
    for shape in ((6, 9), (3,), ()):
        assert type(tensor.new_empty(shape)) is type(tensor)
        assert_same(tensor.new_zeros(shape).dequantize(), torch.zeros(shape))
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
