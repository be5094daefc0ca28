"""``ottava verify``: right bytes have no cause, forms of results, reports, errors."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import ottava
from ottava.checkpoint import save_file
from ottava.cli.main import app
from ottava.contract import Interpretation
from ottava.contract.steps import takes_scale
from ottava.errors import OptionError, UsageError
from ottava.gemm import stored_tensors
from ottava_delayed import Float8Quantizer
from ottava_mxfp8 import MXFP8Quantizer
from ottava_nvfp4 import NVFP4Quantizer
from ottava_verify import (
    TURNS,
    assert_contract,
    verify,
    verify_checkpoint,
    verify_checkpoints,
    verify_function,
)
from ottava_verify.checkpoints import quantized_tensors
from ottava_verify.contracts import Named, contracts_of_recipes, resolve_contract
from ottava_verify.finding import Finding, finding
from ottava_verify.functions import Input, read
from ottava_verify.inputs import outliers
from ottava_verify.output import sentences
from ottava_verify.search import Case, Cases, Explanation, compare, match, window_of
from ottava_verify.stored import Stored, of_parts
from tests.comparing import assert_same
from tests.numbers import quotient
from tests.scalar import decode, quantize
from tests.verify import planted
from tests.verify.planted import E4M3

CONTRACTS = contracts_of_recipes()
PLAIN = NVFP4Quantizer()
KERNELS = """from tests.verify.planted import mx
from tests.verify.test_verify import FLOOR
import ottava, torch
COLUMNS = FLOOR.with_usage(False, True)
WEIGHT = ottava.get_recipe("nvfp4").quantizer("weight")
OF_ARRAYS = lambda x: FLOOR(torch.from_numpy(x.astype("float32")))
"""
FLOOR = MXFP8Quantizer(E4M3, scale_rounding="floor")
RANDOM = NVFP4Quantizer(stochastic_rounding=True).contract
X = outliers(64, 160, seed=1, dtype=torch.bfloat16)
SMALL = X[:32, :64].contiguous()


def few_inputs() -> list[Input]:
    """Usual and unusual matrices."""
    odd = X[:33, :70].clone()
    odd[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    return [Input("usual", X[:16]), Input("odd", odd, is_usual=False)]


# Nothing is named where all bytes are right.


@pytest.mark.parametrize(
    "named",
    [
        # Recipes with options in the long run.
        pytest.param(named, id=named.name, marks=pytest.mark.slow if "(" in named.name else ())
        for named in CONTRACTS
    ],
)
def test_right_bytes_have_no_cause(named: Named) -> None:
    report = verify_function(
        interpreted(named), named.contract, usage=named.usage, inputs=few_inputs()
    )
    assert report.status == "equal"
    assert report.findings[0].causes == report.findings[0].nearest == ()


def interpreted(named: Named) -> Callable[..., Any]:
    """A function with the bytes of a contract, by the scalar oracle."""

    def function(x: torch.Tensor, given: float | int | None = None) -> tuple[torch.Tensor, ...]:
        dtype = str(x.dtype).removeprefix("torch.")
        options = {"seed": given} if isinstance(given, int) else {"scale": given}
        stored = quantize(named.contract, named.usage, x.tolist(), dtype=dtype, **options)
        data = torch.tensor([list(row) for row in stored.data], dtype=torch.uint8)
        is_code = named.steps.scale.format != "float32"
        scales = torch.tensor(stored.scales, dtype=torch.uint8 if is_code else torch.float32)
        return (data, scales) if stored.amax is None else (data, scales, torch.tensor(stored.amax))

    return function


@pytest.mark.parametrize(
    "name", [spec.name for spec in ottava.list_recipes() if spec.name != "custom"]
)
@pytest.mark.parametrize("has_contract", [True, False])
def test_right_checkpoints_have_no_cause(name: str, has_contract: bool, tmp_path: Path) -> None:
    quantizer = ottava.get_recipe(name).quantizer("weight")
    if not isinstance(quantizer, ottava.Quantizer):
        pytest.skip("its quantizers are made of a state")
    weight = quantizer(SMALL)
    if not has_contract:
        weight._quantizer = None
    save_file({"a.weight": weight, "bias": torch.zeros(3)}, tmp_path / "quantized.safetensors")
    safetensors.torch.save_file({"a.weight": SMALL}, tmp_path / "source.safetensors")
    report = verify_checkpoint(tmp_path / "quantized.safetensors", tmp_path / "source.safetensors")
    assert [finding.status for finding in report.findings] == ["equal"] * len(report.findings)
    assert all(finding.causes == () for finding in report.findings)
    # One buffer may serve both usages.
    both = name in ("mxfp8", "blockwise", "rowwise", "nvfp4", "mx")
    assert len(report.findings) == 1 + both


def test_the_contract_that_is_named_counts_more_than_that_of_the_file(tmp_path: Path) -> None:
    save_file({"a.weight": FLOOR(SMALL)}, tmp_path / "quantized")
    source = checkpoint(tmp_path / "source", a__weight=SMALL)
    for options, status in (({}, "departs"), ({"scale_rounding": "floor"}, "equal")):
        report = verify_checkpoint(
            tmp_path / "quantized", source, contract="mxfp8", options=options
        )
        assert {finding.status for finding in report.findings} == {status}


# Forms of results.


def as_numpy(x: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    assert isinstance(x, np.ndarray)
    data, scales = planted.mx(torch.from_numpy(x), rule="up")
    return data.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn), scales.numpy()


def as_mapping(x: torch.Tensor) -> dict[str, torch.Tensor]:
    data, scales, amax = planted.nvfp4(x)
    return {"weight_packed": data, "weight_scale": scales, "weight_global_scale": 2688 / amax}


def as_storage(x: torch.Tensor) -> ottava.QuantizedTensorStorage:
    return MXFP8Quantizer(E4M3)(x)


def as_scales_of_e8m0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    data, scales = planted.mx(x, rule="up")
    return data, scales.view(torch.float8_e8m0fnu)


def as_flat_scales(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    data, scales = planted.mx(x, rule="up")
    return data, scales.flatten()


@pytest.mark.parametrize(
    ("function", "recipe"),
    [
        (as_flat_scales, "mxfp8"),
        (as_storage, "mxfp8"),
        (as_numpy, "mxfp8"),
        (as_scales_of_e8m0, "mxfp8"),
        (planted.nvfp4, "nvfp4"),
        (as_mapping, "nvfp4"),
    ],
)
def test_forms_of_results(function: Callable[..., Any], recipe: str) -> None:
    x = torch.full((32, 128), 0.75)
    x[:, ::2] = torch.arange(64) + 1.0
    inputs = [Input("x", x)]
    assert_contract(function, recipe, as_numpy=function is as_numpy, inputs=inputs)


@pytest.mark.parametrize(
    "result", [None, (1, 2, 3, 4), {"data": X}, (X, X), (X.view(torch.int16), X), ("a", X)]
)
def test_other_results_are_refused(result: object) -> None:
    with pytest.raises(TypeError, match="Expected: "):
        read(result, "rowwise")


def test_quantizers_are_functions() -> None:
    """One that rounds at random draws the seed of the vectors; one with a scale cannot take it."""
    inputs = [Input("x", X)]
    assert_contract(NVFP4Quantizer(stochastic_rounding=True), RANDOM, inputs=inputs)
    given = Float8Quantizer(torch.ones(()), None, E4M3)
    (finding,) = verify_function(given, "delayed", inputs=inputs).findings
    assert finding.status == "not compared"
    assert "has a scale of its own" in finding.errors["x"]
    # A function may use its input up.
    quantizer = ottava.get_recipe("current").quantizer("input")
    assert_contract(lambda x: (quantizer(x.clone()), x.zero_())[0], "current", inputs=inputs)


@pytest.mark.parametrize(
    ("level", "match"),
    [
        (torch.zeros(40, 2, dtype=torch.uint8), "second level is torch.uint8. Expected: float32"),
        (torch.zeros(3), "second level has 3 numbers, and the contract's 1"),
    ],
)
def test_a_second_level_of_another_form_is_told(level: torch.Tensor, match: str) -> None:
    """And is not explained by amaxes of another tensor."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        data, scales, _ = planted.nvfp4(x)
        return data, scales, level

    (finding,) = verify_function(function, PLAIN, inputs=[Input("x", X)]).findings
    assert finding.causes == ()
    assert match in f"{finding.note} {finding.errors}"


def test_a_function_that_ends_the_process_fails() -> None:
    report = verify_function(sys.exit, "mxfp8", inputs=[Input("x", X)])
    assert report.exit_status == 2
    assert "SystemExit" in report.findings[0].errors["x"]


# What departs.


def test_the_kinds_of_blocks_are_told_where_scales_alone_depart() -> None:
    x = torch.ones(4, 64)
    x[0] = 0.0
    x[1, 1], x[2, 40] = math.inf, math.nan

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = MXFP8Quantizer(E4M3).quantize(x)
        return result._rowwise_data, result._rowwise_scale_inv + 1

    (finding,) = verify_function(function, "mxfp8", inputs=[Input("x", x)]).findings
    assert finding.kinds == {
        "in a block with NaN": 1,
        "in a block with an infinite value": 1,
        "in a block of zeros": 2,
        "other": 4,
    }


def test_what_is_near_nothing_has_no_nearest() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(x.shape[0])
        bits = torch.randint(256, (x.numel() * 33 // 32,), generator=random).to(torch.uint8)
        data, scales = bits.split((x.numel(), x.numel() // 32))
        return data.view(x.shape), scales.view(x.shape[0], -1)

    (finding,) = verify_function(function, "mxfp8", inputs=[Input("x", X)]).findings
    assert (finding.status, finding.causes, finding.nearest) == ("departs", (), ())


def test_the_first_ten_and_the_kinds_are_told() -> None:
    report = verify_function(planted.mx, "mxfp8", inputs=[Input("x", X.float())])
    (finding,) = report.findings
    assert finding.agreement is not None
    assert finding.agreement.equal_scales < finding.agreement.scales == 64 * 5
    assert len(finding.examples) == 10
    # Codes of floor are lower by one where they depart.
    first = finding.examples[0]
    assert (first.kind, int(first.expected, 16) - int(first.found, 16)) == ("scale", 1)
    start = X[first.row, first.column : first.column + 32].float()
    assert first.value == start.abs().max()
    departing = finding.agreement.elements - finding.agreement.equal_elements
    assert sum(finding.kinds.values()) == departing
    assert [each.kind for each in finding.examples] == ["scale"] * 5 + ["element"] * 5


def test_the_kinds_of_elements_and_the_error() -> None:
    """With a scale of 1: a tie, what is beyond E4M3, zero, another number, and what became NaN."""
    x = torch.tensor([[448.0, 17.0, 1000.0, 0.0, 5.0, 6.0]])
    contract = resolve_contract("delayed").contract
    made = Interpretation(contract, "rowwise", x, scale=1.0)
    data = made.parts["data"] ^ torch.tensor([[0, 1, 2, 0x80, 1, 0x33]], dtype=torch.uint8)
    stored = Stored.of(data, made.parts["scales"])
    case = Case("x", x, stored, scale=1.0)
    expected = resolve_contract(contract)
    found = found_of(case, expected)
    assert found.kinds == {"a tie": 1, "beyond the largest element": 1, "zero": 1, "other": 2}
    values, wrong = ([448.0, 16.0, 448.0, 0.0, 5.0], [448.0, 18.0, 384.0, 0.0, 5.5])
    # NaN has no error.
    squares = [sum((a - b) ** 2 for a, b in zip(values, wrong, strict=True)), math.hypot(*values)]
    assert found.error == pytest.approx(math.sqrt(squares[0]) / squares[1])


def plain_finding(contract: Any, usage: Any, *made: torch.Tensor, x: torch.Tensor) -> Finding:
    """The finding of what was made of a matrix."""
    expected = resolve_contract(contract, usage=usage)
    return found_of(Case("x", x, Stored.of(*made)), expected)


def found_of(case: Case, expected: Named) -> Finding:
    """The finding of one case, without a search for turns."""
    cases = Cases([case])
    return finding("f", cases, match(cases, [Explanation(expected)], most_turns=0), expected)


def test_a_random_rounding_is_recognized() -> None:
    """Elements that all go away from zero are not random."""
    random = torch.Generator().manual_seed(0)
    x = SMALL.float()
    for share in (0.5, 1.0):

        def to_a_neighbour(scaled: torch.Tensor, share: float = share) -> torch.Tensor:
            low = planted.towards_zero(scaled)
            up = (torch.rand(scaled.shape, generator=random) < share) & (low.float() != scaled)
            return low.view(torch.uint8) + up

        made = planted.mx(x, rule="up", elements=to_a_neighbour)
        found = plain_finding("mxfp8", "rowwise", *made, x=x)
        assert found.causes == ()
        assert any("at random" in clause for clause in found.nearest) == (share < 1)


def test_what_departs_of_a_transpose_is_told_by_its_places() -> None:
    x = X.float()
    made = Interpretation(PLAIN.contract, "columnwise", x).parts
    made["scales"][2, 1] += 1
    found = plain_finding(PLAIN, "columnwise", *made.values(), x=x)
    (example,) = found.examples
    assert (example.kind, example.row, example.column) == ("scale", 2, 16)
    assert example.value == x[16:32, 2].abs().max()
    assert found.error is not None


def test_two_turns_are_found_together() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, scales = planted.turned(x)
        return planted.mx(x, rule="up", elements=planted.flushed)[0], scales

    (finding,) = verify_function(function, "mxfp8", inputs=[Input("x", X.float())]).findings
    assert finding.causes == (("scales are transposed", "subnormal elements become zero"),)


def test_unusual_inputs_are_told_apart() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        data, scales = planted.mx(x.nan_to_num(0.0, 1e9) if not x.isfinite().all() else x)
        return data, scales

    inputs = [Input("usual", X), Input("odd", torch.full((32, 64), float("inf")), is_usual=False)]
    report = verify_function(function, "mxfp8", inputs=inputs)
    (finding,) = report.findings
    assert len(finding.causes) == 1
    assert "`floor`" in finding.causes[0][0]
    assert finding.scope.startswith("usual inputs")
    assert any("  all bytes of usual inputs" in sentence for sentence in sentences(report))


def test_what_explains_some_inputs_is_no_cause() -> None:
    """More inputs than a search looks at first, of which every second one has another turn."""
    inputs = [X[: 64 >> i % 2, :32].float() for i in range(14)]
    turns: list[Any] = [{"rule": "floor"}, {"rule": "up", "elements": planted.towards_zero}]
    stored = [Stored.of(*planted.mx(x, **turns[i % 2])) for i, x in enumerate(inputs)]
    cases = Cases(Case("", x, each) for x, each in zip(inputs, stored, strict=True))
    expected = Explanation(resolve_contract("mxfp8"))
    result = match(cases, [expected], most_turns=1)
    assert result.exact == ()
    assert result.nearest
    assert result.nearest.agreement == result.nearest.of(cases).agreement
    assert match(Cases(cases[::2]), [expected], most_turns=1).exact


def test_errors_are_told_by_input() -> None:
    def whole_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.shape[1] % 32 or x.shape[0] == 128:
            raise ValueError(f"{tuple(x.shape)} is refused")
        return planted.mx(x, rule="up")

    inputs = [Input("right", X.float()), Input("ragged", torch.ones(128, 40))]
    report = verify_function(whole_blocks, "mxfp8", inputs=inputs)
    assert report.status == "equal"
    assert report.findings[0].errors == {"ragged": "ValueError: (128, 40) is refused"}
    inputs.append(Input("whole", torch.ones(128, 128)))
    assert verify_function(whole_blocks, "mxfp8", inputs=inputs).status == "departs"
    assert verify_function(whole_blocks, "mxfp8", inputs=inputs[1:]).exit_status == 2


# Checkpoints.


def checkpoint(path: Path, **tensors: torch.Tensor) -> Path:
    state = {name.replace("__", "."): tensor.clone() for name, tensor in tensors.items()}
    safetensors.torch.save_file(state, path)
    return path


def test_tensors_that_cannot_be_compared(tmp_path: Path) -> None:
    data, scales = planted.mx(X)
    quantized = checkpoint(
        tmp_path / "q",
        a__weight=data,
        a__weight_scale=scales,
        b__weight=data,
        b__weight_scale=scales,
        c__weight=data,
        c__weight_scale=scales,
    )
    source = checkpoint(tmp_path / "s", a__weight=X, c__weight=X[:3])
    report = verify_checkpoint(quantized, source)
    statuses = [finding.status for finding in report.findings]
    assert statuses == ["equal", "not compared", "not compared"]
    assert "no 'b.weight'" in report.findings[1].note
    # The report has a group for each reason.
    assert len(report.groups()) == 3
    assert report.exit_status == 2
    assert verify_checkpoint(source, source).exit_status == 2


def test_a_part_of_a_large_tensor_has_the_bytes_of_the_whole() -> None:
    x = outliers(384, 640, seed=7)
    for named in CONTRACTS:
        if "(" in named.name or takes_scale(named.steps):
            continue
        stored = of_parts(Interpretation(named.contract, named.usage, x, seed=1).parts)
        compared = compare(Explanation(named), Case("", x, stored, seed=1, in_window=True))
        assert compared is not None, named.name
        assert compared.agreement.is_exact or named.steps.random is not None, named.name
        assert compared.agreement.elements < x.numel(), named.name


@pytest.mark.parametrize(
    "turn",
    [
        "scale-240",
        "scales-swizzled",
        pytest.param("truncated", marks=pytest.mark.slow),
        pytest.param("block-unrounded", marks=pytest.mark.slow),
    ],
)
def test_large_tensors_are_searched_in_a_part(turn: str, tmp_path: Path) -> None:
    (each,) = (each for each in planted.PLANTED if each.turn == turn)
    x = outliers(384, 640, seed=7) * 1.05
    data, scales, *amax = each.function(x)
    tensors = {"a__weight": data, "a__weight_scale": scales}
    if amax:
        level = planted.divide(2688.0, amax[0]).view(1)
        tensors = {"a__weight_packed": data, "a__weight_scale": scales}
        tensors["a__weight_global_scale"] = level
    quantized = checkpoint(tmp_path / "q", **tensors)
    source = checkpoint(tmp_path / "s", a__weight=x)
    (finding,) = verify_checkpoint(quantized, source, contract=each.recipe, role="input").findings
    says = {entry.name: entry.says for entry in TURNS}
    assert (says[turn],) in finding.causes
    if finding.agreement is not None:
        assert finding.agreement.elements == x.numel()


def test_a_part_does_not_stand_for_a_whole_with_another_byte(tmp_path: Path) -> None:
    x = outliers(384, 640, seed=7)
    data, scales = planted.mx(x, rule="up")
    part = window_of(Case("", x, Stored.of(data, scales)), resolve_contract("mxfp8").steps)
    assert part is not None
    assert part[0].stop < 384
    data.view(torch.uint8)[383, 5] ^= 1
    quantized = checkpoint(tmp_path / "q", a__weight=data, a__weight_scale=scales)
    source = checkpoint(tmp_path / "s", a__weight=x)
    (finding,) = verify_checkpoint(quantized, source).findings
    assert (finding.status, finding.causes) == ("departs", ())


def test_tensors_that_were_made_in_different_ways(tmp_path: Path) -> None:
    def twice(scaled: torch.Tensor) -> torch.Tensor:
        return planted.cast(planted.cast(scaled, planted.E5M2).float())

    x = SMALL.float()
    tensors: dict[str, torch.Tensor] = {}
    made = {
        "a": planted.mx(x),
        "b": planted.mx(x, rule="up", elements=twice),
        "c": planted.mx(x, rule="up", elements=planted.towards_zero),
    }
    for name, (data, scales) in made.items():
        tensors |= {f"{name}__weight": data, f"{name}__weight_scale": scales}
    quantized = checkpoint(tmp_path / "q", **tensors)
    source = checkpoint(tmp_path / "s", **{f"{name}__weight": x for name in made})
    report = verify_checkpoint(quantized, source, contract="mxfp8", role="input")
    says = {turn.name: turn.says for turn in TURNS}
    floor = "bytes are those of mxfp8(scale_rounding=floor), weight, rowwise"
    causes = {finding.name: finding.causes for finding in report.findings}
    assert causes["a.weight"] == ((floor,),)
    assert causes["b.weight"] == ((says["via-e5m2"],),)
    assert causes["c.weight"] == ((says["truncated"],),)
    assert all(len(group) == 1 for group in report.groups().values())


def test_what_explains_all_tensors_is_kept(tmp_path: Path) -> None:
    """Ties alone do not tell truncation from ties to zero; every second tensor has other values."""
    x = torch.full((32, 64), 19.0)
    x[:, ::32] = 448.0
    other = x.clone()
    other[:, 1] = 19.5
    sources = {f"{place}__weight": (x, other)[place % 2] for place in range(5)}
    tensors: dict[str, torch.Tensor] = {}
    for name, source in sources.items():
        data, scales = planted.mx(source, rule="up", elements=planted.towards_zero)
        tensors |= {name: data, f"{name}_scale": scales}
    quantized = checkpoint(tmp_path / "q", **tensors)
    source = checkpoint(tmp_path / "s", **sources)
    report = verify_checkpoint(quantized, source, contract="mxfp8", role="input")
    expected = (("elements are truncated, not rounded",),)
    assert [finding.causes for finding in report.findings] == [expected] * 5


def test_a_scale_from_outside_comes_last(tmp_path: Path) -> None:
    scale = torch.tensor(3.0)
    data, inverse = planted.cast(SMALL.float() * scale), (1 / scale).view(1)
    quantized = checkpoint(tmp_path / "q", a__weight=data, a__weight_scale=inverse)
    source = checkpoint(tmp_path / "s", a__weight=SMALL)
    (finding,) = verify_checkpoint(quantized, source).findings
    assert finding.contract.startswith("delayed")
    assert finding.status == "equal"


def test_one_amax_of_several_tensors_is_recognized(tmp_path: Path) -> None:
    def fused(amax: torch.Tensor) -> torch.Tensor:
        return planted.divide(2688.0, amax * 1.5)

    data, scales, amax = planted.nvfp4(SMALL, level=fused)
    quantized = checkpoint(
        tmp_path / "q",
        a__weight_packed=data,
        a__weight_scale=scales,
        a__weight_global_scale=fused(amax).view(1),
    )
    source = checkpoint(tmp_path / "s", a__weight=SMALL)
    (finding,) = verify_checkpoint(quantized, source).findings
    assert len(finding.causes) == 1
    assert finding.causes[0][0].startswith("the global scale is that of another amax")


# ModelOpt's files, built by hand from the oracle's bytes.


def of_modelopt(folder: Path, recipe: str) -> list[list[float]]:
    """Writes a folder as ModelOpt does, where an amax of a second level is stored over 448 * 6, and
    a source beside it; gives the values of the weight."""
    contract = ottava.get_recipe(recipe).quantizer("input").contract
    stored = quantize(contract, "rowwise", SMALL.tolist(), dtype="bfloat16")
    data = torch.tensor([list(row) for row in stored.data], dtype=torch.uint8)
    if stored.amax is None:
        tensors = {"a.weight": data.view(E4M3), "a.weight_scale": torch.tensor(stored.scales[0][0])}
    else:
        codes = torch.tensor(stored.scales, dtype=torch.uint8)
        level = torch.tensor(quotient(stored.amax[0][0], 448.0 * 6))
        tensors = {"a.weight": data, "a.weight_scale": codes.view(E4M3), "a.weight_scale_2": level}
    (folder / "q").mkdir()
    safetensors.torch.save_file(tensors, folder / "q" / "model.safetensors")
    config = {"quantization": {"quant_algo": "FP8" if stored.amax is None else "NVFP4"}}
    (folder / "q" / "hf_quant_config.json").write_text(json.dumps(config))
    checkpoint(folder / "s", a__weight=SMALL)
    return decode(contract, "rowwise", stored)


@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_files_of_modelopt(recipe: str, tmp_path: Path) -> None:
    values = of_modelopt(tmp_path, recipe)
    (finding,) = verify_checkpoint(tmp_path / "q", tmp_path / "s").findings
    assert finding.status == "equal"
    assert finding.contract.startswith(f"{recipe}, ")
    assert "ModelOpt" in finding.note
    (tensor,) = quantized_tensors(tmp_path / "q")
    assert_same(tensor.decode(), torch.tensor(values))
    assert verify_checkpoints(tmp_path / "q", tmp_path / "q").status == "equal"


def test_a_wrong_scale_of_modelopt_departs(tmp_path: Path) -> None:
    """The global scale of compressed-tensors is the inverse of ModelOpt's."""
    of_modelopt(tmp_path, "nvfp4")
    file = tmp_path / "q" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["a.weight_scale_2"] = planted.divide(2688.0, SMALL.float().abs().max())
    safetensors.torch.save_file(tensors, file)
    report = verify_checkpoint(tmp_path / "q", tmp_path / "s", contract="nvfp4", role="input")
    (finding,) = report.findings
    assert finding.status == "departs"
    assert finding.agreement is not None
    assert finding.agreement.equal_elements == finding.agreement.elements
    assert (finding.agreement.levels, finding.agreement.equal_levels) == (1, 0)


def test_two_checkpoints(tmp_path: Path) -> None:
    trainer = {"a.weight": MXFP8Quantizer(E4M3, columnwise=False)(X)}
    save_file(trainer, tmp_path / "trainer")
    data, scales = planted.mx(X.float(), rule="up")
    server = checkpoint(tmp_path / "server", a__weight=data, a__weight_scale=scales)
    report = verify_checkpoints(tmp_path / "trainer", server)
    assert report.status == "equal"
    scales[3, 2] += 1
    other = checkpoint(tmp_path / "other", a__weight=data, a__weight_scale=scales)
    (finding,) = verify(tmp_path / "trainer", other).findings
    assert finding.status == "departs"
    assert finding.agreement is not None
    assert finding.agreement.scales - finding.agreement.equal_scales == 1
    assert finding.agreement.equal_elements == finding.agreement.elements
    assert finding.error is not None
    assert finding.error > 0
    missing = checkpoint(tmp_path / "missing", b__weight=data, b__weight_scale=scales)
    assert verify(other, missing).exit_status == 2
    more = {"b__weight": data, "b__weight_scale": scales}
    both = checkpoint(tmp_path / "both", a__weight=data, a__weight_scale=scales, **more)
    for pair in ((other, both), (both, other)):
        equal, lost = verify(*pair).findings
        assert (equal.status, lost.status) == ("equal", "not compared")
        assert lost.note == f"{other} has no such quantized tensor"
    # NaN is equal to NaN.
    data.view(torch.uint8)[0, 0] = 0x7F
    broken = checkpoint(tmp_path / "broken", a__weight=data, a__weight_scale=scales)
    assert verify(broken, broken).exit_status == 0


def test_equal_bytes_that_mean_something_else_depart(tmp_path: Path) -> None:
    """Another format of elements, and another second level."""
    data, scales = planted.fp8(X.float())
    packed, block_scales, amax = planted.nvfp4(X.float())
    level = amax.view(1) / 2688
    pairs = [
        [{"weight": data.view(dtype), "weight_scale": scales} for dtype in (E4M3, planted.E5M2)],
        [
            {"weight": packed, "weight_scale": block_scales, "weight_scale_2": level * factor}
            for factor in (1, 2)
        ],
    ]
    for pair in pairs:
        paths = []
        for number, tensors in enumerate(pair):
            named = {f"a__{name}": tensor for name, tensor in tensors.items()}
            paths.append(checkpoint(tmp_path / str(number), **named))
        (found,) = verify(*paths).findings
        assert found.status == "departs"
        assert found.error
    assert found.agreement is not None
    assert not found.agreement.is_exact


def test_a_trainer_with_both_usages_and_a_server_with_ragged_tiles_are_equal(
    tmp_path: Path,
) -> None:
    x = torch.randn(200, 300) * torch.exp(torch.arange(200) / 20)[:, None]
    q = ottava.get_recipe("blockwise").quantizer("weight").quantize(x)
    trainer = tmp_path / "trainer.safetensors"
    save_file({"a.weight": q}, trainer)
    stored = stored_tensors(q, "rowwise")
    data, scales = stored["data"].view(E4M3), stored["scales"]
    server = checkpoint(tmp_path / "server", a__weight=data, a__weight_scale_inv=scales)
    report = verify(trainer, server)
    assert report.status == "equal"
    assert "equal." in "".join(sentences(report))


def test_scales_in_tiles_are_decoded_in_rows(tmp_path: Path) -> None:
    data, scales, amax = planted.nvfp4(X.float())
    tiles = torch.nn.functional.pad(scales.view(torch.uint8), (0, -scales.shape[1] % 4, 0, 64))
    tiles = tiles.view(1, 4, 32, -1, 4).permute(0, 3, 2, 1, 4).reshape(tiles.shape).view(E4M3)
    level = {"a__weight_scale_2": amax.view(1) / 2688}
    rows = checkpoint(tmp_path / "rows", a__weight=data, a__weight_scale=scales, **level)
    tiled = checkpoint(tmp_path / "tiled", a__weight=data, a__weight_scale=tiles, **level)
    values = [quantized_tensors(path)[0].decode() for path in (rows, tiled)]
    assert_same(values[0], values[1])


def test_scales_in_more_rows_than_the_tensor_has_are_decoded(tmp_path: Path) -> None:
    data, scales = planted.mx(torch.randn(200, 64))
    more = torch.nn.functional.pad(scales.view(torch.uint8), (0, 0, 0, 56)).view(scales.dtype)
    exact = checkpoint(tmp_path / "exact", a__weight=data, a__weight_scale=scales)
    padded = checkpoint(tmp_path / "padded", a__weight=data, a__weight_scale=more)
    values = [quantized_tensors(path)[0].decode() for path in (exact, padded)]
    assert_same(values[0], values[1])
    (found,) = verify(exact, padded).findings
    assert (found.status, found.error) == ("departs", 0.0)


# The command.


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_kernels", raising=False)

    def command(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["verify", *arguments])
        return done.exit_code, done.output

    return command


def test_the_command_writes_reports(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    data, scales = planted.mx(X)
    checkpoint(tmp_path / "q.safetensors", a__weight=data, a__weight_scale=scales)
    checkpoint(tmp_path / "s.safetensors", a__weight=X)
    outputs = ["--json", "report.json", "--html", "report.html"]
    source = ["--source", "s.safetensors"]
    code, output = run("q.safetensors", *source, *outputs)
    assert code == 0, output
    assert json.loads((tmp_path / "report.json").read_text())["status"] == "equal"
    code, output = run("q.safetensors", *source, "--contract", "mxfp8", *outputs)
    assert code == 1, output
    assert "mxfp8(scale_rounding=floor)" in output
    value = json.loads((tmp_path / "report.json").read_text())
    assert value["findings"][0]["causes"] == [
        ["bytes are those of mxfp8(scale_rounding=floor), weight, rowwise"]
    ]
    (tmp_path / "<b>.safetensors").write_bytes((tmp_path / "q.safetensors").read_bytes())
    run("<b>.safetensors", *source, "--contract", "mxfp8", *outputs)
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "mxfp8(scale_rounding=floor)" in page
    assert not {"http:", "https:"} & set(re.findall(r"https?:", page))
    assert run("q.safetensors", "q.safetensors")[0] == 0
    force = ("--json", "s.safetensors", "--force")
    assert run("q.safetensors", "--source", "s.safetensors", *force)[0] == 2
    # A file of somebody else.
    for option in ("json", "html"):
        (tmp_path / f"notes.{option}").write_text("[]")
        pair = ("q.safetensors", "q.safetensors", f"--{option}", f"notes.{option}")
        assert [run(*pair)[0], run(*pair, "--force")[0]] == [2, 0]


def test_the_command_takes_functions_and_contracts(
    run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    printed = CliRunner().invoke(app, ["contract", "mxfp8", "--option", "scale_rounding=floor"])
    citation = FLOOR.contract.citation("mxfp8")
    texts = {"one.json": FLOOR.contract.to_json(), "printed.json": printed.output}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for contract in (*texts, citation):
        code, output = run("my_kernels:FLOOR", "--contract", contract)
        assert code == 0, output
        assert "all bytes are those of" in output
        assert FLOOR.contract.hash in output
    # Of a role and a usage that are not those by default.
    (tmp_path / "roles.json").write_text(CliRunner().invoke(app, ["contract", "nvfp4"]).output)
    for role in ("input", "weight"):
        quantizer = ottava.get_recipe("nvfp4").quantizer(role)
        for contract in ("roles.json", quantizer.contract.citation("nvfp4")):
            options = {"role": role, "usage": "columnwise", "inputs": [Input("x", X.float())]}
            assert_contract(quantizer.with_usage(False, True), contract, **options)
    code, output = run("my_kernels:FLOOR", "--contract", "mxfp8")
    assert code == 1
    assert "all bytes are explained: scales agree with `floor`" in output
    assert "The first that depart" in output


@pytest.mark.parametrize(
    ("function", "contract", "options"),
    [
        ("FLOOR", "mxfp8", ["--option", "scale_rounding=floor"]),
        ("COLUMNS", FLOOR.contract.citation("mxfp8"), ["--usage", "columnwise"]),
        ("OF_ARRAYS", FLOOR.contract.citation("mxfp8"), ["--numpy"]),
        ("WEIGHT", "nvfp4", ["--role", "weight"]),
    ],
)
def test_the_command_passes_options_on(
    run: Callable[..., tuple[int, str]], function: str, contract: str, options: list[str]
) -> None:
    code, output = run(f"my_kernels:{function}", "--contract", contract, *options)
    assert code == 0, output
    assert f"my_kernels:{function}" in output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["my_kernels:mx"], "a function without contract"),
        (["nofile"], "which is no path"),
        (["my_kernels:mx", "--contract", "mxfp8", "--source", "my_kernels.py"], "with source"),
        (["my_kernels:mx", "--contract", "nofile.json"], "nofile.json is no contract"),
        (["my_kernels:mx", "--contract", "ottava:mxfp8/0123"], "of no installed recipe"),
        (["my_kernels:absent", "--contract", "mxfp8"], "cannot be had"),
        (["my_kernels:mx", "--contract", "nothing"], "nothing"),
        (["my_kernels:mx", "--contract", "mxfp8", "--usage", "both"], "rowwise or columnwise"),
        (["my_kernels.py"], "a checkpoint without source"),
        (["my_kernels.py", "--source", "my_kernels.py", "--option", "a=1"], "without a contract"),
        (["my_kernels.py", "my_kernels.py", "--contract", "mxfp8"], "two checkpoints"),
    ],
)
def test_the_command_refuses(
    run: Callable[..., tuple[int, str]], arguments: list[str], says: str
) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert says in output


def test_verify_refuses_arguments_that_do_not_go_together() -> None:
    with pytest.raises(UsageError):
        verify(planted.mx)
    with pytest.raises(OptionError, match="with other"):
        verify(planted.mx, "a", contract="mxfp8")
    with pytest.raises(OptionError):
        verify(planted.mx, contract=ottava.contract.NOTHING_STATED)


def test_assert_contract_says_what_departs() -> None:
    with pytest.raises(AssertionError, match=r"`floor`[^$]*contract 0x"):
        assert_contract(planted.mx, "mxfp8", inputs=[Input("x", X.float())])
    with pytest.raises(AssertionError, match=r"cannot be compared\. x: SystemExit"):
        assert_contract(sys.exit, "mxfp8", inputs=[Input("x", X)])
