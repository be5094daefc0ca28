"""The scalar oracle and interpretations make the bytes of every quantizer, from its contract."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ottava import Contract, GridQuantizer, Layout
from ottava.contract import NOTHING_STATED, Direction, Interpretation
from ottava.errors import OptionError, UsageError
from ottava.gemm import stored_tensors
from ottava.kernels import fixed_seed
from ottava.tensors import Quantizer
from ottava_custom import CurrentScalingTensorRef, IdentityQuantizer
from tests.comparing import assert_same
from tests.core.test_layout import layouts
from tests.samples import SPECIAL, tiles, wide
from tests.scalar import Bytes, decode, quantize
from tests.verify.quantizers import FAMILIES, GIVEN, SEED, variants

USAGES: list[Any] = ["rowwise", "columnwise"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Empty, one, odd, ragged for every block but the largest.
SHAPES = [(0, 5), (3, 0), (1, 1), (5, 19), (18, 33)]


def matrix(shape: tuple[int, int], dtype: str, seed: int) -> torch.Tensor:
    """By turns wide magnitudes, numbers with infinite quotients, and special values."""
    if seed % 3 == 1:
        small = torch.finfo(DTYPES[dtype]).smallest_normal
        return (wide(*shape, seed=seed) * small / 4).to(DTYPES[dtype])
    x = tiles(*shape, seed=seed, dtype=DTYPES[dtype])
    if seed % 3 == 2:
        for place, value in enumerate(SPECIAL[: x.numel()]):
            x.view(-1)[(place * 7) % x.numel()] = value
    return x


def by_scalars(contract: Contract, usage: Any, x: torch.Tensor) -> Bytes:
    return quantize(
        contract,
        usage,
        x.float().tolist(),
        columns=x.shape[1],
        dtype=str(x.dtype).removeprefix("torch."),
        seed=SEED,
        scale=torch.tensor(GIVEN).item(),
    )


def tensors(result: Bytes, contract: Contract, usage: str) -> dict[str, torch.Tensor]:
    """Bytes as a quantizer stores them."""
    choices = getattr(contract, usage)
    dtype = torch.float32 if choices.scale.format == "float32" else torch.uint8
    row = -(-result.shape[1] // choices.storage.per_byte)
    data = torch.tensor([list(row) for row in result.data], dtype=torch.uint8)
    parts = {"data": data.view(result.shape[0], row)}
    parts["scales"] = torch.tensor(result.scales, dtype=dtype)
    if result.amax is not None:
        parts["amax"] = torch.tensor(result.amax).reshape(-1)
    return parts


def tensors_of(result: Any, usage: Any) -> dict[str, torch.Tensor]:
    """What a quantizer stored; of the reference by the names that it has for them."""
    if isinstance(result, CurrentScalingTensorRef):
        return {"data": result.data.view(torch.uint8), "scales": result.scale.reshape(1, 1)}
    return stored_tensors(result, usage)


def check(quantizer: Quantizer, x: torch.Tensor, note: str) -> None:
    """The quantizer's bytes are those of the oracle and of an interpretation of its contract."""
    contract = quantizer.contract
    with fixed_seed(SEED):
        result = quantizer.quantize(x)
    for usage in USAGES:
        stored = tensors_of(result, usage)
        expected = tensors(by_scalars(contract, usage, x), contract, usage)
        scale = torch.tensor(GIVEN).item()
        made = Interpretation(contract, usage, x, seed=SEED, scale=scale).parts
        assert set(stored) == set(expected), f"{note} {usage}"
        for name, tensor in expected.items():
            text = f"{note} {usage} {name} of {tuple(x.shape)} {x.dtype}"
            # Amaxes of no rows have no shape that lists of Python could tell.
            assert_same(stored[name].reshape(tensor.shape), tensor, note=text)
            assert_same(made[name].reshape(tensor.shape), tensor, note=f"interpreted {text}")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_option_alone(name: str) -> None:
    for number, (options, quantizer) in enumerate(variants(name, at_most=1)):
        for turn, shape in enumerate(SHAPES):
            dtype = list(DTYPES)[(number + turn) % 3]
            check(quantizer, matrix(shape, dtype, seed=number + turn), f"{name} {options}")
        for dtype, seed in itertools.product(DTYPES, range(3)):
            check(quantizer, matrix((5, 19), dtype, seed), f"{name} {options}")


def check_pairs(name: str, every: int) -> None:
    for number, (options, quantizer) in enumerate(variants(name, at_most=2)):
        if number % every == 0:
            dtype = list(DTYPES)[number % 3]
            check(quantizer, matrix((5, 35), dtype, seed=number), f"{name} {options}")


@pytest.mark.parametrize("name", FAMILIES)
def test_some_pairs_of_options(name: str) -> None:
    check_pairs(name, every=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_pair_of_options(name: str) -> None:
    check_pairs(name, every=1)


@pytest.mark.parametrize("block", [(1, 32), (4, 8), (5, 3), (8, 8)])
@pytest.mark.parametrize("error", ["MAE", "MSE"])
def test_sums_of_errors_that_are_nearly_equal(block: tuple[int, int], error: str) -> None:
    """The factors are so close that the order of a sum decides which error is less."""
    factors = (1.0, 1 - 2.0**-24, 1 + 2.0**-23)
    layout = Layout("E3M2", block, candidates=factors, error=error)
    check(GridQuantizer(layout), wide(64, 64, sigma=0.1), str(layout))


def check_layout(layout: Layout, shape: tuple[int, int], dtype: str, seed: int) -> None:
    check(GridQuantizer(layout), matrix(shape, dtype, seed), str(layout))


#: A layout, the shape of a matrix, its dtype and its seed. Kernels pad to whole blocks, so that
#: large ones take long.
CASES = (
    layouts().filter(lambda one: all((s or 1) <= 64 for s in (*one.block, *(one.shared or ())))),
    st.tuples(st.integers(0, 9), st.integers(0, 20)),
    st.sampled_from(list(DTYPES)),
    st.integers(0, 1000),
)
SETTINGS: dict[str, Any] = {"suppress_health_check": [HealthCheck.filter_too_much]}


@settings(max_examples=60, **SETTINGS)
@given(*CASES)
def test_random_layouts(layout: Layout, shape: tuple[int, int], dtype: str, seed: int) -> None:
    check_layout(layout, shape, dtype, seed)


@pytest.mark.slow
@settings(max_examples=3000, **SETTINGS)
@given(*CASES)
def test_many_layouts(layout: Layout, shape: tuple[int, int], dtype: str, seed: int) -> None:
    check_layout(layout, shape, dtype, seed)


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_decode_to_the_values_of_the_quantizer(name: str) -> None:
    x = matrix((5, 35), "bfloat16", seed=1)
    for options, quantizer in variants(name, at_most=1):
        if "rotation" in options or "with_rht" in options:
            continue
        quantizer.set_usage(columnwise=False)
        with fixed_seed(SEED):
            expected = quantizer.quantize(x).dequantize(torch.float32)
        values = decode(quantizer.contract, "rowwise", by_scalars(quantizer.contract, "rowwise", x))
        assert_same(torch.tensor(values), expected, note=f"{name} {options}")


def test_identity_is_the_values() -> None:
    for dtype in DTYPES:
        x = matrix((5, 19), dtype, seed=2)
        stored = quantize(IdentityQuantizer().contract, "rowwise", x.float().tolist(), dtype=dtype)
        held = IdentityQuantizer().quantize(x).dequantize()
        assert [bytes(row) for row in held.view(torch.uint8).tolist()] == stored.data


def test_one_amax_of_a_tensor_is_a_vector_and_what_has_no_grid_has_no_tensors() -> None:
    layout = Layout("E4M3", (1, 16), torch.float8_e4m3fn, second_level="tensor")
    stored = stored_tensors(GridQuantizer(layout)(torch.full((2, 16), 3.0)), "rowwise")
    assert stored["amax"].tolist() == [3.0]
    with pytest.raises(UsageError, match="IdentityTensor says nothing of its rowwise data"):
        stored_tensors(IdentityQuantizer()(torch.ones(2, 2)), "rowwise")


def changed(layout: Layout, step: str, **words: str) -> Contract:
    """The contract of a layout with other words for rows."""
    contract = Contract.of_layout(layout)
    assert isinstance(contract.rowwise, Direction)
    steps = {step: replace(getattr(contract.rowwise, step), **words)}
    return replace(contract, rowwise=replace(contract.rowwise, **steps))


def both(contract: Contract, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rows, which the oracle and an interpretation make alike."""
    expected = tensors(by_scalars(contract, "rowwise", x), contract, "rowwise")
    made = Interpretation(contract, "rowwise", x, seed=SEED).parts
    for name, tensor in expected.items():
        assert_same(made[name].reshape(tensor.shape), tensor, note=name)
    return expected


PLAIN = Layout("E2M1", (1, 16), torch.float8_e4m3fn, columnwise="transposed")


def test_values_are_rounded_first_where_the_contract_says_so() -> None:
    # bfloat16 rounds the second number to a tie of E2M1.
    x = torch.tensor([[6.0, 0.2501]])
    rounded = both(changed(PLAIN, "source", rounded_to="bfloat16"), x)
    assert_same(
        list(rounded.values()), list(both(Contract.of_layout(PLAIN), x.bfloat16()).values())
    )
    assert not torch.equal(rounded["data"], both(Contract.of_layout(PLAIN), x)["data"])


def test_the_first_element_may_have_the_high_half() -> None:
    x = matrix((5, 19), "float32", seed=0)
    low = both(Contract.of_layout(PLAIN), x)["data"]
    assert_same(both(changed(PLAIN, "storage", first="high"), x)["data"], low >> 4 | low << 4)


@pytest.mark.parametrize(
    ("layout", "scale"),
    [
        (PLAIN, 0x7F),
        (replace(PLAIN, scale="UE5M3"), 0xFF),
        (replace(PLAIN, scale=torch.float8_e8m0fnu, rounding="up"), 0xFF),
        (replace(PLAIN, scale=torch.float32), 1.0),
    ],
)
def test_nan_may_reach_the_scale_of_its_block(layout: Layout, scale: float) -> None:
    x = torch.ones(1, 32)
    x[0, 3] = torch.nan
    scales = both(changed(layout, "amax", nan="propagates"), x)["scales"]
    assert scales[0, 0].item() == scale
    assert scales[0, 1].item() == both(Contract.of_layout(layout), x)["scales"][0, 1].item()


NVFP4 = Layout("E2M1", (1, 16), torch.float8_e4m3fn, columnwise="transposed", stochastic=True)


def without(step: str) -> Contract:
    contract = Contract.of_layout(NVFP4)
    assert isinstance(contract.rowwise, Direction)
    return replace(contract, rowwise=replace(contract.rowwise, **{step: "unstated"}))


@pytest.mark.parametrize(
    ("contract", "options", "match"),
    [
        (NOTHING_STATED, {}, "rowwise is 'unstated'.*defines its property"),
        (without("scale"), {}, "rowwise.scale is 'unstated'"),
        (without("random"), {}, "rowwise.random is 'unstated'"),
        (Contract.of_layout(NVFP4).with_rule("own:mine"), {}, "scale.rule is 'own:mine'"),
        (Contract.of_layout(NVFP4), {}, "seed is None"),
        (Contract.of_layout(NVFP4).with_rule("given"), {"seed": 1}, "scale is None"),
    ],
)
def test_what_is_not_stated_is_refused(
    contract: Contract, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(OptionError, match=f"(?s){match}"):
        quantize(contract, "rowwise", [[1.0]], dtype="float32", **options)
    with pytest.raises(OptionError, match=f"(?s){match}"):
        Interpretation(contract, "rowwise", torch.ones(1, 1), **options)


@pytest.mark.parametrize("scale", [torch.float32, torch.float8_e8m0fnu], ids=str)
def test_elements_follow_from_scales_that_are_taken(scale: torch.dtype) -> None:
    """Those of other values, which make other elements of these."""
    rounding = "nearest" if scale is torch.float32 else "up"
    contract = Contract.of_layout(Layout(torch.float8_e4m3fn, (1, 32), scale, rounding))
    x, others = wide(4, 64), wide(4, 64, seed=1)
    made, source = (Interpretation(contract, "rowwise", values) for values in (x, others))
    made.take_scales(source.stored)
    assert_same(made.parts["scales"], source.parts["scales"])
    product = x.unflatten(1, (2, 32)) * source.multiplier.unsqueeze(2)
    expected = product.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    assert_same(made.parts["data"], expected.view(torch.uint8))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(OptionError, match=r"float64.*float32, bfloat16, float16"):
        quantize(Contract.of_layout(NVFP4), "rowwise", [[1.0]], dtype="float64")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_option_that_changes_bytes_changes_the_contract(name: str) -> None:
    """And one that does not, does not: two quantizers that a contract cannot tell apart agree."""
    seen: dict[Contract, dict[str, Any]] = {}
    x = matrix((18, 33), "float32", seed=5)
    for options, quantizer in variants(name, at_most=1):
        contract = quantizer.contract
        if contract not in seen:
            seen[contract] = options
            continue
        assert set(options) <= {"four_over_six_bound", "four_over_six_error", "rotated"}, options
    alone = {frozenset(options) for options in seen.values()}
    for option in FAMILIES[name].options:
        if frozenset([option]) not in alone:
            needs = {"rotated": {"rotation": 16}}.get(option, {"four_over_six": True})
            check_needed(name, option, needs, x)


def check_needed(name: str, option: str, needs: dict[str, Any], x: torch.Tensor) -> None:
    """An option that matters beside another one only."""
    family = FAMILIES[name]
    contracts = {family.make(**needs).contract}
    for value in family.options[option]:
        contracts.add(family.make(**needs, **{option: value}).contract)
    assert len(contracts) == 1 + len(family.options[option])
