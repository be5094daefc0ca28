"""Float8Tensor: its ops, its copies, and the validity of its transpose."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from ottava import Float8Tensor, Quantizer
from ottava.distributed.hooks import GatherInput, GatherMetadata, post_all_gather
from ottava.errors import DeviceError, DTypeError, ShapeError, UsageError
from ottava.tensors import columnwise_is_transpose, columnwise_layout


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def q(x: torch.Tensor, quantizer: Quantizer) -> Float8Tensor:
    made = quantizer(x)
    assert isinstance(made, Float8Tensor)
    return made


OPS = {
    "view": lambda t: t.view(2, 12),
    "reshape": lambda t: t.reshape(24),
    "slice": lambda t: t[1:3],
    "slice_columns": lambda t: t[:, 2:5],
    "select": lambda t: t[1],
    "select_0d": lambda t: t[1][2],
    "as_strided": lambda t: t.as_strided((2, 3), (6, 2), 1),
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "t": lambda t: t.t(),
    "transpose": lambda t: t.transpose(0, 1),
    "to_bfloat16": lambda t: t.to(torch.bfloat16),
    "contiguous_of_t": lambda t: t.t().contiguous(),
    "cpu": lambda t: t.cpu(),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_keep_the_subclass_and_the_values(q: Float8Tensor, name: str) -> None:
    got = OPS[name](q)
    expected = OPS[name](q.dequantize())
    assert isinstance(got, Float8Tensor)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert torch.equal(got.dequantize(), expected)


def test_split_chunk_and_new_tensors_keep_the_subclass(q: Float8Tensor) -> None:
    for parts, expected in (
        (q.split(3), q.dequantize().split(3)),
        (q.split([1, 3]), q.dequantize().split([1, 3])),
        (q.chunk(2, dim=1), q.dequantize().chunk(2, dim=1)),
    ):
        assert len(parts) == len(expected)
        for part, want in zip(parts, expected, strict=True):
            assert isinstance(part, Float8Tensor)
            assert torch.equal(part.dequantize(), want)
    zeros = q.new_zeros(3, 2)
    assert isinstance(zeros, Float8Tensor)
    assert torch.equal(zeros.dequantize(), torch.zeros(3, 2))
    assert isinstance(torch.empty_like(q), Float8Tensor)
    assert isinstance(q.new_empty((2,)), Float8Tensor)
    assert not isinstance(q.new_zeros(2, dtype=torch.int32), Float8Tensor)


def test_other_ops_see_dequantized_values(q: Float8Tensor) -> None:
    values = q.dequantize()
    assert torch.equal(q + 1, values + 1)
    torch.testing.assert_close(q @ q.t(), values @ values.t())
    assert torch.equal(torch.cat([q, q]), torch.cat([values, values]))
    for method, dtype in (
        ("float", torch.float32),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
    ):
        plain = getattr(q, method)()
        assert plain.dtype == dtype
        assert not isinstance(plain, Float8Tensor)
        assert torch.equal(plain, values.to(dtype))


def test_in_place_ops_are_written_back(q: Float8Tensor, quantizer: Quantizer) -> None:
    values = q.dequantize()
    same = q.mul_(3).add_(1)
    assert same is q
    step = quantizer(values * 3).dequantize() + 1
    assert torch.equal(q.dequantize(), quantizer(step).dequantize())
    torch._foreach_mul_([q], 0.0)
    assert torch.equal(q.dequantize(), torch.zeros(4, 6))
    torch.add(torch.ones(4, 6), torch.ones(4, 6), out=q)
    assert torch.equal(q.dequantize(), torch.full((4, 6), 2.0))


def test_writing_a_slice_keeps_the_rest(q: Float8Tensor) -> None:
    before = q.dequantize()
    q[1:2].copy_(torch.full((1, 6), before.abs().max().item()))
    assert torch.equal(q.dequantize()[1], torch.full((6,), before.abs().max().item()))
    rest = [0, 2, 3]
    torch.testing.assert_close(q.dequantize()[rest], before[rest], rtol=0.07, atol=1e-2)


def test_clone_shares_nothing(q: Float8Tensor) -> None:
    for clone in (q.clone(), copy.deepcopy(q)):
        before = clone.dequantize()
        q.copy_(torch.randn(4, 6))
        assert torch.equal(clone.dequantize(), before)
        assert clone._scale_inv.data_ptr() != q._scale_inv.data_ptr()
        assert clone._quantizer is not q._quantizer


def test_copy_between_tensors(q: Float8Tensor, quantizer: Quantizer) -> None:
    other = quantizer(torch.randn(4, 6) * 9)
    q.copy_(other)
    assert torch.equal(q._data, other._data)
    assert torch.equal(q._scale_inv, other._scale_inv)
    plain = torch.empty(4, 6)
    plain.copy_(other)
    assert torch.equal(plain, other.dequantize())


def test_gradients_pass_straight_through(x: torch.Tensor, quantizer: Quantizer) -> None:
    leaf = x.clone().requires_grad_()
    weights = torch.randn(4, 6)
    (quantizer(leaf).dequantize() * weights).sum().backward()
    assert torch.equal(leaf.grad, weights)
    leaf.grad = None
    (quantizer(leaf) * weights).sum().backward()
    assert torch.equal(leaf.grad, weights)


def test_data_adopts_or_quantizes(q: Float8Tensor, quantizer: Quantizer) -> None:
    other = quantizer(torch.randn(4, 6))
    q.data = other
    assert q._data is other._data
    new = torch.randn(4, 6)
    target = quantizer(torch.randn(4, 6))
    target.data = new
    assert torch.equal(target.dequantize(), quantizer(new).dequantize())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_data_of_another_shape_is_adopted(quantizer: Quantizer, requires_grad: bool) -> None:
    """As that of a plain tensor is, with what was noted of it: hooks and attributes."""
    x = torch.randn(9, 6)
    for new in (
        torch.randn(2, 3, 5),
        torch.randn(()),
        quantizer(x),
        quantizer(x)[4:8],
        quantizer(x).t(),
    ):
        target = torch.nn.Parameter(quantizer(torch.randn(4, 6)), requires_grad=requires_grad)
        seen: list[torch.Size] = []
        if requires_grad:
            target.sum().backward()
            target.register_hook(lambda grad, seen=seen: seen.append(grad.shape))
            target.grad = None
        target.data = new
        expected = new if isinstance(new, Float8Tensor) else quantizer(new)
        assert (target.shape, target.stride()) == (expected.shape, expected.stride())
        assert target.storage_offset() == expected.storage_offset()
        assert torch.equal(target.detach().dequantize(), expected.dequantize())
        assert target.requires_grad is requires_grad
        if requires_grad:
            target.sum().backward()
            assert torch.equal(target.grad, torch.ones_like(target.grad))
            assert seen == [expected.shape] == [target.grad.shape]


def test_pickles_load_with_weights_only(q: Float8Tensor) -> None:
    q.requires_grad_()
    buffer = io.BytesIO()
    torch.save({"w": q}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["w"]
    assert isinstance(loaded, Float8Tensor)
    assert loaded.requires_grad
    assert torch.equal(loaded.dequantize(), q.dequantize())
    assert torch.equal(loaded._data, q._data)
    assert loaded._quantizer == q._quantizer


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5,), (2, 3, 4)])
def test_shapes_and_repr(shape: tuple[int, ...], quantizer: Quantizer) -> None:
    q = quantizer(torch.ones(shape))
    assert q.shape == shape
    assert "Float8Tensor" in repr(q)
    assert torch.equal(q.dequantize(), torch.ones(shape))
    empty = quantizer.make_empty(shape, dtype=torch.bfloat16, requires_grad=True)
    assert empty.shape == shape
    assert empty.dtype == torch.bfloat16
    assert empty.requires_grad
    assert "Float8Tensor" in repr(empty)
    q.clear()
    assert "no readable data" in repr(q)


def test_noop_flag_and_quantize_into(q: Float8Tensor, quantizer: Quantizer) -> None:
    before = q.dequantize()
    q.quantize_(torch.zeros(4, 6), noop_flag=torch.ones(1))
    assert torch.equal(q.dequantize(), before)
    q.quantize_(torch.zeros(4, 6), noop_flag=torch.zeros(1))
    assert torch.equal(q.dequantize(), torch.zeros(4, 6))
    new = torch.randn(4, 6)
    assert quantizer.quantize(new, out=q) is q
    assert torch.equal(q.dequantize(), quantizer(new).dequantize())


def test_bad_updates_change_nothing(q: Float8Tensor) -> None:
    before = q._data.clone()
    with pytest.raises(ShapeError):
        q.quantize_(torch.zeros(3))
    with pytest.raises(DTypeError):
        q.quantize_(torch.zeros(4, 6, dtype=torch.int64))
    with pytest.raises(DeviceError):
        q.quantize_(torch.zeros(4, 6, device="meta"))
    with pytest.raises(DTypeError):
        q.quantize_(torch.zeros(4, 6), noop_flag=torch.ones(1, dtype=torch.int32))
    assert torch.equal(q._data, before)


def test_constructor_checks() -> None:
    data = torch.zeros(2, 2, dtype=torch.uint8)
    one = torch.ones(())
    viewed = Float8Tensor(
        dtype=torch.bfloat16,
        data=data.view(torch.float8_e4m3fn),
        fp8_dtype=torch.float8_e4m3fn,
        fp8_scale_inv=one,
    )
    assert viewed._data.dtype == torch.uint8
    with pytest.raises(DTypeError):
        Float8Tensor(
            dtype=torch.float32,
            data=torch.zeros(2),
            fp8_dtype=torch.float8_e4m3fn,
            fp8_scale_inv=one,
        )
    with pytest.raises(DTypeError):
        Float8Tensor(dtype=torch.float32, data=data, fp8_dtype=torch.int8, fp8_scale_inv=one)
    with pytest.raises(ShapeError):
        Float8Tensor(
            shape=(3,),
            dtype=torch.float32,
            data=data,
            fp8_dtype=torch.float8_e5m2,
            fp8_scale_inv=one,
        )
    with pytest.raises(UsageError):
        Float8Tensor(dtype=torch.float32, data=None, fp8_dtype=torch.float8_e5m2, fp8_scale_inv=one)


class TestTransposeValidity:
    """A transpose that is stale is never read."""

    @pytest.fixture
    def held(self, quantizer: Quantizer, x: torch.Tensor):  # type: ignore[no-untyped-def]
        with columnwise_layout("transpose"):
            yield quantizer(x)

    def test_quantize_refreshes_it(self, held: Float8Tensor) -> None:
        held.quantize_(torch.randn(4, 6))
        assert held._transpose is not None
        assert torch.equal(held._transpose, held._data.t())

    def test_a_write_through_an_alias_is_noticed(self, held: Float8Tensor) -> None:
        alias = held.detach()
        for write in (
            lambda: alias.mul_(2),
            lambda: held.__setitem__(0, 0.0),
            lambda: held.view(24).add_(1),
            lambda: held._data.fill_(56),
        ):
            write()
            for tensor in (held, alias):
                assert tensor._transpose is None or torch.equal(tensor._transpose, tensor._data.t())
            held.update_usage(columnwise_usage=True)
            assert torch.equal(held._transpose, held._data.t())

    @pytest.mark.parametrize(
        "strides", [((6, 4), (1, 6)), ((6, 4), (4, 1)), ((24,), (1,)), ((4, 6), (6, 1))], ids=str
    )
    def test_it_is_not_taken_for_elements_in_another_order(
        self, held: Float8Tensor, strides: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        view = held.as_strided(*strides)
        assert torch.equal(view._data, held._data.as_strided(*strides))
        assert view._transpose is None or torch.equal(view._transpose, view._data.movedim(-1, 0))

    @pytest.mark.parametrize("rows", [2, 3])
    def test_a_part_is_copied_into_zeros_as_it_is(self, held: Float8Tensor, rows: int) -> None:
        """As where a shard is padded, perhaps by nothing: the part has no transpose, and its own
        amax is another."""
        padded = held.new_zeros((rows, 6))
        padded[:2].copy_(held[:2])
        assert torch.equal(padded._data[:2], held._data[:2])
        assert torch.equal(padded._scale_inv, held._scale_inv)

    def test_it_survives_clone_to_view_and_pickling(self, held: Float8Tensor) -> None:
        buffer = io.BytesIO()
        torch.save(held, buffer)
        buffer.seek(0)
        copies = [
            held.clone(),
            held.to(torch.bfloat16),
            held.detach(),
            torch.load(buffer, weights_only=True),
        ]
        for tensor in copies:
            assert tensor._transpose is not None
            assert torch.equal(tensor._transpose, held._data.t())
        assert torch.equal(held.view(2, 2, 6)._transpose, held._data.view(2, 2, 6).movedim(-1, 0))

    def test_a_stale_one_does_not_come_back_by_copying(self, held: Float8Tensor) -> None:
        held._data.fill_(56)
        buffer = io.BytesIO()
        torch.save(held, buffer)
        buffer.seek(0)
        for tensor in (held.clone(), held.detach(), torch.load(buffer, weights_only=True)):
            assert tensor._transpose is None


def test_names_of_torch_tensor_are_not_shadowed(q: Float8Tensor) -> None:
    assert torch.equal(q.flatten().dequantize(), q.dequantize().flatten())
    assert torch.equal(
        q.select(0, 1).inner(q.select(0, 2)), q.dequantize()[1].inner(q.dequantize()[2])
    )
    assert q.numel() == 24
    assert q.dim() == 2


def test_layouts_nest() -> None:
    cpu = torch.device("cpu")
    with columnwise_layout("transpose"):
        with columnwise_layout("shared"):
            assert not columnwise_is_transpose(cpu)
        assert columnwise_is_transpose(cpu)
    assert not columnwise_is_transpose(cpu)


def test_a_forced_layout_is_that_of_the_storages_of_its_block_alone(quantizer: Quantizer) -> None:
    """Whatever was made before it: bare storages take what they have in common from an earlier
    one."""
    rows = quantizer.with_usage(True, False)
    rows.internal = True

    def serves_columns() -> bool:
        return bool(rows.make_empty((4, 6)).get_usages()["columnwise"])

    with columnwise_layout("shared"):
        assert serves_columns()
        with columnwise_layout("transpose"):
            assert not serves_columns()
        assert serves_columns()


def test_the_scale_has_one_dimension_and_shares_its_memory(quantizer: object) -> None:
    whole = quantizer(torch.randn(4, 6))
    before = whole.dequantize()
    assert whole._scale_inv.shape == (1,)
    whole._scale_inv.mul_(2)
    assert torch.equal(whole.dequantize(), 2 * before)
    whole._scale_inv = whole._scale_inv / 2
    assert whole._scale_inv.shape == (1,)
    assert torch.equal(whole.dequantize(), before)
    assert whole.detach()._scale_inv.data_ptr() == whole._scale_inv.data_ptr()


def test_bytes_that_are_gathered_again_outdate_the_transpose(
    x: torch.Tensor, quantizer: Quantizer
) -> None:
    """The memory of a gather is filled again below torch: the tensor around it is told."""
    with columnwise_layout("transpose"):
        one, two = quantizer(x), quantizer(-2 * x)
        memory = one._data.clone()
        inputs = (GatherInput(one.inner_tensors[0], memory.shape, False),)
        spec = one.flatten_storage()[1]
        metadata = GatherMetadata(
            inputs, {"data_transpose": None, "fp8_scale_inv": one._scale_inv[0]}, spec, x.shape
        )
        whole, _ = post_all_gather(metadata, [memory], torch.float32, None)
        whole.update_usage(columnwise_usage=True)
        assert torch.equal(whole._transpose, one._data.t())
        memory.numpy()[:] = two._data.numpy()
        metadata.local_inner["fp8_scale_inv"] = two._scale_inv[0]
        assert post_all_gather(metadata, [memory], torch.float32, whole) is None
        assert whole._transpose is None
        whole.update_usage(columnwise_usage=True)
        assert torch.equal(whole._transpose, two._data.t())
        assert torch.equal(whole.dequantize(), two.dequantize())
