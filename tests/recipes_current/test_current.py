"""Current scaling: the quantizer against arithmetic on Python numbers, the recipe, training."""

from __future__ import annotations

import io
import itertools
import math
import struct
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DeviceError, DTypeError, OptionError, UsageError
from ottava.formats import Format
from ottava_current import Float8CurrentScaling, Float8CurrentScalingQuantizer


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@pytest.mark.parametrize("pow_2", [False, True])
@pytest.mark.parametrize("fp8_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scale_and_values(fp8_dtype: torch.dtype, pow_2: bool) -> None:
    for largest, epsilon in itertools.product(
        (0.0, 3.7e-3, 1.0, 448.0, 1e30, 2.0**-140, math.inf), (0.0, 1e-2)
    ):
        x = torch.tensor([largest, -largest / 3 if math.isfinite(largest) else 1.0, 0.0, math.nan])
        q = Float8CurrentScalingQuantizer(
            fp8_dtype, force_pow_2_scales=pow_2, amax_epsilon=epsilon
        )(x)
        amax = max(float(x[0]), float32(epsilon))
        scale = 1.0
        if amax and math.isfinite(amax):
            scale = float32(min(torch.finfo(fp8_dtype).max / amax, torch.finfo(torch.float32).max))
        if pow_2:
            scale = 2.0 ** math.floor(math.log2(scale))
        assert q._scale_inv.item() == float32(1.0 / scale), (largest, epsilon)
        assert q._data[3] == 0x7F, (largest, epsilon)
        if math.isfinite(largest):
            step = torch.finfo(fp8_dtype).eps
            torch.testing.assert_close(
                q.dequantize()[:3],
                x[:3],
                rtol=step,
                atol=2**-9 / scale,
                msg=lambda told: f"largest {largest}, epsilon {epsilon}: {told}",  # noqa: B023
            )


def test_options_are_checked() -> None:
    with pytest.raises(DTypeError):
        Float8CurrentScalingQuantizer(torch.float16)
    with pytest.raises(OptionError):
        Float8CurrentScalingQuantizer(torch.float8_e4m3fn, amax_epsilon=-1.0)
    no_flag: Any = 2
    with pytest.raises(OptionError):
        Float8CurrentScalingQuantizer(torch.float8_e4m3fn, force_pow_2_scales=no_flag)
    with pytest.raises(OptionError, match="HYBRID"):
        Float8CurrentScaling(fp8_format="E4M3")  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        Float8CurrentScaling(amax_epsilon=math.nan)
    with pytest.raises(OptionError, match="fp8_format"):
        ottava.get_recipe("current", format="E4M3")


def test_the_recipe_is_found_and_gives_formats_by_direction() -> None:
    assert "current" in [spec.name for spec in ottava.list_recipes()]
    recipe = ottava.get_recipe("current", force_pow_2_scales=True)
    assert recipe == Float8CurrentScaling(force_pow_2_scales=True)
    by_format = {
        Format.HYBRID: (torch.float8_e4m3fn, torch.float8_e5m2),
        Format.E4M3: (torch.float8_e4m3fn, torch.float8_e4m3fn),
        Format.E5M2: (torch.float8_e5m2, torch.float8_e5m2),
    }
    for fmt, (forward, backward) in by_format.items():
        recipe = Float8CurrentScaling(fp8_format=fmt)
        for role, expected in (("input", forward), ("weight", forward), ("grad_output", backward)):
            assert recipe.quantizer(role).fp8_dtype == expected  # type: ignore[attr-defined]


def test_quantizers_and_tensors_pickle_with_weights_only() -> None:
    q = Float8CurrentScalingQuantizer(torch.float8_e5m2, amax_epsilon=0.5)(torch.randn(3, 4))
    buffer = io.BytesIO()
    torch.save(q, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert torch.equal(loaded._data, q._data)
    assert loaded._quantizer == q._quantizer


def test_a_model_learns_as_in_bfloat16() -> None:
    def train(convert: bool) -> float:
        torch.manual_seed(0)
        model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
        ).bfloat16()
        if convert:
            ottava.convert(model, "current")
        x = torch.randn(256, 32).bfloat16()
        y = torch.sin(x @ torch.randn(32, 8).bfloat16())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x).float(), y.float())
            loss.backward()
            optimizer.step()
        return loss.item()

    plain, quantized = train(False), train(True)
    assert plain < 0.06
    # From about 0.5 at the start; rounding noise costs a little of the way down.
    assert quantized < 0.08


def test_reduction_without_a_process_group_is_an_error() -> None:
    quantizer = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, with_amax_reduction=True)
    with pytest.raises(UsageError, match="init_process_group"):
        quantizer(torch.ones(2))


def test_weights_are_equal_on_all_ranks_and_are_not_reduced() -> None:
    recipe = Float8CurrentScaling(with_amax_reduction=True)
    roles = ("input", "weight", "grad_output")
    assert [recipe.quantizer(role).with_amax_reduction for role in roles] == [True, False, True]


def test_devices_compare_by_what_they_name() -> None:
    by_name, by_object = (
        Float8CurrentScalingQuantizer(torch.float8_e4m3fn, device=device)
        for device in ("cpu", torch.device("cpu"))
    )
    assert by_name == by_object
    with pytest.raises(DeviceError, match="bogus"):
        Float8CurrentScalingQuantizer(torch.float8_e4m3fn, device="bogus")


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="2.11's compiler cannot trace how a layer gets its first state",
)
def test_a_compiled_function_names_its_recipe() -> None:
    layer, x = ottava.nn.Linear(16, 8), torch.randn(4, 16)

    def run(x: torch.Tensor) -> torch.Tensor:
        with ottava.autocast("current"):
            return layer(x)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))
    assert not torch.equal(run(x), layer(x))


def test_a_named_region_keeps_the_state_of_its_layers() -> None:
    layer = ottava.nn.Linear(16, 8)
    states = []
    for _ in range(2):
        with ottava.autocast("current"):
            layer(torch.randn(4, 16))
        states.append(layer._binding.state)
    assert states[0] is states[1]


class Doubling(Float8CurrentScalingQuantizer):
    """A quantizer in TransformerEngine's form, which calls that of its base."""

    def quantize_impl(self, tensor):  # type: ignore[no-untyped-def, override]
        return super().quantize_impl(2 * tensor)


class Keywords:
    """What a class beside the quantizers brings."""

    def quantize_impl(self: Any, tensor: torch.Tensor, **options: Any) -> Any:
        return Float8CurrentScalingQuantizer.quantize_impl(self, 2 * tensor, **options)


class Mixed(Keywords, Float8CurrentScalingQuantizer):  # type: ignore[misc]
    """The function of one base, the rest of another."""


@pytest.mark.parametrize("kind", [Doubling, Mixed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantize_impl_that_takes_a_tensor_alone(kind: Any, dtype: torch.dtype) -> None:
    x = torch.randn(5, 7).to(dtype)
    made, expected = (
        kind(torch.float8_e4m3fn)(x),
        Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(2 * x),
    )
    assert made.dtype == dtype
    assert torch.equal(made.dequantize(), expected.dequantize())
