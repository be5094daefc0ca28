"""Files carry the contracts of their quantized tensors, and a load under another one warns."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ottava import Contract, GridQuantizer, Layout
from ottava.checkpoint import (
    load_file,
    load_model,
    load_sharded,
    save_file,
    save_model,
    save_sharded,
)
from ottava.checkpoint.flatten import flatten_state_dict, unflatten_state_dict
from ottava.errors import CheckpointError

ROWS = Layout(torch.float8_e4m3fn, (1, None))
#: A difference that the bytes show nowhere, and what the warning says of it.
FLOOR = replace(ROWS, rounding="floor")
EPSILON = replace(ROWS, epsilon=0.5)


class Silent(GridQuantizer):
    """A quantizer that states nothing."""

    @property
    def contract(self) -> Contract:
        return Contract("unstated", "unstated")


def model(*layouts: Layout, kind: Any = GridQuantizer) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Module()
    for number, layout in enumerate(layouts):
        weight = kind(layout)(torch.randn(4, 32))
        net.register_parameter(f"weight{number}", torch.nn.Parameter(weight, requires_grad=False))
    return net


def description(path: Path) -> Any:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["ottava"])


def test_a_file_has_each_contract_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(model(ROWS, ROWS, FLOOR), path)
    contracts = [Contract.of_layout(layout) for layout in (ROWS, ROWS, FLOOR)]
    found = description(path)
    assert [entry["contract"] for entry in found["quantized"].values()] == [
        contract.hash for contract in contracts
    ]
    assert found["contracts"] == {contract.hash: contract.value() for contract in contracts}
    loaded: Any = load_file(path)
    assert [value.saved_contract for value in loaded.values()] == contracts


def test_the_contract_of_a_file_survives_a_file_of_what_was_loaded(tmp_path: Path) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    save_model(model(ROWS), first)
    save_file(load_file(first), second)
    assert description(second) == description(first)


def ways(tmp_path: Path) -> list[Any]:
    """Functions that save one model and load what was saved into another one."""

    def in_one_file(saved: torch.nn.Module, into: torch.nn.Module) -> None:
        save_model(saved, tmp_path / "model.safetensors")
        load_model(into, tmp_path / "model.safetensors")

    def in_shards(saved: torch.nn.Module, into: torch.nn.Module) -> None:
        save_sharded(saved.state_dict(), tmp_path / "shards", overwrite=True)
        load_sharded(into.state_dict(), tmp_path / "shards")

    return [in_one_file, in_shards]


def test_a_load_under_another_contract_names_the_field(tmp_path: Path) -> None:
    said = (
        r"'weight0', 'weight2'.*another contract.*rowwise\.scale\.epsilon is 0\.0 in the file and "
        r"0\.5 in the model; columnwise\.scale\.epsilon"
    )
    way, _ = ways(tmp_path)
    with pytest.warns(UserWarning, match=said) as caught:
        way(model(ROWS, ROWS, ROWS), model(EPSILON, ROWS, EPSILON))
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"scale\.rule is 'quotient' in the file and 'quotient-"):
        way(model(ROWS), model(FLOOR))


class Coarse(GridQuantizer):
    """A quantizer of the same layout that computes its scales in another way, and says so."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        return super().quantize_impl(tensor, dtype)

    @property
    def contract(self) -> Contract:
        return Contract.of_layout(EPSILON)


def test_shards_whose_layouts_are_equal_warn_of_what_quantizers_state(tmp_path: Path) -> None:
    for way in ways(tmp_path):
        with pytest.warns(UserWarning, match=r"'weight0'.*scale\.epsilon is 0\.0 in the file"):
            way(model(ROWS), model(ROWS, kind=Coarse))


def reduced() -> torch.nn.Module:
    """A model whose amaxes are reduced over ranks."""
    made: Any = model(ROWS)
    made.weight0._quantizer.amax_reduction_group = "a group"
    return made


class Given(GridQuantizer):
    """A quantizer whose scale comes from outside."""

    rule = "given"

    @property
    def contract(self) -> Contract:
        return Contract.of_layout(self.layout).with_rule(self.rule)


class Fitting(Given):
    """The same, whose scale may be lowered."""

    rule = "given-fitting"


def test_differences_that_no_file_is_warned_of(tmp_path: Path) -> None:
    """What is unstated, a reduction over ranks, and whether a scale from outside may be lowered."""
    silent = model(ROWS, kind=Silent)
    given, fitting = (model(ROWS, kind=kind) for kind in (Given, Fitting))
    pairs = [(model(ROWS), silent), (silent, model(ROWS)), (model(ROWS), reduced())]
    for saved, into in (*pairs, (given, fitting)):
        for way in ways(tmp_path):
            with warnings.catch_warnings(action="error"):
                way(saved, into)


DAMAGES = {
    "another hash": lambda table: {"0" * 16: next(iter(table.values()))},
    "no contract": lambda table: {name: {"version": 1} for name in table},
    "no table": lambda table: ["contract"],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_contract_is_refused(damage: str) -> None:
    tensors, texts = flatten_state_dict(model(ROWS).state_dict())
    body = json.loads(texts["ottava"])
    body["contracts"] = DAMAGES[damage](body["contracts"])
    with pytest.raises(CheckpointError, match="metadata of quantized tensors is damaged"):
        unflatten_state_dict(tensors, {"ottava": json.dumps(body)})


def test_a_contract_of_a_later_version_is_left_out() -> None:
    tensors, texts = flatten_state_dict(model(ROWS).state_dict())
    text = re.sub(r'"version": 1}}', '"version": 2}}', texts["ottava"])
    assert text != texts["ottava"]
    loaded: Any = unflatten_state_dict(tensors, {"ottava": text})
    assert loaded["weight0"].saved_contract is None
