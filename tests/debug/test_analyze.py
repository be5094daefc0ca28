"""``ottava analyze`` of weights: its numbers are those of a direct computation, its words name what
was left out."""

import json
import math
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file as save_plain
from typer.testing import CliRunner

import ottava
import ottava_debug
from benchmarks.installed import recipes
from ottava.checkpoint import save_file, save_sharded
from ottava.cli.main import app
from ottava.errors import CheckpointError, DTypeError, OptionError, RecipeNotFoundError, UsageError
from ottava.recipes import Recipe
from ottava_custom import CustomRecipe
from ottava_debug.analysis.measuring import Candidate, Series
from ottava_debug.analysis.page import page
from ottava_debug.analysis.report import Analysis, Noise, TensorReport, most_underflow
from ottava_debug.analysis.terminal import sentences
from ottava_debug.measures import Measures
from tests.debug.checkpoints import demo_checkpoint, direct, real_checkpoint


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


@pytest.mark.parametrize("of", ["demo", "real"])
def test_the_numbers_are_those_of_a_direct_computation(of, tmp_path):
    path = demo_checkpoint(tmp_path) if of == "demo" else real_checkpoint()
    start = time.perf_counter()
    done = run(path, "--json", tmp_path / "report.json", "--html", tmp_path / "report.html")
    elapsed = time.perf_counter() - start
    assert done.exit_code == 0, done.output
    assert elapsed < 60
    report = json.loads((tmp_path / "report.json").read_text())
    with safe_open(path, "pt") as file:
        names = [name for name in file.keys() if name.endswith(".weight")]  # noqa: SIM118
        matrices = {name: file.get_tensor(name) for name in names}
    layers = {
        name.removesuffix(".weight") for name, weight in matrices.items() if weight.dim() == 2
    }
    looked_up = {
        name for name in layers if name.startswith(("embeddings.", "tokens", "positions", "head"))
    }
    assert len(looked_up) == (2 if of == "demo" else 3)
    assert {tensor["layer"] for tensor in report["tensors"]} == layers - looked_up
    # The recipe for files does by itself what current does.
    assert report["recipes"] == [name for name in recipes() if name != "custom"]
    # Of the real one each kind of layer, which takes time enough.
    chosen = [
        t
        for t in report["tensors"]
        if of == "demo" or ".layer.3." in t["layer"] or t["layer"] == "pooler.dense"
    ]
    assert len(chosen) == (16 if of == "demo" else 7)
    for tensor in chosen:
        weight = matrices[f"{tensor['layer']}.weight"]
        assert tensor["shape"] == [*weight.shape]
        assert tensor["amax"] == weight.abs().max().item()
        assert sum(tensor["exponents"].values()) == weight.count_nonzero()
        for recipe in report["recipes"]:
            noise = tensor["noise"][recipe]
            sides = [side for side in (noise["rowwise"], noise["columnwise"]) if side is not None]
            sqnr, underflow, cosine = direct(recipe, weight)
            assert min(side["sqnr"] for side in sides) == pytest.approx(sqnr, rel=1e-9), (
                tensor["layer"],
                recipe,
            )
            assert max(side["underflow"] for side in sides) == pytest.approx(underflow, abs=1e-9)
            assert min(side["cosine"] for side in sides) == pytest.approx(cosine, rel=1e-9)
            assert max(side["saturation"] for side in sides) == 0
    left = {skip["name"]: skip["reason"] for skip in report["skipped"]}
    assert {*left} | {f"{tensor['layer']}.weight" for tensor in report["tensors"]} >= {*matrices}


def test_what_needs_high_precision_is_named_and_suggested(tmp_path):
    path = demo_checkpoint(tmp_path)
    report = ottava_debug.analyze(path, recipes=["current", "mxfp8"])
    assert report.recipes == ("current", "mxfp8")
    assert {*report.complaints("current")} == {"blocks.1.up", "blocks.2.down"}
    assert report.complaints("mxfp8") == {}
    assert report.best_recipe() == "mxfp8"
    ranked = report.worst(16)
    assert [(tensor.layer, recipe) for tensor, recipe in ranked[:2]] == [
        ("blocks.1.up", "current"),
        ("blocks.2.down", "current"),
    ]
    qualities = [tensor.noise[recipe].quality for tensor, recipe in ranked]
    assert qualities == sorted(qualities)
    summaries = {summary.recipe: summary for summary in report.summaries()}
    assert summaries["current"].kept == ("blocks.1.up", "blocks.2.down")
    assert summaries["current"].lowest_sqnr == min(t.noise["current"].sqnr for t in report.tensors)
    ottava_debug.write_suggestion(report, tmp_path / "kept.yaml", "current")
    kept = CustomRecipe.from_file(tmp_path / "kept.yaml")
    for layer in report.layers:
        serves = kept.explain(ottava.QuantizerRole("linear", "weight", layer)).rowwise
        assert serves == ("identity" if layer in summaries["current"].kept else "current E4M3")
    assert "# weight: underflow" in (tmp_path / "kept.yaml").read_text()
    done = run(path, "--recipe", "current", "--recipe-file", tmp_path / "same.yaml", "--rows", 3)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "same.yaml").read_text() == (tmp_path / "kept.yaml").read_text()
    for text in (
        "blocks.2.down",
        "2 of 16",
        "13 more tensors are not shown",
        "tied to tokens.weight",
    ):
        assert text in done.output


def test_the_threshold_is_that_of_noise_and_of_underflow(tmp_path):
    # What a grid with the noise of the threshold leaves of a normal distribution: Monte Carlo
    # against the formula.
    torch.manual_seed(0)
    x = torch.randn(1_000_000)
    step = math.sqrt(12 * 10 ** (-20 / 10))
    q = (x / step).round() * step
    assert ottava_debug.compare(x, q).sqnr == pytest.approx(20, abs=0.1)
    assert ottava_debug.compare(x, q).underflow == pytest.approx(most_underflow(20), abs=0.1)
    strict = ottava_debug.analyze(demo_checkpoint(tmp_path), recipes=["current"], threshold=40.0)
    # Rounding alone leaves 31 dB, but where one large weight is the sum of squares.
    assert len(strict.complaints("current")) == 16
    with pytest.raises(OptionError, match="threshold is nan"):
        ottava_debug.analyze({}, threshold=math.nan)


def test_every_source_gives_the_same_report(tmp_path):
    torch.manual_seed(0)
    state = {f"{name}.weight": torch.randn(32, 64) for name in ("a", "b.c", "d")}
    expected = ottava_debug.analyze(state, recipes=["mxfp8"])
    assert expected.source == "a state dict"
    save_plain(state, tmp_path / "one.safetensors")
    torch.save(state, tmp_path / "one.pt")
    save_file(state, tmp_path / "own.safetensors")
    save_sharded(state, tmp_path / "sharded")
    indexed, folder = tmp_path / "indexed", tmp_path / "folder"
    for place in (indexed, folder):
        place.mkdir()
        save_plain({"a.weight": state["a.weight"]}, place / "part-1.safetensors")
        save_plain(
            {k: v for k, v in state.items() if k != "a.weight"}, place / "part-2.safetensors"
        )
    files = {name: f"part-{1 if name == 'a.weight' else 2}.safetensors" for name in state}
    (indexed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    several = {"-1": ["a.weight"], "-2": ["b.c.weight", "d.weight"]}
    for place, parts in (("by-torch", {"": list(state)}), ("parts", several)):
        (tmp_path / place).mkdir()
        torch.save({"never": "read"}, tmp_path / place / "training_args.bin")
        for part, names in parts.items():
            torch.save(
                {name: state[name] for name in names}, tmp_path / place / f"pytorch_model{part}.bin"
            )
    for source in (
        "one.safetensors",
        "one.pt",
        "own.safetensors",
        "sharded",
        "indexed",
        "folder",
        "by-torch",
        "parts",
    ):
        found = ottava_debug.analyze(tmp_path / source, recipes=["mxfp8"])
        assert {t.layer: t for t in found.tensors} == {t.layer: t for t in expected.tensors}
    assert expected.layers == ("a", "b.c", "d")


def test_what_is_no_weight_of_a_product_is_left_out_by_name(tmp_path):
    weight = torch.randn(32, 64)
    tied = torch.randn(16, 64)
    quantized = ottava.get_recipe("mxfp8").quantizer("weight").quantize(weight)
    state = {
        "layer.weight": weight,
        "quantized.weight": quantized,
        "fp8.weight": weight.to(torch.float8_e4m3fn),
        "packed.weight": torch.zeros(32, 32, dtype=torch.uint8),
        "double.weight": weight.double(),
        "layer.bias": torch.zeros(32),
        "norm.weight": torch.ones(64),
        "expert.weight": torch.zeros(2, 4, 4),
        "conv.weight": torch.zeros(2, 4, 4, 4),
        "scalar": torch.tensor(1.0),
        "lora_a": weight,
        "none.weight": torch.zeros(0, 4),
        "model.embed_tokens.weight": tied,
        "wte.weight": weight.clone(),
        "lm_head.weight": tied,
        "recipe_state.weight": weight,
    }
    report = ottava_debug.analyze(state, recipes=["current"])
    assert report.layers == ("layer",)
    reasons = {skip.name: skip.reason for skip in report.skipped}
    assert {*reasons} == {*state} - {"layer.weight"}
    for name, words in {
        "quantized.weight": "quantized already, as MXFP8Tensor",
        "fp8.weight": "float8_e4m3fn is no high precision",
        "packed.weight": "uint8 is no high precision",
        "double.weight": "float64, which no recipe quantizes",
        "layer.bias": "1 dimension",
        "conv.weight": "4 dimensions",
        "lora_a": "not named weight",
        "none.weight": "empty",
        "model.embed_tokens.weight": "named as an embedding",
        "lm_head.weight": "tied to model.embed_tokens.weight",
        "recipe_state.weight": "state of a recipe",
    }.items():
        assert words in reasons[name]
    # The same from a file of Ottava's own, where they come back as quantized tensors.
    save_file({"layer.weight": weight, "quantized.weight": quantized}, tmp_path / "own.safetensors")
    found = ottava_debug.analyze(tmp_path / "own.safetensors", recipes=["current"])
    assert [(skip.name, skip.reason[:17]) for skip in found.skipped] == [
        ("quantized.weight", "quantized already")
    ]
    with pytest.raises(UsageError, match="nothing that was read is a weight of a product; fp8"):
        ottava_debug.analyze({"fp8.weight": state["fp8.weight"]})


def test_what_cannot_be_read_is_an_error_and_nothing_is_written(tmp_path):
    damaged, pickled, empty = (
        tmp_path / "damaged.safetensors",
        tmp_path / "code.pt",
        tmp_path / "empty",
    )
    empty.mkdir()
    save_plain({"a.weight": torch.randn(32, 32)}, damaged)
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-100])
    torch.save({"a": print}, pickled)
    twice = tmp_path / "twice"
    twice.mkdir()
    for number in "12":
        (twice / f"{number}.safetensors").write_bytes(data)
    for path, words in (
        (damaged, "damaged"),
        (pickled, "code to be run"),
        (empty, "has no safetensors file"),
        (twice, "in several files"),
        (tmp_path / "missing.safetensors", "cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=words):
            ottava_debug.analyze(path)
        done = run(path, "--json", tmp_path / "report.json")
        assert done.exit_code == 2
        assert f"error: {str(path)[:10]}" in done.output
        assert "Traceback" not in done.output
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "neither a source nor a model"),
        (("--data", "torch:get_num_threads"), "neither a source nor a model"),
        (("FILE", "--recipe", "nothing-such"), "nothing-such"),
        (("FILE", "--recipe-file", "kept.toml"), "a name that ends in .yaml or .yml"),
        (("FILE", "--base", "mxfp8", "--recipe", "current"), "--base 'mxfp8'"),
        (("FILE", "--base", "nothing-such"), "not in the report"),
        (("FILE", "--json", "none/report.json"), "cannot be written"),
        (("FILE", "--model", "no_such_module:model"), "cannot be had"),
        (("FILE", "--model", "torch:nothing"), "cannot be had"),
        (("FILE", "--model", "torch:get_num_threads"), "the model is a int"),
        (("FILE", "--loss", "nothing"), "cannot be had"),
        (("FILE", "--data", "torch:get_num_threads"), "data without a model"),
    ],
)
def test_wrong_options_are_told(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_plain({"a.weight": torch.randn(32, 32)}, tmp_path / "file.safetensors")
    done = run(*["file.safetensors" if argument == "FILE" else argument for argument in arguments])
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["file.safetensors"]


def test_wrong_arguments_are_told():
    with pytest.raises(DTypeError, match="'a' is a int"):
        ottava_debug.analyze({"a": 1})
    with pytest.raises(DTypeError, match="path is a int"):
        ottava_debug.analyze(3)
    with pytest.raises(OptionError, match="steps is 0"):
        ottava_debug.analyze({}, steps=0)
    with pytest.raises(OptionError, match="loss is 'x'"):
        ottava_debug.analyze({}, loss="x")
    with pytest.raises(RecipeNotFoundError):
        ottava_debug.analyze({"a.weight": torch.ones(2, 2)}, recipes=["nothing-such"])


class Broken(Recipe):
    """A stranger's recipe, which fails at its work."""

    name = "broken"

    def make_quantizer(self, role, *, amax_reduction_group=None):
        raise RuntimeError("no quantizer today")


def test_a_recipe_that_fails_is_named_and_the_others_go_on():
    series = Series(
        "a",
        "weight",
        [Candidate("broken", Broken()), Candidate("current", ottava.get_recipe("current"))],
    )
    series.add(torch.randn(32, 32))
    tensor = series.report()
    assert tensor.noise["broken"].error == "RuntimeError: no quantizer today"
    assert tensor.noise["current"].sqnr > 30
    report = Analysis("x", ("broken", "current"), (tensor,))
    assert report.complaints("broken") == {"a": ["weight: fails: RuntimeError: no quantizer today"]}
    assert report.best_recipe() == "current"
    assert (
        json.loads(json.dumps(report.to_json()))["tensors"][0]["noise"]["broken"]["rowwise"] is None
    )


@pytest.mark.parametrize(
    ("value", "count"), [(math.nan, 4096), (math.inf, 1), (-math.inf, 3), (math.nan, 1)]
)
def test_values_that_are_not_finite_are_a_complaint_everywhere(value, count, tmp_path):
    torch.manual_seed(0)
    weight, good = torch.randn(64, 64), torch.randn(64, 64) * torch.logspace(-7, 0, 64)
    weight.view(-1)[:count] = value
    state = {"good.weight": good, "a.weight": weight}
    save_plain(state, tmp_path / "file.safetensors")
    report = ottava_debug.analyze(state, recipes=["current", "mxfp8"])
    tensor, finite = report.tensors[1], weight[weight.isfinite()]
    assert tensor.not_finite == count
    assert tensor.amax == (finite.abs().max().item() if finite.numel() else 0)
    words = f"weight: {count} of 4096 values are NaN or infinite"
    for recipe in report.recipes:
        assert report.complaints(recipe)["a"] == [words]
    assert report.worst(1)[0][0] is tensor
    # What no recipe can mend does not hide which one is better.
    assert report.best_recipe() == "mxfp8"
    files = [tmp_path / name for name in ("report.json", "report.html", "kept.yaml")]
    options = ["--recipe", "current", "--recipe", "mxfp8", "--json", files[0], "--html", files[1]]
    done = run(tmp_path / "file.safetensors", *options, "--recipe-file", files[2])
    assert (
        f"a (weight): {count} of 4096 values are NaN or infinite, in high precision too."
        in done.output
    )
    assert "Suggested: mxfp8, with 1 of 2 layers" in done.output
    assert "broken !" in done.output
    told = json.loads(files[0].read_text())
    assert told["suggestion"]["kept"] == [{"layer": "a", "reason": words}]
    assert told["complaints"]["mxfp8"] == {"a": [words]}
    assert 'data-t="broken|' in files[1].read_text()
    assert f"a (weight): {count} of 4096 values are NaN or infinite" in files[1].read_text()
    assert words in files[2].read_text()


def measured(sqnr, underflow=0.0):
    return Noise(Measures(100, 0, 1.0, underflow, 0.0, sqnr, 0.99))


def tensor_of(layer, role, count=100, **noise):
    return TensorReport(layer, role, (10, count // 10), "float32", count, 0, 1.0, {}, noise)


def test_every_reason_of_a_layer_is_told():
    tensors = (
        tensor_of("a", "weight", current=measured(10.0, 20.0)),
        tensor_of("a", "input", current=measured(30.0)),
        tensor_of("a", "grad_output", current=measured(5.0)),
        tensor_of("b", "grad_output", current=measured(30.0, 50.0)),
    )
    report = Analysis("x", ("current",), tensors)
    expected = {
        "a": [
            "weight: SQNR 10.0 dB < 20 dB, underflow 20.0 % > 13.8 %",
            "grad_output: SQNR 5.0 dB < 20 dB",
        ],
        "b": ["grad_output: underflow 50.0 % > 13.8 %"],
    }
    assert report.complaints("current") == expected
    assert [(keep.layer, keep.reason) for keep in report.keeps("current")] == [
        (layer, "; ".join(reasons)) for layer, reasons in expected.items()
    ]


def test_of_recipes_that_keep_as_much_the_best_is_the_one_whose_worst_tensor_is_better():
    small, large = (
        {"x": measured(25.0), "y": measured(28.0)},
        {"x": measured(40.0), "y": measured(29.0)},
    )
    tensors = (tensor_of("a", "weight", **small), tensor_of("b", "weight", **large))
    for recipes_in_order in (("x", "y"), ("y", "x")):
        assert Analysis("x", recipes_in_order, tensors).best_recipe() == "y"
    # What was not finite before is so under both.
    broken = Noise(Measures(100, 1, 1.0, 0.0, 0.0, 30.0, 0.99))
    tensors += (
        TensorReport(
            "broken", "weight", (10, 10), "float32", 100, 1, 1.0, {}, {"x": broken, "y": broken}
        ),
    )
    assert Analysis("x", ("x", "y"), tensors).best_recipe() == "y"
    # The fewest elements in high precision come first, and equal recipes are as they are named.
    tensors += (tensor_of("c", "weight", x=measured(5.0), y=measured(30.0)),)
    tensors += (tensor_of("d", "weight", 200, x=measured(30.0), y=measured(19.0)),)
    assert Analysis("x", ("y", "x"), tensors).best_recipe() == "x"
    same = (tensor_of("a", "weight", x=measured(25.0), y=measured(25.0)),)
    assert [Analysis("x", names, same).best_recipe() for names in (("x", "y"), ("y", "x"))] == [
        "x",
        "y",
    ]


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        ({"x": measured(30.0), "y": measured(5.0)}, ""),
        (
            {"x": measured(30.0), "y": measured(25.0)},
            "y would leave as little: x is suggested because its worst tensor keeps more, 30.0 dB "
            "(y 25.0 dB).",
        ),
        (
            {"x": measured(math.inf), "y": measured(math.inf)},
            "y would leave as little: x is suggested because it comes before y, whose worst "
            "tensor keeps as much.",
        ),
        (
            {"x": measured(25.0), "y": measured(30.0), "z": measured(30.0)},
            "x, z would leave as little: y is suggested because its worst tensor keeps more, 30.0 "
            "dB (x 25.0 dB), "
            "and it comes before z, whose worst tensor keeps as much.",
        ),
    ],
)
def test_why_one_of_several_equal_recipes_is_suggested(noise, expected):
    report = Analysis("x", tuple(noise), (tensor_of("a", "weight", **noise),))
    assert report.why_best() == expected
    assert report.to_json()["suggestion"]["reason"] == expected
    told = list(sentences(report, 5))
    assert (expected in told) is bool(expected)
    assert expected in page(report, "")


def test_a_reader_of_files_that_repeats_another_recipe_is_left_out():
    weights = {"a.weight": torch.randn(32, 32)}
    report = ottava_debug.analyze(weights)
    assert "custom" not in report.recipes
    assert all("custom" not in tensor.noise for tensor in report.tensors)
    assert {"current", "delayed"} <= {*report.recipes}
    words = "without a file it makes of all tensors what current makes"
    assert [(skip.name, skip.reason) for skip in report.unavailable] == [("custom", words)]
    assert ottava_debug.analyze(weights, recipes=["current", "custom"]).recipes == (
        "current",
        "custom",
    )


def test_files_are_not_read_into_memory(tmp_path):
    def anonymous():
        """Bytes of memory that no file is behind."""
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

    save_plain(
        {f"{n}.weight": torch.randn(512, 4096) for n in range(16)}, tmp_path / "large.safetensors"
    )
    size = (tmp_path / "large.safetensors").stat().st_size
    seen = []
    ottava_debug.analyze({"a.weight": torch.randn(512, 4096)}, recipes=["current"])
    before = anonymous()
    ottava_debug.analyze(
        tmp_path / "large.safetensors",
        recipes=["current"],
        progress=lambda *about: seen.append((anonymous(), about)),
    )
    assert max(memory for memory, _ in seen) - before < size / 3
    assert [about for _, about in seen] == [
        ("elements", n * 512 * 4096, 16 * 512 * 4096) for n in range(17)
    ]
