"""``check_recipe`` and its report: what is chosen, expected, and told."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import broken_quantizers
import broken_tensors
import pytest
import row_recipe as rows
import torch
from acme_fp8.plugin import ottava_recipes
from acme_fp8.recipe import AcmeRows

from ottava.errors import DTypeError, OptionError, RecipeNotFoundError
from ottava_testing import CheckFailed, Subject, check_recipe, list_checks
from ottava_testing.compare import same


def broken() -> Any:
    return rows.Rows(broken_tensors.AliasedScaleQuantizer)  # type: ignore[attr-defined]


def test_a_recipe_of_bare_storages_conforms_to_what_it_promises() -> None:
    (spec,) = ottava_recipes()
    report = check_recipe(AcmeRows(), spec=spec, skip_slow=True)
    assert report.ok, str(report)
    assert report.recipe == "acme-rows"
    assert report.count("passed") > 40
    left = [check for check in list_checks() if check.why_not(spec)]
    assert report.count("not applicable") == len([check for check in left if not check.slow])
    assert "the spec says quantized_weights=False" in {check.why_not(spec) for check in left}


def test_the_report_names_what_failed() -> None:
    report = check_recipe(broken(), spec=rows.SPEC, only=["copy", "clone-shares-nothing"])
    assert not report.ok
    assert [r.name for r in report.failures] == ["clone-shares-nothing"]
    assert [r.outcome for r in report.results] == ["passed", "failed"]
    assert str(report).startswith(
        "rows: does not conform (1 passed, 1 failed)\n  failed clone-shares-nothing: "
    )


def test_slow_checks_are_left_out_and_named() -> None:
    report = check_recipe(rows.Rows(), spec=rows.SPEC, only=["copy", "compile"], skip_slow=True)
    assert [r.name for r in report.results] == ["copy"]
    assert report.left_out == ("compile",)


def test_an_expected_failure() -> None:
    expected = {"clone-shares-nothing": "by design", "copy": "no idea"}
    report = check_recipe(broken(), spec=rows.SPEC, only=list(expected), expected_failures=expected)
    outcomes = {r.name: (r.outcome, r.message) for r in report.results}
    assert outcomes["clone-shares-nothing"][0] == "expected"
    assert outcomes["clone-shares-nothing"][1].startswith("by design (")
    assert outcomes["copy"] == (
        "failed",
        "it passes, and was expected to fail (no idea): remove that",
    )


def test_an_expected_failure_of_what_does_not_apply_fails() -> None:
    report = check_recipe(
        rows.Rows(), spec=rows.SPEC, only=["state-moves"], expected_failures={"state-moves": "x"}
    )
    assert [r.outcome for r in report.results] == ["failed"]
    assert "does not apply" in report.results[0].message


@pytest.mark.parametrize("reason", ["", "  ", None])
def test_an_expected_failure_needs_a_reason(reason: Any) -> None:
    with pytest.raises(OptionError, match="'copy' has no reason"):
        check_recipe(rows.Rows(), expected_failures={"copy": reason})


@pytest.mark.parametrize("options", [{"only": ["copi"]}, {"expected_failures": {"copi": "x"}}])
def test_an_unknown_check_is_refused_with_the_nearest(options: Any) -> None:
    with pytest.raises(OptionError, match=r"'copi' is no check\. Expected: a name such as .*copy"):
        check_recipe(rows.Rows(), **options)


def test_expected_failures_are_a_mapping() -> None:
    with pytest.raises(DTypeError, match="expected_failures is a list"):
        check_recipe(rows.Rows(), expected_failures=["copy"])  # type: ignore[arg-type]


def test_what_is_no_recipe_is_refused() -> None:
    with pytest.raises(DTypeError, match="the recipe is a int"):
        check_recipe(3)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="the function made a int"):
        check_recipe(lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(OptionError, match="options for a recipe that is made already"):
        check_recipe(rows.Rows(), options={"x": 1})
    with pytest.raises(RecipeNotFoundError, match="no installed package provides recipe 'nowhere'"):
        check_recipe("nowhere")


def test_a_recipe_without_a_spec_has_the_defaults_of_every_flag() -> None:
    subject = Subject(rows.Rows())
    assert dataclasses.replace(subject.spec, summary="", factory="a:b") == dataclasses.replace(
        rows.SPEC, summary="", factory="a:b", block_size=None, formats=()
    )


def test_a_recipe_that_another_process_cannot_have_is_told_so() -> None:
    class Local(rows.Rows):
        pass

    (result,) = check_recipe(Local(), spec=rows.SPEC, only=["fsdp2"]).results
    assert result.outcome == "failed"
    assert "the recipe cannot be sent to another process" in result.message
    assert "top of a module" in result.message
    with pytest.raises(CheckFailed, match="cannot be sent"):
        Subject(Local()).source()


SCRIPT = """
import row_recipe as rows
from ottava_testing import check_recipe

class Mine(rows.Rows):
    pass

if __name__ == "__main__":
    (result,) = check_recipe(Mine(), spec=rows.SPEC, only=["fsdp2"]).results
    print(result.outcome, result.message)
"""


def test_classes_of_a_script_are_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("failed Mine stands in __main__ (a script, a notebook)"), printed
    assert "Define it in a module" in printed


class BrokenHead(rows.Rows):
    """Broken for layers of one name."""

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
        broken_here = role.name == "head"
        return broken_quantizers.RoundsAtRandom() if broken_here else super().make_quantizer(role)


def test_layers_are_checked_by_name() -> None:
    checks = ["deterministic-cast", "deterministic-training"]
    assert check_recipe(BrokenHead(), spec=rows.SPEC, only=checks).ok
    report = check_recipe(BrokenHead(), spec=rows.SPEC, only=checks, layers=["encoder.0", "head"])
    assert [r.outcome for r in report.results] == ["failed", "failed"]
    assert all(r.message.startswith("layer 'head': ") for r in report.failures), str(report)
    assert check_recipe(BrokenHead(), spec=rows.SPEC, only=checks, layers=["encoder.0"]).ok


def test_layers_have_the_name_in_other_processes() -> None:
    only = ["sharded-master-weights"]
    assert check_recipe(BrokenHead(), spec=rows.SPEC, only=only).ok
    report = check_recipe(BrokenHead(), spec=rows.SPEC, only=only, layers=["head"])
    assert str(report.failures[0].message).startswith("layer 'head': "), str(report)


def test_layers_that_are_no_names_are_refused() -> None:
    for wrong in ("head", [1], 3):
        with pytest.raises(DTypeError, match="layers is"):
            check_recipe(rows.Rows(), layers=wrong)  # type: ignore[arg-type]
    for wrong in ([], ["head", "head"]):
        with pytest.raises(OptionError, match="layers is"):
            check_recipe(rows.Rows(), layers=wrong)  # type: ignore[arg-type]


def test_a_check_leaves_the_random_state_and_the_threads_alone() -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    check_recipe(rows.Rows(), spec=rows.SPEC, only=["deterministic-cast", "linear"])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_names_are_unique_and_promises_are_lines() -> None:
    checks = list_checks()
    assert len({check.method for check in checks}) == len(checks)
    assert all(
        check.promise and "\n" not in check.promise and not check.promise.endswith(".")
        for check in checks
    )


def test_what_is_put_together_is_checked_by_what_its_layers_keep(tmp_path: Path) -> None:
    delayed = pytest.importorskip("ottava_delayed")
    pytest.importorskip("ottava_custom")
    file = tmp_path / "model.toml"
    file.write_text('default = "delayed"\n')
    assert Subject(str(file)).spec.stateful
    assert Subject(delayed.DelayedScaling()).spec.stateful
    report = check_recipe(file, only=["flags", "equality", "copy", "state-moves", "state-dict"])
    assert report.count("passed") == 5, str(report)


def test_bytes_are_compared() -> None:
    """A recipe that loses the sign of zero is no exact one, one that keeps NaN is."""
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([torch.nan, 1.0])
    assert not same(zero, -zero * torch.tensor([1.0, -1.0]))
    assert same(nan, nan.clone())
    assert not same(zero, zero.double())
