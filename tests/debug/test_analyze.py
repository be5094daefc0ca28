"""``ottava analyze`` of weights: the numbers, the suggestion, and what is left out or refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save_file as save_plain

import ottava
import ottava_debug
from benchmarks.installed import recipes
from ottava.checkpoint import save_file
from ottava.errors import CheckpointError, DTypeError, OptionError, RecipeNotFoundError, UsageError
from ottava.recipes import Recipe
from ottava_custom import CustomRecipe
from ottava_debug import Analysis
from ottava_debug.analysis.measuring import Series
from ottava_debug.analysis.page import page
from ottava_debug.analysis.report import Noise, most_underflow
from ottava_debug.analysis.terminal import sentences
from tests.debug.analyses import command, decoded, demo_checkpoint, noise_of, tensor_of
from tests.debug.by_hand import exponents, losses
from tests.integrations.files import sources_of


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_checkpoint(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def report(demo: Path) -> Analysis:
    return ottava_debug.analyze(demo)


# -- the numbers --


def test_the_numbers_are_those_of_a_direct_computation(demo: Path, report: Analysis) -> None:
    told = report.to_json()
    state = load_file(demo)
    layers = [f"blocks.{n}.{part}" for n in range(4) for part in ("qkv", "proj", "up", "down")]
    assert {tensor["layer"] for tensor in told["tensors"]} == {*layers}
    assert {skip["name"] for skip in told["skipped"]} == {
        name for name in [*state, "head.weight"] if name.removesuffix(".weight") not in layers
    }
    # Without a file, the recipe for recipe files does what current does.
    assert told["recipes"] == [name for name in recipes() if name != "custom"]
    words = "without a file it makes of all tensors what current makes"
    assert told["unavailable"] == [{"name": "custom", "reason": words}]
    for tensor in told["tensors"]:
        weight = state[f"{tensor['layer']}.weight"]
        assert (tensor["role"], tensor["dtype"]) == ("weight", "float32")
        assert tensor["shape"] == [*weight.shape]
        assert tensor["amax"] == weight.abs().max().item()
        assert tensor["exponents"] == {str(e): n for e, n in exponents(weight).items()}
        assert tensor["noise"].keys() == {*told["recipes"]}
        for recipe, noise in tensor["noise"].items():
            for side, columnwise in (("rowwise", False), ("columnwise", True)):
                # Without an entry, the direction has the data of the other one.
                found = noise[side] or noise["rowwise"]
                expected = losses(weight, decoded(recipe, "weight", weight, columnwise=columnwise))
                assert found["sqnr"] == pytest.approx(expected["sqnr"], rel=1e-9)
                # A block far below the tensor's amax has a subnormal scale in E4M3, which may be
                # too small for it.
                assert found["saturation"] <= (0.1 if recipe == "nvfp4" else 0)


def test_layers_that_need_high_precision_are_suggested(
    demo: Path, report: Analysis, tmp_path: Path
) -> None:
    kept = ["blocks.1.up", "blocks.2.down"]
    assert [*report.complaints("current")] == kept
    assert report.complaints("mxfp8") == {}
    assert report.best_recipe() not in ("current", "delayed")
    ranked = [tensor.noise[recipe].quality for tensor, recipe in report.worst(16)]
    assert ranked == sorted(ranked)
    summary = next(each for each in report.summaries() if each.recipe == "current")
    assert summary.kept == tuple(kept)
    assert summary.lowest_sqnr == min(t.noise["current"].sqnr for t in report.tensors)
    recipe = ottava_debug.write_suggestion(report, tmp_path / "kept.yaml", "current")
    assert recipe == CustomRecipe.from_file(tmp_path / "kept.yaml")
    for layer in report.layers:
        rows = recipe.explain(ottava.QuantizerRole("linear", "weight", layer)).rowwise
        assert rows == ("identity" if layer in kept else "current E4M3")
    assert "Recipe custom left out: without a file" in "".join(sentences(report, 5))
    options = ("--recipe", "current", "--recipe-file", tmp_path / "same.yaml", "--rows", 3)
    done = command(demo, *options)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "same.yaml").read_text() == (tmp_path / "kept.yaml").read_text()
    assert "13 more tensors are not shown" in done.output
    assert "Suggested: current, with 2 of 16 layers in high precision." in done.output


def test_the_limits_of_noise_and_of_underflow_belong_together(demo: Path) -> None:
    x = torch.randn(1_000_000)
    # A grid with the noise of 20 dB.
    step = math.sqrt(12 * 10 ** (-20 / 10))
    found = ottava_debug.compare(x, (x / step).round() * step)
    assert found.sqnr == pytest.approx(20, abs=0.1)
    assert found.underflow == pytest.approx(most_underflow(20), abs=0.1)
    strict = ottava_debug.analyze(demo, recipes=["current"], threshold=40.0)
    assert len(strict.complaints("current")) == 16


# -- the report, of invented numbers --


def test_all_reasons_of_a_layer_are_told() -> None:
    tensors = (
        tensor_of("a", "weight", current=noise_of(10.0, 20.0)),
        tensor_of("a", "input", current=noise_of(30.0)),
        tensor_of("a", "grad_output", current=noise_of(5.0)),
        tensor_of("b", "grad_output", current=noise_of(30.0, 50.0)),
    )
    report = Analysis("x", ("current",), tensors)
    of_a = [
        "weight: SQNR 10.0 dB < 20 dB, underflow 20.0 % > 13.8 %",
        "grad_output: SQNR 5.0 dB < 20 dB",
    ]
    of_b = ["grad_output: underflow 50.0 % > 13.8 %"]
    assert report.complaints("current") == {"a": of_a, "b": of_b}
    keeps = [(keep.layer, keep.reason) for keep in report.keeps("current")]
    assert keeps == [("a", "; ".join(of_a)), ("b", of_b[0])]
    with pytest.raises(OptionError, match="not in the report"):
        report.complaints("mxfp8")
    # What one direction does not tell is not known of both.
    known = noise_of(30.0).rowwise
    assert Noise(known, replace(known, saturation=None)).saturation is None


GOOD, BETTER, BAD = noise_of(25.0), noise_of(30.0), noise_of(5.0)
EXACT = noise_of(math.inf)
NOT_FINITE = noise_of(30.0, not_finite=1)
KEEPS_MORE = "its worst tensor keeps more, 30.0 dB"
# Noises of tensors by recipe, the best recipe, and the reason among equal ones.
BEST = {
    "fewest layers kept": ([{"x": BETTER, "y": BAD}], "x", ""),
    "fewest elements kept": (
        [{"x": BAD, "y": BETTER}, {"x": BETTER, "y": BAD}],
        "x",
        "",
    ),
    "better worst tensor": (
        [{"x": GOOD, "y": BETTER}, {"x": EXACT, "y": BETTER}],
        "y",
        f"x would leave as little: y is suggested because {KEEPS_MORE} (x 25.0 dB).",
    ),
    "not finite in high precision": (
        [{"x": GOOD, "y": BETTER}, {"x": NOT_FINITE, "y": NOT_FINITE}],
        "y",
        f"x would leave as little: y is suggested because {KEEPS_MORE} (x 25.0 dB).",
    ),
    "both": (
        [{"x": GOOD, "y": BETTER, "z": BETTER}],
        "y",
        f"x, z would leave as little: y is suggested because {KEEPS_MORE} (x 25.0 dB), and it "
        "comes before z, whose worst tensor keeps as much.",
    ),
}


@pytest.mark.parametrize("case", BEST)
def test_the_recipe_that_is_suggested(case: str) -> None:
    noises, best, reason = BEST[case]
    # Later weights are larger.
    tensors = [
        tensor_of(f"layer{n}", "weight", 100 * (1 + n), **noise) for n, noise in enumerate(noises)
    ]
    report = Analysis("x", tuple(noises[0]), tuple(tensors))
    assert report.best_recipe() == best
    assert report.to_json()["suggestion"]["reason"] == report.why_best() == reason
    assert (reason in list(sentences(report, 5))) is bool(reason)
    assert reason in page(report, "")


@pytest.mark.parametrize(("value", "count"), [(math.nan, 4096), (-math.inf, 3)])
def test_values_that_are_not_finite_are_told_everywhere(
    value: float, count: int, tmp_path: Path
) -> None:
    weight, good = torch.randn(64, 64), torch.randn(64, 64) * torch.logspace(-7, 0, 64)
    weight.view(-1)[:count] = value
    save_plain({"good.weight": good, "a.weight": weight}, tmp_path / "file.safetensors")
    json_file, html, kept = (tmp_path / name for name in ("r.json", "r.html", "kept.yaml"))
    options = ["--recipe", "current", "--recipe", "mxfp8", "--json", json_file, "--html", html]
    done = command(tmp_path / "file.safetensors", *options, "--recipe-file", kept)
    values = f"{count} of 4096 values are NaN or infinite"
    assert f"a (weight): {values}, in high precision too." in done.output
    # What no recipe can mend does not hide which one is better.
    assert "Suggested: mxfp8, with 1 of 2 layers" in done.output
    assert "broken !" in done.output
    told = json.loads(json_file.read_text())
    assert told["suggestion"]["kept"] == [{"layer": "a", "reason": f"weight: {values}"}]
    assert told["complaints"]["mxfp8"] == {"a": [f"weight: {values}"]}
    assert 'data-t="broken|' in html.read_text()
    assert values in kept.read_text()


class Broken(Recipe):
    """A recipe of a user, which fails."""

    name = "broken"

    def make_quantizer(self, role: object, *, amax_reduction_group: object = None) -> None:
        raise RuntimeError("no quantizer today")


def test_a_recipe_that_fails_is_named_and_the_others_go_on() -> None:
    trials = {"broken": Broken(), "current": ottava.get_recipe("current")}
    series = Series("a", "weight", trials)
    series.add(torch.randn(32, 32))
    report = Analysis("x", ("broken", "current"), (series.report(),))
    reason = "weight: fails: RuntimeError: no quantizer today"
    assert report.complaints("broken") == {"a": [reason]}
    assert report.tensors[0].noise["current"].sqnr > 30
    assert report.best_recipe() == "current"
    told = json.loads(json.dumps(report.to_json()))
    assert told["tensors"][0]["noise"]["broken"]["rowwise"] is None


# -- sources --


def test_every_source_gives_the_same_report(tmp_path: Path) -> None:
    state = {f"{name}.weight": torch.randn(32, 64) for name in ("a", "b.c", "d")}
    expected = ottava_debug.analyze(state, recipes=["current"])
    assert (expected.source, expected.layers) == ("a state dict", ("a", "b.c", "d"))
    # Of recipes that are named none is left out, though one repeats another.
    names = ("current", "custom")
    assert ottava_debug.analyze(state, recipes=names).recipes == names
    # Folders of several files need no index.
    several, by_torch = tmp_path / "several", tmp_path / "torch"
    for folder in (several, by_torch):
        folder.mkdir()
    for name, weight in state.items():
        save_plain({name: weight}, several / f"part-{name}.safetensors")
        torch.save({name: weight}, by_torch / f"pytorch_model-{name}.bin")
    torch.save({"never": "read"}, by_torch / "training_args.bin")
    for source in (*sources_of(state, tmp_path / "in"), several, by_torch):
        found = ottava_debug.analyze(source, recipes=["current"])
        assert {t.layer: t for t in found.tensors} == {t.layer: t for t in expected.tensors}


WEIGHT, TIED = torch.randn(32, 64), torch.randn(16, 64)
LEFT_OUT: dict[str, tuple[Any, str]] = {
    "fp8.weight": (WEIGHT.to(torch.float8_e4m3fn), "float8_e4m3fn is no high precision"),
    "packed.weight": (torch.zeros(32, 32, dtype=torch.uint8), "uint8 is no high precision"),
    "double.weight": (WEIGHT.double(), "float64, which no recipe quantizes"),
    "layer.bias": (torch.zeros(32), "1 dimension"),
    "conv.weight": (torch.zeros(2, 4, 4, 4), "4 dimensions"),
    "scalar": (torch.tensor(1.0), "0 dimensions"),
    "lora_a": (WEIGHT, "not named weight"),
    "none.weight": (torch.zeros(0, 4), "empty"),
    "model.embed_tokens.weight": (TIED, "named as an embedding"),
    "wte.weight": (WEIGHT.clone(), "named as an embedding"),
    "lm_head.weight": (TIED, "tied to model.embed_tokens.weight"),
    "recipe_state.weight": (WEIGHT, "state of a recipe"),
}


def test_what_is_no_weight_of_a_product_is_left_out_with_a_reason(tmp_path: Path) -> None:
    own = {
        "layer.weight": WEIGHT,
        "quantized.weight": ottava.get_recipe("mxfp8").quantizer("weight").quantize(WEIGHT),
    }
    state = own | {name: value for name, (value, _) in LEFT_OUT.items()}
    report = ottava_debug.analyze(state, recipes=["current"])
    assert report.layers == ("layer",)
    reasons = {skip.name: skip.reason for skip in report.skipped}
    assert reasons.pop("quantized.weight") == "quantized already, as MXFP8Tensor"
    assert reasons.keys() == LEFT_OUT.keys()
    for name, (_, words) in LEFT_OUT.items():
        assert words in reasons[name]
    save_file(own, tmp_path / "own.safetensors")
    found = ottava_debug.analyze(tmp_path / "own.safetensors", recipes=["current"])
    assert [skip.name for skip in found.skipped] == ["quantized.weight"]
    with pytest.raises(UsageError, match="nothing that was read is a weight of a product; fp8"):
        ottava_debug.analyze({"fp8.weight": state["fp8.weight"]})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for folder in ("empty", "twice"):
        (tmp_path / folder).mkdir()
    for number in "12":
        save_plain({"a.weight": torch.ones(2, 2)}, tmp_path / "twice" / f"{number}.safetensors")
    torch.save({"a": print}, tmp_path / "code.pt")
    for name, words in {
        "code.pt": "code to be run",
        "empty": "has no safetensors file",
        "twice": "in several files",
        "missing.safetensors": "cannot be read",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            ottava_debug.analyze(tmp_path / name)


def test_files_are_not_read_into_memory(tmp_path: Path) -> None:
    def anonymous() -> int:
        """Kilobytes of memory that no file is behind."""
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0])

    path, count = tmp_path / "large.safetensors", 256 * 1024
    save_plain({f"{n}.weight": torch.randn(256, 1024) for n in range(32)}, path)
    seen: list[tuple[int, Any]] = []
    ottava_debug.analyze({"a.weight": torch.randn(256, 1024)}, recipes=["current"])
    before = anonymous()
    options = {"progress": lambda *about: seen.append((anonymous(), about))}
    ottava_debug.analyze(path, recipes=["current"], **options)
    assert max(memory for memory, _ in seen) - before < path.stat().st_size / 1024 / 3
    assert [about for _, about in seen] == [("elements", n * count, 32 * count) for n in range(33)]


# -- what is refused --

FILE = "file.safetensors"
REFUSED = {
    (): "neither a source nor a model",
    ("--data", "torch:get_num_threads"): "neither a source nor a model",
    (FILE, "--recipe", "nothing-such"): "nothing-such",
    (FILE, "--recipe-file", "kept.toml"): "a name that ends in .yaml or .yml",
    (FILE, "--base", "mxfp8", "--recipe", "current"): "--base 'mxfp8'",
    (FILE, "--base", "nothing-such"): "not in the report",
    (FILE, "--json", "none/report.json"): "cannot be written",
    (FILE, "--model", "no_such_module:model"): "cannot be had",
    (FILE, "--model", "torch:nothing"): "cannot be had",
    (FILE, "--model", "torch"): "cannot be had",
    (FILE, "--model", "torch:get_num_threads"): "the model is a int",
    (FILE, "--loss", "nothing"): "cannot be had",
    (FILE, "--data", "torch:get_num_threads"): "data without a model",
    ("--model", "ends:model"): "--model 'ends:model' fails: SystemExit: 3",
    ("--model", "ends_at_once:model"): "--model 'ends_at_once:model' cannot be had: SystemExit: 3",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_options_that_are_refused(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    save_plain({"a.weight": torch.randn(32, 32)}, tmp_path / FILE)
    (tmp_path / "ends.py").write_text("def model():\n    raise SystemExit(3)\n")
    (tmp_path / "ends_at_once.py").write_text("raise SystemExit(3)\n")
    before = sorted(tmp_path.iterdir())
    done = command(*arguments)
    assert done.exit_code == 2
    assert REFUSED[arguments] in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert sorted(tmp_path.iterdir()) == before


def test_arguments_that_are_refused() -> None:
    weights = {"a.weight": torch.ones(2, 2)}
    for arguments, options, error, words in (
        (({"a": 1},), {}, DTypeError, "'a' is a int"),
        ((3,), {}, DTypeError, "path is a int"),
        ((weights,), {"steps": 0}, OptionError, "steps is 0"),
        ((weights,), {"loss": "x"}, OptionError, "loss is 'x'"),
        ((weights,), {"threshold": math.nan}, OptionError, "threshold is nan"),
        ((weights,), {"recipes": []}, UsageError, "there is no recipe to try"),
        ((weights,), {"recipes": ["nothing-such"]}, RecipeNotFoundError, "nothing-such"),
    ):
        with pytest.raises(error, match=words):
            ottava_debug.analyze(*arguments, **options)
