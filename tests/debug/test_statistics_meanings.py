"""Statistics that have a name of TransformerEngine's mean the same: by float64 arithmetic of its
own."""

import math

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from eight_layers import layers_of, model_of, step

import ottava
import ottava_debug
from ottava.errors import OptionError

LAYER = "blocks.0.fc1"


def values_of(stats, tensor, *, recipe="current", x=None, weight=None, calls=1):
    """The statistics of a tensor of one layer, in one step of some calls."""
    layer = ottava.nn.Linear(256, 128, bias=False, recipe=recipe)
    if weight is not None:
        with torch.no_grad():
            layer.weight.copy_(weight)
    with ottava_debug.statistics(layer, stats, tensors=[tensor]) as run:
        for _ in range(calls):
            layer(torch.randn(32, 256) if x is None else x)
        run.step()
    return {stat: value for (_, _, stat), value in run.latest().items()}


def halves(*shape):
    """Halves of zeros, and quarters of ones and of what is below every number of E4M3 beside 1."""
    x = torch.zeros(shape)
    x.view(-1)[::2] = 1.0
    x.view(-1)[::4] = 2.0**-30
    return x


PERCENTAGES = [
    # Of all elements a quarter becomes zero, of those that are not zero a half.
    ("underflows%", 25.0),
    ("underflows_of_nonzero%", 50.0),
    ("overflows%", 0.0),
    ("saturation%", 0.0),
]


@pytest.mark.parametrize(("stat", "expected"), PERCENTAGES)
@pytest.mark.parametrize("prefix", ["", "fp8_current_scaling_"])
def test_percentages_of_all_elements(stat, expected, prefix):
    found = values_of([prefix + stat], "activation", x=halves(32, 256))
    assert found == {prefix + stat: expected}


def test_clamped_values_in_percent_of_all_elements_and_of_the_finite_ones():
    x = torch.ones(32, 256)
    layer = ottava.nn.Linear(256, 128, bias=False, recipe="delayed")
    # The scale of the second step comes from the first, in which everything is 1.
    layer(x)
    x[:16] = 4.0
    x[16:24] = math.inf
    with ottava_debug.statistics(layer, ["overflows%", "saturation%"], tensors="activation") as run:
        layer(x)
        run.step()
    found = {stat: value for (_, _, stat), value in run.latest().items()}
    assert found == {"overflows%": 50.0, "saturation%": 100 * 16 / 24}


def test_scales_are_told_as_they_are_stored():
    """Of E8M0 the bytes, which are exponents with a bias of 127."""
    x = torch.ones(32, 256)
    x[:, :32], x[:, 32:64] = 2.0**-20, 2.0**11
    ends = ("min", "max")
    stats = [
        f"{prefix}scale_inv{kind}_{end}"
        for prefix in ("", "mxfp8_")
        for kind in ("", "_value")
        for end in ends
    ]
    found = values_of(stats, "activation", recipe="mxfp8", x=x)
    # The largest number of E4M3 is 448, between 2^8 and 2^9.
    exponents = {"min": -20 - 8, "max": 11 - 8}
    expected = {}
    for prefix in ("", "mxfp8_"):
        for end, exponent in exponents.items():
            expected[f"{prefix}scale_inv_{end}"] = exponent + 127
            expected[f"{prefix}scale_inv_value_{end}"] = 2.0**exponent
    assert found == expected
    floats = values_of(["scale_inv_min", "scale_inv_value_min", "scale"], "activation", x=x)
    expected = torch.tensor(2.0**11) / 448
    assert (
        floats["scale_inv_min"]
        == floats["scale_inv_value_min"]
        == pytest.approx(expected.item(), rel=1e-6)
    )
    assert floats["scale"] == pytest.approx(448 / 2.0**11, rel=1e-6)


def blocks(x, rows):
    """E4M3 in blocks of ``rows`` × 128 with powers of two as scales, by float64 arithmetic."""
    made = torch.empty(x.shape, dtype=torch.float64)
    for at in range(0, x.shape[0], rows):
        for beside in range(0, x.shape[1], 128):
            place = slice(at, at + rows), slice(beside, beside + 128)
            scale = 2.0 ** math.floor(math.log2(448 / x[place].abs().max().item()))
            made[place] = (x[place].double() * scale).to(torch.float8_e4m3fn).double() / scale
    return made


@pytest.mark.parametrize(("tensor", "rows"), [("activation", 1), ("gradient", 1), ("weight", 128)])
def test_blockwise_scaling_of_weights_is_in_squares(tensor, rows):
    torch.manual_seed(0)
    layer, seen = ottava.nn.Linear(256, 384, bias=False, recipe="current"), {}
    x = torch.randn(64, 256) * torch.logspace(-6, 6, 64)[:, None]
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-6, 6, 384)[:, None])
    stats = ["fp8_block_scaling_mse", "fp8_block_scaling_underflows%"]
    with ottava_debug.statistics(layer, stats, tensors=[tensor]) as run:
        y = layer(x.requires_grad_())
        seen["gradient"] = torch.randn(64, 384) * torch.logspace(-6, 6, 64)[:, None]
        y.backward(seen["gradient"])
        run.step()
    seen |= {"activation": x.detach(), "weight": layer.weight.detach()}
    given = seen[tensor]
    made = blocks(given, rows)
    found = {stat: value for (_, _, stat), value in run.latest().items()}
    assert found[stats[0]] == pytest.approx(
        (given.double() - made).square().mean().item(), rel=1e-9
    )
    zeroed = ((made == 0) & (given != 0)).sum().item()
    assert found[stats[1]] == pytest.approx(100 * zeroed / given.numel())


class Steps:
    """A writer of TensorBoard that notes the steps."""

    def __init__(self):
        self.steps, self.values = [], []

    def add_scalar(self, name, value, step):
        self.steps.append(step)
        self.values.append(value)


STEPS = [
    ({"start_end_list": [[1, 3], [5, 5]]}, [1, 2, 3, 5]),
    ({"start_end_list": [[0, 2], [2, 4]], "freq": 2}, [0, 2, 4]),
    ({"start_end_list": [[0, 0], [6, -1]]}, [0, 6, 7]),
    ({"start_step": 5, "end_step": -1}, [5, 6, 7]),
    ({"end_step": -1, "freq": 3}, [0, 3, 6]),
    ({"start_step": 2, "end_step": 4}, [2, 3, 4]),
]


@pytest.mark.parametrize(("given", "expected"), STEPS, ids=str)
def test_ends_of_ranges_are_included(given, expected, initialize):
    options = ", ".join(f"{key}: {value}" for key, value in given.items())
    text = f"""
    it:
      enabled: True
      layers: {{layer_types: [{LAYER}]}}
      transformer_engine:
        LogTensorStats: {{enabled: True, tensors: [weight], stats: [min], {options}}}
    """
    writer = Steps()
    initialize(text, tb_writer=writer)
    layer = layers_of(model_of("current"))[f"model.{LAYER}"]
    for _ in range(8):
        layer(torch.randn(4, layer.in_features))
        debug_api.step()
    assert writer.steps == expected


@pytest.mark.parametrize(
    "given", [[[0, 3], [2, 5]], [[3, 2]], [[0, -1], [3, 4]], [[-1, 2]]], ids=str
)
def test_ranges_that_cannot_be(given):
    with pytest.raises(OptionError, match=r"start_end_list.*ends included"):
        ottava_debug.statistics(model_of("current"), ["min"], start_end_list=given)


def test_a_weight_is_counted_once_a_step():
    torch.manual_seed(0)
    weight = torch.randn(128, 256)
    stats = ["l1_norm", "l2_norm", "mean", "exponents", "mse", "underflows%", "mxfp8_mse"]
    expected = values_of(stats, "weight", weight=weight)
    assert values_of(stats, "weight", weight=weight, calls=3) == expected
    assert expected["l1_norm"] == pytest.approx(weight.double().abs().sum().item())
    assert sum(expected["exponents"].values()) == weight.numel()
    # Of other tensors all microbatches count.
    once, thrice = (values_of(["l1_norm"], "activation", x=weight, calls=calls) for calls in (1, 3))
    assert thrice["l1_norm"] == pytest.approx(3 * once["l1_norm"])


def test_a_weight_is_counted_again_in_the_next_step():
    model = model_of("current")
    with ottava_debug.statistics(model, ["l1_norm"], layers=LAYER, tensors=["weight"]) as run:
        for _ in range(2):
            step(model)
            step(model)
            run.step()
    assert [each.step for each in run.found] == [0, 1]
    assert run.found[0].value == run.found[1].value


def test_layers_of_one_name_have_weights_of_their_own(initialize):
    text = """
    it:
      enabled: True
      layers: {layer_types: [same]}
      ottava: {LogTensorStats: {enabled: True, tensors: [weight], stats: [l1_norm]}}
    """
    writer = Steps()
    initialize(text, tb_writer=writer)
    layers = [ottava.nn.Linear(16, 16, recipe="current", name="same") for _ in range(2)]
    x = torch.randn(4, 16)
    with pytest.warns(UserWarning, match="several layers are called 'same'"):
        [layer(x) for layer in layers * 2]
    debug_api.step()
    sums = [layer.weight.detach().double().abs().sum().item() for layer in layers]
    assert writer.values == [pytest.approx(sum(sums))]


def test_nan_is_told_whichever_microbatch_has_it():
    x = torch.ones(32, 256)
    broken = x.clone()
    broken[3, 4] = math.nan
    layer = ottava.nn.Linear(256, 128, recipe="current")
    for batches in ((x, broken), (broken, x)):
        with ottava_debug.statistics(layer, ["min", "max", "mean"], tensors="activation") as run:
            for batch in batches:
                layer(batch)
            run.step()
        assert all(math.isnan(value) for value in run.latest().values())
        assert len(run.found) == 3
