"""``check_recipe`` and ``ottava check-recipe``: what is chosen, expected, refused and told."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ottava import GridQuantizer, Layout
from ottava.cli.main import app
from ottava.errors import DTypeError, OptionError, RecipeNotFoundError
from ottava.layout import Rotation
from ottava_testing import Report, Result, Subject, check_recipe, list_checks
from ottava_testing.compare import same
from tests.published import published
from tests.testing.defects import DEFECTS
from tests.testing.row_recipe import SPEC, Bare, RowQuantizer, Rows

BROKEN = next(d for d in DEFECTS if d.check == "clone-shares-nothing").recipe()
BOTH = ["copy", "clone-shares-nothing"]
PLUGIN = """
import dataclasses
from ottava import hookimpl
from tests.testing import row_recipe

@hookimpl
def ottava_recipes():
    return [
        row_recipe.SPEC,
        dataclasses.replace(row_recipe.SPEC, name="rows-broken", factory="rows_plugin:broken"),
    ]

def broken(fraction: float = 0.5):
    from tests.testing.test_runner import BROKEN
    return BROKEN
"""


@pytest.fixture(scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with published(tmp_path_factory.mktemp("package"), "rows-plugin", rows_plugin=PLUGIN):
        yield


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["check-recipe", *arguments], env={"COLUMNS": "300"})


# -- results --


def test_a_recipe_of_bare_storages_conforms_to_what_it_promises() -> None:
    spec = dataclasses.replace(SPEC, quantized_weights=False)
    report = check_recipe(Bare(), spec=spec, skip_slow=True)
    assert report.ok, str(report)
    left = [check for check in list_checks() if check.why_not(spec) and not check.slow]
    assert report.count("not applicable") == len(left) > 20
    assert report.count("passed") > 40
    assert set(report.left_out) == {check.name for check in list_checks() if check.slow}


def test_a_report_has_the_outcome_of_each_check() -> None:
    options: dict[str, Any] = {"spec": SPEC, "only": [*BOTH, "compile"], "skip_slow": True}
    report = check_recipe(BROKEN, **options)
    assert [(r.name, r.outcome) for r in report.results] == [
        ("copy", "passed"),
        ("clone-shares-nothing", "failed"),
    ]
    assert not report.ok
    assert report.failures == report.results[1:]
    head, failed, left_out = str(report).splitlines()
    assert head == "rows: does not conform (1 passed, 1 failed)"
    assert failed == f"  failed clone-shares-nothing: {report.failures[0].message}"
    assert left_out == "  left out: compile"
    expected = {"clone-shares-nothing": "by design", "copy": "no idea", "state-moves": "x"}
    options["only"] = list(expected)
    results = check_recipe(BROKEN, expected_failures=expected, **options).results
    assert [r.outcome for r in results] == ["expected", "failed", "failed"]
    assert re.match(r"by design \(the \w+Storage by the quantizer of .*shares", results[0].message)
    assert results[1].message == "it passes, and was expected to fail (no idea): remove that"
    assert results[2].message.startswith("it is expected to fail, and does not apply: the spec")
    report = Report("rows", (Result("copy", "expected", "by design", 0.0),))
    assert str(report) == "rows: conforms (1 expected)\n  expected copy: by design"


class BrokenHead(Rows):
    """Broken for layers of one name."""

    def make_quantizer(self, role: Any, **options: Any) -> Any:
        made: Any = super().make_quantizer(role)
        return RandomQuantizer() if role.name == "head" else made


class RandomQuantizer(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(x * (1 + 0.01 * torch.rand_like(x)))


def test_layers_are_checked_by_name_in_other_processes_too() -> None:
    only = ["deterministic-cast", "sharded-master-weights"]
    assert check_recipe(BrokenHead(), spec=SPEC, only=only).ok
    for layers in (["encoder.0", "head"], ["head"]):
        report = check_recipe(BrokenHead(), spec=SPEC, only=only, layers=layers)
        assert [r.outcome for r in report.results] == ["failed", "failed"]
        assert all(r.message.startswith("layer 'head': ") for r in report.failures), str(report)


class RandomInput(Rows):
    """One layout says that it rounds at random; the other quantizers have no layout."""

    def make_quantizer(self, role: Any, **options: Any) -> Any:
        if role.tensor_type == "input":
            return GridQuantizer(Layout(torch.int8, (1, 32), stochastic=True))
        return super().make_quantizer(role)


class RotatedInput(RandomInput):
    """Where a scale is rounded down, the element of the amax saturates."""

    def make_quantizer(self, role: Any, **options: Any) -> Any:
        rotation = Rotation(32, 0x2D5A96F1, "both")
        options = {"columnwise": "transposed", "stochastic": True, "rotation": rotation}
        return GridQuantizer(Layout("E2M1", (1, 32), "UE5M3", **options))


def test_an_amax_that_saturates_is_no_rounding_that_is_off() -> None:
    report = check_recipe(RotatedInput(), only=["stochastic-mean"])
    assert report.ok, str(report)


def test_one_layout_that_rounds_at_random_is_enough() -> None:
    assert Subject(RandomInput()).spec.stochastic
    assert not Subject(Rows()).spec.stochastic


def test_a_check_leaves_the_random_state_and_the_threads_alone(one_thread: None) -> None:
    # Checks run on one thread, as the processes of tests do.
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    check_recipe(Rows(), spec=SPEC, only=["deterministic-cast", "linear"])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == 2


def test_a_recipe_without_a_spec_is_checked_by_the_defaults_of_every_flag() -> None:
    plain = {"summary": "", "factory": "a:b", "block_size": None, "formats": ()}
    spec = dataclasses.replace(Subject(Rows()).spec, **plain)  # type: ignore[arg-type]
    assert spec == dataclasses.replace(SPEC, **plain)  # type: ignore[arg-type]


def test_what_is_put_together_is_checked_by_what_its_layers_keep(tmp_path: Path) -> None:
    delayed = pytest.importorskip("ottava_delayed")
    pytest.importorskip("ottava_custom")
    file = tmp_path / "model.toml"
    file.write_text('default = "delayed"\n')
    assert Subject(str(file)).spec.stateful
    assert Subject(delayed.DelayedScaling()).spec.stateful
    names = ["flags", "equality", "copy", "state-moves", "state-dict"]
    report = check_recipe(file, only=iter(names))
    assert report.count("passed") == 5, str(report)


def test_bytes_are_compared() -> None:
    """A recipe that loses the sign of zero is no exact one; one that keeps NaN is."""
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([torch.nan, 1.0])
    assert not same(zero, -zero * torch.tensor([1.0, -1.0]))
    assert same(nan, nan.clone())
    assert not same(zero, zero.double())


# -- what is refused --

REFUSED: dict[str, tuple[type[Exception], Any, dict[str, Any]]] = {
    "the recipe is a int": (DTypeError, 3, {}),
    "the function made a int": (DTypeError, lambda: 3, {}),
    "the spec is a str": (DTypeError, Rows(), {"spec": "rows"}),
    "options for a recipe that is made": (OptionError, Rows(), {"options": {"x": 1}}),
    "no installed package provides recipe 'nowhere'": (RecipeNotFoundError, "nowhere", {}),
    "layers is 'head'": (DTypeError, Rows(), {"layers": "head"}),
    "layers is 3": (DTypeError, Rows(), {"layers": 3}),
    r"layers is \[\]": (OptionError, Rows(), {"layers": []}),
    r"layers is \['a', 'a'\]": (OptionError, Rows(), {"layers": ["a", "a"]}),
    "'x' is no promise.*relative_error": (OptionError, Rows(), {"promises": {"x": 1}}),
    "'factory' is no promise": (OptionError, Rows(), {"promises": {"factory": "a:b"}}),
    "relative_error .x. of recipe": (OptionError, Rows(), {"promises": {"relative_error": "x"}}),
    "only 'copi' is no check.*such as .*copy": (OptionError, Rows(), {"only": ["copi"]}),
    "the expected failure 'copi' is no check": (
        OptionError, Rows(), {"expected_failures": {"copi": "x"}}
    ),
    "of 'copy' has no reason": (OptionError, Rows(), {"expected_failures": {"copy": None}}),
    "expected_failures is a list": (DTypeError, Rows(), {"expected_failures": ["copy"]}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_checked_is_refused(message: str) -> None:
    error, recipe, options = REFUSED[message]
    with pytest.raises(error, match=message):
        check_recipe(recipe, **options)


class Local(Rows):
    """Has a function that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.function = lambda: 0


def test_a_recipe_that_another_process_cannot_have_is_told_so() -> None:
    in_a_script = type("Mine", (Rows,), {"__module__": "__main__"})
    sys.modules["__main__"].Mine = in_a_script  # type: ignore[attr-defined]
    messages = [
        check_recipe(recipe, spec=SPEC, only=["fsdp2"]).results[0].message
        for recipe in (Local(), in_a_script())
    ]
    del sys.modules["__main__"].Mine  # type: ignore[attr-defined]
    assert messages[0].startswith("the recipe cannot be sent to another process")
    assert messages[1].startswith("Mine stands in __main__ (a script, a notebook)")
    assert all("at the top of a module" in message for message in messages)


# -- the command --


@pytest.mark.usefixtures("_installed")
def test_the_command_tells_what_passed_and_what_was_left_out() -> None:
    done = run("rows", "--fast", "--check", "copy", "--check", "compile")
    assert done.exit_code == 0, done.output
    assert "rows: conforms (1 passed)" in done.output
    assert "left out: compile" in done.output


@pytest.mark.usefixtures("_installed")
def test_the_command_tells_what_failed() -> None:
    checks = [part for name in BOTH for part in ("--check", name)]
    done = run("rows-broken", *checks, "--json", "--option", "fraction=0.25")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["recipe"], told["ok"]) == (1, "rows-broken", False)
    assert (told["left_out"], [r["name"] for r in told["results"]]) == ([], BOTH)
    assert [r["outcome"] for r in told["results"]] == ["passed", "failed"]
    assert "shares memory" in told["results"][1]["message"]
    done = run("rows-broken", *checks, "--expect-failure", f"{BOTH[1]}=it is the point")
    assert done.exit_code == 0, done.output
    assert f"expected {BOTH[1]}: it is the point (" in done.output
    done = run("rows-broken", *checks, "--layer", "encoder.0", "--layer", "head")
    assert done.exit_code == 1, done.output
    assert f"failed {BOTH[1]}: layer 'encoder.0': " in done.output


@pytest.mark.usefixtures("_installed")
def test_the_command_takes_other_promises() -> None:
    """The recipe has scales of rows, and elements that are off by more than a millionth."""
    accuracy = ("rows", "--check", "accuracy", "--promise")
    assert run(*accuracy, "relative_error=1e-6").exit_code == 1
    assert run(*accuracy, "relative_error=0.1").exit_code == 0
    done = run("rows", "--check", "blocks", "--promise", "block_size=[1,8]")
    assert "block_size=(1, 8) in the spec is not so" in done.output


MISTAKES = {
    "no recipe is named": (),
    "no installed package provides recipe 'nowhere'": ("nowhere",),
    "--expect-failure 'copy'": ("rows", "--expect-failure", "copy"),
    "--expect-failure 'copy=y'": (
        "rows", "--expect-failure", "copy=x", "--expect-failure", "copy=y"
    ),
    "--option 'x'": ("rows", "--option", "x"),
    "--promise 'x'": ("rows", "--promise", "x"),
}  # fmt: skip


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_told_with_exit_code_2(message: str) -> None:
    done = run(*MISTAKES[message])
    assert done.exit_code == 2
    assert done.output.startswith(f"error: {message}")


def test_the_list_has_every_check() -> None:
    rows = json.loads(run("--list", "--json").output)["checks"]
    assert rows == [
        {
            "name": check.name,
            "group": check.group,
            "promise": check.promise,
            "needs": [needs.field for needs in check.needs],
            "slow": check.slow,
        }
        for check in list_checks()
    ]
    table = run("--list").output
    assert all(check.name in table for check in list_checks())
