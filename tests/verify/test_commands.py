"""The commands ``ottava contract`` and ``ottava vectors``."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

import ottava
from ottava.cli.main import app
from ottava.contract import Contract, schema
from ottava_verify import HASHES, make_vectors
from tests.pages import DOCS


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("name", [spec.name for spec in ottava.list_recipes()])
def test_contract_prints_each_role_and_its_citation(name: str) -> None:
    printed = json.loads(run("contract", name))
    assert list(printed) == ["input", "weight", "grad_output"]
    for role, entry in printed.items():
        jsonschema.validate(entry["contract"], schema())
        contract = Contract.of_value(entry["contract"])
        assert contract == ottava.get_recipe(name).quantizer(role).contract
        assert contract.is_stated
        assert entry["citation"] == f"ottava:{name}/{contract.hash}"


def test_contract_takes_roles_and_options() -> None:
    options = ["--option", "scale_rounding=floor", "--role", "weight", "--one-line"]
    output = run("contract", "mxfp8", *options)
    assert output.count("\n") == 1
    printed = json.loads(output)
    assert list(printed) == ["weight"]
    assert printed["weight"]["contract"]["rowwise"]["scale"]["rule"] == "floor"


def test_contract_prints_the_schema() -> None:
    assert json.loads(run("contract", "--schema")) == schema()
    (line,) = run("contract", "--schema", "--one-line").splitlines()
    assert json.loads(line) == schema()


def test_vectors_writes_the_file_and_prints_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "mxfp8.safetensors"
    assert HASHES["mxfp8"] in run("vectors", "mxfp8", "--out", str(path))
    expected = make_vectors(ottava.get_recipe("mxfp8", scale_rounding="floor"), ["weight"])
    options = ["--role", "weight", "--option", "scale_rounding=floor"]
    run("vectors", "mxfp8", "--out", str(path), *options)
    assert path.read_bytes() == expected.to_bytes()


def test_vectors_replaces_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("precious")
    arguments = ["vectors", "mxfp8", "--out", str(path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "--force" in done.output
    assert path.read_text() == "precious"
    run(*arguments, "--force")
    assert HASHES["mxfp8"] in run(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("contract", ["no recipe", "--schema", "ottava recipes"]),
        ("contract nonesuch", ["nonesuch"]),
        ("contract mxfp8 --role bias", ["'bias'", "input, weight, grad_output"]),
        ("contract mxfp8 --option floor", ["--option 'floor'", "key=value"]),
        ("contract mxfp8 --schema", ["--schema alone"]),
        ("contract --schema --markdown", ["--schema alone"]),
        ("vectors nonesuch --out FOLDER/a", ["nonesuch"]),
        ("vectors mxfp8 --out FOLDER", ["cannot be written", "a folder"]),
        ("vectors mxfp8 --out FOLDER/none/a", ["cannot be written"]),
        ("vectors mxfp8 --role bias --out FOLDER/a", ["'bias'"]),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: str, words: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, arguments.replace("FOLDER", str(tmp_path)).split())
    assert done.exit_code == 2
    assert done.output.startswith("error: ")
    for word in words:
        assert word in done.output
    assert not list(tmp_path.iterdir())


def test_the_page_shows_what_the_commands_print() -> None:
    page = (DOCS / "contracts.md").read_text()
    floor = ottava.get_recipe("mxfp8", scale_rounding="floor").quantizer("weight").contract
    assert f'"{floor.citation("mxfp8")}"' in page
    assert f"SHA-256: {HASHES['mxfp8']}" in page
