"""Float8Quantizer: known scale, recorded amax, counted saturation."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ottava
from ottava.distributed import quantize_master_weights
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError
from ottava.tensors import columnwise_layout
from ottava_delayed import DelayedScaling, DelayedScalingState, Float8Quantizer
from tests import arrays, oracle
from tests.comparing import assert_same
from tests.samples import DTYPES, special, wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: 448.0, E5M2: 57344.0}


def make(fp8_dtype: torch.dtype = E4M3, scale: float = 1.0, **options: Any) -> Float8Quantizer:
    return Float8Quantizer(torch.tensor([scale]), torch.zeros(1), fp8_dtype, **options)


def counter() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("fp8_dtype", FORMATS, ids=["E4M3", "E5M2"])
def test_bytes_amax_and_counter(fp8_dtype: torch.dtype) -> None:
    for dtype in DTYPES:
        matrices = [(str(shape), wide(*shape, dtype=dtype)) for shape in ((), (0,), (3, 4, 33))]
        for name, x in [*matrices, *special(dtype)]:
            for scale in (1.0, oracle.float32(0.3), 2.0**9):
                quantizer = make(fp8_dtype, scale, saturated=counter())
                tensor = quantizer(x)
                note = f"{name}, {dtype}, {scale}"
                with np.errstate(all="ignore"):
                    scaled = arrays.numbers(x) * np.float32(scale)
                codes = arrays.encode(scaled, fp8_dtype).reshape(x.shape)
                assert_same(tensor._data, codes, x, note)
                assert tensor._scale_inv.item() == oracle.float32(1 / scale), note
                magnitudes = x.float().abs().nan_to_num(0.0, posinf=math.inf).flatten()
                amax = magnitudes.max().item() if x.numel() else 0.0
                assert quantizer.amax.item() == amax, note
                clamped = int((np.abs(scaled) > FORMATS[fp8_dtype]).sum())
                assert quantizer.saturated.item() == clamped, note


def test_an_amax_rises_and_calibration_sets_it() -> None:
    quantizer = make()
    for value, expected in ((2.0, 2.0), (-5.0, 5.0), (1.0, 5.0), (math.nan, 5.0)):
        quantizer(torch.tensor([value, 0.5]))
        assert quantizer.amax.item() == expected
    quantizer.calibrate(torch.tensor([0.25]))
    assert quantizer.amax.item() == 0.25


def test_copies_share_the_state_which_is_read_when_it_is_used() -> None:
    quantizer = make()
    copied = quantizer.copy()
    quantizer.scale.fill_(4.0)
    for one in (quantizer, copied):
        assert one(torch.tensor([1.0]))._scale_inv.item() == 0.25
    copied(torch.tensor([3.0]))
    assert quantizer.amax.item() == 3.0
    assert quantizer == quantizer
    assert quantizer != make()


@pytest.mark.parametrize("layout", ["shared", "transpose"])
def test_usages_without_an_amax(layout: Any) -> None:
    """Each has the bytes of both."""
    x = torch.randn(6, 10)
    for rowwise, columnwise in ((True, False), (False, True)):
        with columnwise_layout(layout):
            whole = make(scale=50.0)(x)
            quantizer = make(scale=50.0, rowwise=rowwise, columnwise=columnwise)
            quantizer.amax = None
            tensor = quantizer(x)
        usages = {"rowwise": rowwise, "columnwise": columnwise}
        shared = dict.fromkeys(usages, True)
        assert tensor.get_usages() == (shared if layout == "shared" else usages)
        assert_same(tensor.dequantize(), whole.dequantize())


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_noop_flag_leaves_the_state_too(flag: float) -> None:
    quantizer = make(scale=100.0, saturated=counter())
    tensor = quantizer(torch.full((4,), 2.0))
    quantizer.update_quantized(torch.full((4,), 9.0), tensor, noop_flag=torch.tensor([flag]))
    values = torch.full((4,), 4.48 if flag == 0 else 2.0)
    torch.testing.assert_close(tensor.dequantize(), values, rtol=0.05, atol=0)
    assert quantizer.amax.item() == (2.0 if flag else 9.0)
    assert quantizer.saturated.item() == (0 if flag else 4)


def test_shards_are_rounded_before_they_are_counted() -> None:
    """448.9 is 448 in bfloat16, which fits; 449.5 is 450, which does not."""
    quantizers = [make(saturated=counter()) for _ in range(2)]
    weight, fitting = (q(torch.zeros(2, 2, dtype=torch.bfloat16)) for q in quantizers)
    quantizers[1].initialize(torch.tensor([448.0]))
    masters = [torch.tensor([[448.9, -449.5], [-448.2, 1.0]]), torch.full((2, 2), 896.0)]
    quantize_master_weights([weight, fitting], masters, None)
    assert [quantizer.saturated.item() for quantizer in quantizers] == [1, 0]
    assert weight._quantizer.amax.item() == 450.0
    assert weight.dequantize().tolist() == [[448.0, -448.0], [-448.0, 1.0]]
    assert fitting.dequantize().tolist() == masters[1].tolist()


# -- weights that a layer keeps quantized --


def test_a_weight_starts_with_its_own_scale_and_what_is_written_to_it_fits() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    with ottava.quantized_model_init(recipe):
        layer: Any = ottava.nn.Linear(16, 8, recipe=recipe)
    initial = layer.weight.get_high_precision_init_val()
    scale, _ = oracle.scale_from_amax(initial.abs().max().item(), 448.0)
    assert layer.weight._scale_inv.item() == oracle.float32(1 / scale)
    layer(torch.randn(4, 16)).sum().backward()
    assert layer.recipe_state.scale[1].item() == scale
    # Its file has neither the state of the layer nor another rule.
    assert pickle.loads(pickle.dumps(layer.weight))._quantizer.state is None
    rules = [q.contract.rowwise.scale.rule for q in (layer.weight._quantizer, make())]
    assert rules == ["given-fitting", "given"]
    large = 50 * torch.randn(8, 16)
    values = {"weight": large, "bias": torch.zeros(8)}
    with torch.no_grad():
        layer.weight.copy_(large)
        tolerance = large.abs().max().item() / 16
        torch.testing.assert_close(layer.weight.dequantize(), large, rtol=0, atol=tolerance)
        layer.weight.copy_(0.001 * initial)
        # A scale that is large enough stays what it is.
        assert layer.weight._scale_inv.item() == oracle.float32(1 / scale)
    layer.load_state_dict(values, strict=False)
    torch.testing.assert_close(layer.weight.dequantize(), large, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shards", [False, True])
def test_a_weight_that_was_made_on_meta_takes_the_scale_of_its_first_values(shards: bool) -> None:
    with torch.device("meta"), ottava.quantized_model_init("delayed"):
        layer: Any = ottava.nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
    layer = ottava.convert(layer, "delayed").to_empty(device="cpu")
    assert layer.recipe_state.scale.tolist() == [1.0] * 3
    assert not layer.recipe_state.amax_history.any()
    values = torch.randn(8, 16).mul(0.01).bfloat16()
    if shards:
        quantize_master_weights([layer.weight], [values.float()], None)
    else:
        with torch.no_grad():
            layer.weight.copy_(values)
    scale, scale_inv = oracle.scale_from_amax(values.float().abs().max().item(), 448.0)
    assert layer.weight._scale_inv.item() == scale_inv
    # Later ones do not.
    quantize_master_weights([layer.weight], [values.float() / 2], None)
    assert layer.weight._scale_inv.item() == scale_inv
    assert layer.recipe_state.scale[1].item() == scale


def test_a_weight_that_records_nothing_fits_as_well() -> None:
    quantizer = Float8Quantizer(1.0, None, E4M3)
    quantizer.initialize(torch.tensor([448.0]))
    assert quantizer(torch.tensor([896.0])).dequantize().tolist() == [896.0]


def kept(recipe: DelayedScaling) -> Any:
    with ottava.quantized_model_init(recipe):
        return ottava.nn.Linear(16, 8, recipe=recipe)


def test_a_copy_is_written_with_its_own_scale_while_the_other_goes_on() -> None:
    layer, x = kept(DelayedScaling(amax_history_len=2)), torch.randn(4, 16)
    values = torch.ones(8, 16)
    layer(x)
    before, after = copy.deepcopy(layer), copy.deepcopy(layer)
    before.weight.data.copy_(values)
    layer.weight.data.copy_(1000 * values)
    for _ in range(3):
        layer(x)
    after.weight.data.copy_(values)
    assert layer.recipe_state.scale[1] != before.recipe_state.scale[1]
    assert_same(before.weight._data, after.weight._data)
    assert_same(before.weight._scale_inv, after.weight._scale_inv)


def test_a_weight_of_another_quantizer_is_recorded_and_counted_in_its_slot() -> None:
    layer = kept(DelayedScaling())
    layer.weight = torch.nn.Parameter(make()(torch.ones(8, 16)))
    layer(torch.ones(4, 16))
    with torch.no_grad():
        layer.weight.fill_(1000.0)
    state = layer.recipe_state
    assert (state.amax_history[0, 1].item(), state.saturated[1].item()) == (1000.0, 8 * 16)


def test_a_slot_that_has_seen_steps_keeps_a_scale_of_one() -> None:
    layer = kept(DelayedScaling(amax_history_len=2))
    layer.recipe_state.amax_history[:, 1] = 448.0
    layer(torch.ones(4, 16))
    assert layer.recipe_state.scale[1].item() == 1.0


def test_a_state_that_has_seen_no_step_changes_no_scale_of_a_loaded_weight() -> None:
    recipe = DelayedScaling()
    layer, fresh = kept(recipe), ottava.nn.Linear(16, 8, recipe=recipe)
    layer(torch.ones(4, 16))
    before = layer.weight._scale_inv.item()
    layer.load_state_dict(fresh.state_dict() | {"weight": 0.01 * torch.ones(8, 16)})
    assert layer.weight._scale_inv.item() == before


def test_a_gather_is_recorded_by_the_passes_that_use_it() -> None:
    roles = [ottava.QuantizerRole("linear", each) for each in ("input", "weight", "grad_output")]
    state = DelayedScalingState(DelayedScaling(amax_history_len=2), roles)

    def use(value: float, recording: bool = True) -> tuple[float, int]:
        gathered = state.gather_quantizer()(torch.tensor([value, -1.0]))
        state.use_gathered(gathered, recording=recording)
        return state.amax_history[0, 1].item(), int(state.saturated[1])

    assert use(500.0, recording=False) == (0.0, 0)
    assert use(2.0) == (2.0, 0)
    assert use(500.0) == (500.0, 1)
    assert use(3.0) == (500.0, 1)
    with pytest.warns(UserWarning, match="evaluation clamps the weight of a layer, 1 elements"):
        state.note_evaluation(state.gather_quantizer()(torch.tensor([500.0])))
    assert state.evaluations.counts() == [0, 1, 0]


def test_quantizers_of_slots_differ_by_usages_alone() -> None:
    """Whoever records nothing has neither an amax nor a counter."""
    one, other = (kept(DelayedScaling()).recipe_state for _ in range(2))
    for make_one in (one.quantizer, one.evaluation_quantizer):
        for usages in ((True, False), (True, True), (False, True)):
            quantizer = make_one("weight", rowwise=usages[0], columnwise=usages[1])
            assert tuple(quantizer.get_usages().values()) == usages
    usages = {"rowwise": True, "columnwise": True}
    assert one.quantizer("input", **usages).is_alike(other.quantizer("input", **usages))
    silent = one.quantizer("input", **usages, recording=False)
    assert (silent.amax, silent.saturated) == (None, None)


def test_a_number_is_a_scale() -> None:
    for number in (2, 0.5, 2.0**-149):
        quantizer = Float8Quantizer(number, torch.zeros(1), E4M3)
        assert quantizer.scale.dtype == torch.float32
        assert quantizer.scale.tolist() == [number]


# -- refusals --


def test_tensors_that_are_refused_record_nothing() -> None:
    quantizer, x = make(), torch.ones(3)
    for bad in (x.int(), x.cfloat(), x.double(), x.to("meta")):
        with pytest.raises((DTypeError, DeviceError)):
            quantizer(bad)
    assert quantizer.amax.item() == 0.0


def exchange(name: str, value: Any) -> None:
    """Quantize after a part of the state was exchanged."""
    quantizer = make()
    setattr(quantizer, name, value)
    quantizer(torch.ones(3))


ONE, ZERO = torch.ones(1), torch.zeros(1)
REFUSED: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "a scale that is text": (DTypeError, lambda: Float8Quantizer("1", ZERO, E4M3)),  # type: ignore[arg-type]
    "a scale that is a bool": (DTypeError, lambda: Float8Quantizer(True, ZERO, E4M3)),
    "a scale in float64": (DTypeError, lambda: Float8Quantizer(ONE.double(), ZERO, E4M3)),
    "two scales": (ShapeError, lambda: Float8Quantizer(torch.ones(2), ZERO, E4M3)),
    "an amax that is a number": (DTypeError, lambda: Float8Quantizer(ONE, 0.0, E4M3)),  # type: ignore[arg-type]
    "three amaxes": (ShapeError, lambda: Float8Quantizer(ONE, torch.zeros(3), E4M3)),
    "an amax elsewhere": (DeviceError, lambda: Float8Quantizer(ONE, ZERO.to("meta"), E4M3)),
    "another format": (DTypeError, lambda: Float8Quantizer(ONE, ZERO, torch.int8)),
    "a counter in float32": (DTypeError, lambda: make(saturated=ZERO)),
    "a usage that is no bool": (OptionError, lambda: make(rowwise=None)),
    "a scale in float64, exchanged": (DTypeError, lambda: exchange("scale", ONE.double())),
    "a scale elsewhere, exchanged": (DeviceError, lambda: exchange("scale", ONE.to("meta"))),
    "an amax in bfloat16, exchanged": (DTypeError, lambda: exchange("amax", ZERO.bfloat16())),
} | {
    f"the scale {number}": (OptionError, lambda n=number: Float8Quantizer(n, None, E4M3))
    for number in (0, -1.0, 1e-46, math.nan, math.inf, 1e39)
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_does_not_fit_is_refused(name: str) -> None:
    error, make_or_use = REFUSED[name]
    with pytest.raises(error):
        make_or_use()
