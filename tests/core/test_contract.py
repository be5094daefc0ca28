"""Contracts: what they say of layouts, as JSON and back, their schema, hashes and differences."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

import ottava
from ottava import Contract, GridQuantizer, Layout
from ottava.contract import NOTHING_STATED, Direction, schema
from ottava.errors import OptionError
from ottava.gemm import stored_tensors
from ottava.kernels import fixed_seed
from ottava.layout import OWN_RULES, Rotation, register_scale_rule
from tests.comparing import assert_same
from tests.core.test_layout import layouts
from tests.samples import wide

SCHEMA = Path(ottava.__file__).parent / "contract" / "schema.json"
VALIDATOR = jsonschema.Draft202012Validator(schema())
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

MXFP4 = Layout("E2M1", (1, 32), E8M0, "even", columnwise="transposed")
NVFP4 = Layout("E2M1", (1, 16), E4M3, columnwise="transposed", second_level="tensor")
ROWS = Layout(E4M3, (1, None))
#: A layout, another one, and the fields of their contracts that differ.
DIFFERENCES: list[tuple[Layout, dict[str, Any], set[str]]] = [
    (MXFP4, {"rounding": "floor"}, {"*.scale.rule"}),
    (
        MXFP4,
        {"element": "INT4"},
        {
            "*.scale.maximum",
            *(f"*.element.{name}" for name in ("format", "maximum", "least", "nan", "zero")),
        },
    ),
    (MXFP4, {"block": (1, 64)}, {"*.amax.block"}),
    (MXFP4, {"shared": (32, 32)}, {"*.amax.area"}),
    (ROWS, {"rounding": "floor"}, {"*.scale.rule"}),
    (ROWS, {"epsilon": 0.5}, {"*.scale.epsilon"}),
    (ROWS, {"finite_as": "input"}, {"*.scale.infinite"}),
    (ROWS, {"columnwise": "transposed"}, {"columnwise.storage.held"}),
    (NVFP4, {"second_level": "row"}, {"*.second_level.over"}),
    (NVFP4, {"bound": 256.0}, {"*.second_level.bound"}),
    (NVFP4, {"second_level": "none"}, {"*.second_level", "*.scale.decoded"}),
    (NVFP4, {"candidates": (1.0, 1.5)}, {"*.candidates"}),
    (NVFP4, {"stochastic": True}, {"*.element.rounding", "*.random"}),
    (NVFP4, {"rotation": Rotation(16, 5, "columnwise")}, {"columnwise.transform"}),
    (
        replace(NVFP4, rotation=Rotation(16, 5, "both")),
        {"rotation": Rotation(32, 5, "both")},
        {"*.transform.size"},
    ),
    (
        replace(NVFP4, rotation=Rotation(16, 5, "both")),
        {"rotation": Rotation(16, 4, "both")},
        {"*.transform.signs"},
    ),
    (
        replace(NVFP4, candidates=(1.0, 1.5)),
        {"error": "MSE", "candidates": (1.0, 2.0)},
        {"*.candidates.error", "*.candidates.factors"},
    ),
]


def expanded(names: set[str]) -> set[str]:
    """The names of both directions in the place of a star."""
    usages = "rowwise", "columnwise"
    return {name.replace("*", usage) for name in names for usage in usages}


def test_each_field_of_a_layout_is_a_field_of_the_contract() -> None:
    for layout, changes, names in DIFFERENCES:
        changed_layout = replace(layout, **changes)
        assert changed_layout != layout
        assert changed_layout.text != layout.text
        one, other = map(Contract.of_layout, (layout, changed_layout))
        assert set(one.differences(other)) == expanded(names), changes
        assert one.hash != other.hash
    changed = {name for _, changes, _ in DIFFERENCES for name in changes}
    own = {field.name for field in fields(Layout) if field.init}
    # The format of scales decides about other fields.
    assert own - changed == {"scale"}


@given(layouts())
def test_json_has_all_of_a_contract_and_fits_the_schema(layout: Layout) -> None:
    contract = Contract.of_layout(layout)
    VALIDATOR.validate(contract.value())
    read = Contract.of_json(contract.to_json())
    assert read == contract
    assert hash(read) == hash(contract)
    assert read.hash == contract.hash
    assert read.differences(contract) == {}
    assert contract.is_stated


def values(layout: Layout, usage: Any) -> list[Any]:
    """What is stored for a usage, which another one may serve, and the values."""
    with fixed_seed():
        result = GridQuantizer(layout, **{"rowwise": usage == "rowwise"})(wide(5, 18))
    return [*stored_tensors(result, usage).values(), result.dequantize()]


@given(layouts(), layouts(), st.sampled_from([f.name for f in fields(Layout) if f.init]))
def test_equal_contracts_make_equal_bytes(one: Layout, other: Layout, name: str) -> None:
    """The step from a field to no difference in the contract is one to no difference in bytes."""
    try:
        changed = replace(one, **{name: getattr(other, name)})
    except OptionError:
        assume(False)
    assume(changed != one)
    same = Contract.of_layout(changed) == Contract.of_layout(one)
    event(f"{name}: {'equal' if same else 'different'}")
    if same:
        for usage in ("rowwise", "columnwise"):
            assert_same(values(changed, usage), values(one, usage))


#: What is cited, with the hash of this version.
HASHES = {
    "mxfp4": (MXFP4, "e4c73813552792a6"),
    "nvfp4": (NVFP4, "df6640ef9df7de78"),
    "rows": (ROWS, "5aa601812ed02f2f"),
}


def test_a_hash_does_not_change() -> None:
    """A paper may cite it. A change of the fields' meaning is a new version."""
    found = {name: Contract.of_layout(layout).hash for name, (layout, _) in HASHES.items()}
    assert found == {name: digest for name, (_, digest) in HASHES.items()}


def test_the_hash_is_that_of_the_json_without_spaces() -> None:
    contract = Contract.of_layout(NVFP4)
    document = json.loads(contract.to_json())
    line = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert contract.hash == hashlib.sha256(line.encode()).hexdigest()[:16]
    assert contract.citation("nvfp4") == f"ottava:nvfp4/{contract.hash}"


def test_the_schema_of_the_package_is_that_of_the_code() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    remedy = "write json.dumps(ottava.contract.schema(), indent=2) into the file"
    assert json.loads(SCHEMA.read_text()) == schema(), remedy


def changed(path: str, value: object) -> str:
    """The JSON of a contract with another value at a path; ``...`` leaves the field out."""
    document = Contract.of_layout(NVFP4).value()
    *names, last = path.split(".")
    place = document
    for name in names:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "no JSON"),
        ("[]", "a list.*a JSON object"),
        (changed("version", 2), "version 2.*version 1.*later Ottava"),
        (changed("version", ...), "version None"),
        (changed("rowwise.scale.format", "E5M3"), "rowwise.scale.format is 'E5M3'.*'UE5M3'"),
        (changed("rowwise.scale.epsilon", "0"), "rowwise.scale.epsilon is '0'.*float"),
        (changed("rowwise.element.bits", True), "element.bits is True.*int"),
        (changed("rowwise.storage.per_byte", True), "per_byte is True.*one of 1, 2"),
        (changed("rowwise.storage", ...), "contract.rowwise is .*the fields source"),
        (changed("rowwise.more", 1), "contract.rowwise is .*the fields"),
        (changed("columnwise.amax.block", [1]), "amax.block is .*a list of 2"),
        (changed("columnwise.amax.block", 1), "amax.block is 1.*a list"),
        (changed("columnwise.candidates", 1), "candidates is 1"),
        (changed("columnwise", "none"), "columnwise is 'none'.*'unstated', 'identity'"),
        (changed("rowwise.scale.rule", "most"), "rule is 'most'.*pattern"),
        (changed("rowwise.element.bits", 3), "bits is 3.*enum"),
        (changed("rowwise.element.nan", 9999), "nan is 9999.*maximum 255"),
        (changed("rowwise.element.maximum", math.nan), "maximum is nan.*exclusiveMinimum"),
        (changed("rowwise.scale.maximum", 0), "maximum is 0.0.*exclusiveMinimum"),
        (changed("rowwise.amax.block", [0, 32]), "block is 0.*minimum 1"),
    ],
)
def test_what_is_no_contract_is_refused(text: str, match: str) -> None:
    with pytest.raises(OptionError, match=f"(?s){match}"):
        Contract.of_json(text)


def test_a_whole_number_may_be_an_integer() -> None:
    contract = Contract.of_json(changed("rowwise.scale.maximum", 6))
    assert contract == Contract.of_layout(NVFP4)
    assert type(contract.rowwise.scale.maximum) is float  # type: ignore[union-attr]


def test_steps_may_be_unstated() -> None:
    contract = Contract.of_layout(NVFP4)
    assert isinstance(contract.rowwise, Direction)
    partly = replace(contract, rowwise=replace(contract.rowwise, scale="unstated"))
    for unstated in (NOTHING_STATED, partly):
        VALIDATOR.validate(unstated.value())
        assert Contract.of_json(unstated.to_json()) == unstated
        assert not unstated.is_stated
    assert set(partly.differences(contract)) == {"rowwise.scale"}


def test_another_rule_leaves_what_is_unstated() -> None:
    contract = Contract.of_layout(ROWS)
    changed = contract.with_rule("given")
    assert changed.differences(contract).keys() == expanded({"*.scale.rule"})
    assert isinstance(contract.rowwise, Direction)
    partly = Contract(replace(contract.rowwise, scale="unstated"), "identity")
    assert partly.with_rule("given") == partly


def test_a_row_of_the_summed_dimension_has_one_second_level() -> None:
    contract = Contract.of_layout(replace(NVFP4, second_level="row"))
    directions = contract.value()["rowwise"], contract.value()["columnwise"]
    assert [each["second_level"]["over"] for each in directions] == [[1, None], [None, 1]]


def test_a_registered_rule_is_named_and_not_stated() -> None:
    register_scale_rule("contract-rule", lambda amax, layout: amax)
    try:
        contract = Contract.of_layout(replace(ROWS, rounding="contract-rule"))
    finally:
        del OWN_RULES["contract-rule"]
    assert contract.rowwise.scale.rule == "own:contract-rule"  # type: ignore[union-attr]
    assert not contract.is_stated


class Other(GridQuantizer):
    """A stranger's quantizer with bytes of its own."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        return super().quantize_impl(tensor * 2, dtype)


class Stated(Other):
    """One whose author states the contract."""

    @property
    def contract(self) -> Contract:
        return Contract.of_layout(MXFP4)


class Derived(Stated):
    """A subclass that computes bytes by another method again."""

    def kernel(self, rowwise: bool, columnwise: bool) -> Any:
        raise NotImplementedError


class Renamed(GridQuantizer):
    """A subclass that changes no bytes."""


def test_what_a_quantizer_cannot_say_is_unstated() -> None:
    expected = Contract.of_layout(ROWS)
    assert GridQuantizer(ROWS).contract == expected
    assert Renamed(ROWS).contract == expected
    assert Other(ROWS).contract == NOTHING_STATED
    assert Stated(ROWS).contract == Contract.of_layout(MXFP4)
    assert Derived(ROWS).contract == NOTHING_STATED


def test_a_contract_says_whose_amaxes_decide() -> None:
    quantizer = GridQuantizer(ROWS)
    alone = quantizer.contract
    quantizer.amax_reduction_group = "a group"
    differences = quantizer.contract.differences(alone)
    assert differences == {
        f"{usage}.amax.ranks": ("group", "this") for usage in ("rowwise", "columnwise")
    }


def test_a_contract_does_not_depend_on_the_usages() -> None:
    quantizer = GridQuantizer(ROWS, columnwise=False)
    assert quantizer.contract == GridQuantizer(ROWS, rowwise=False).contract
