"""``ottava export`` and ``convert_file``: bytes of every recipe from every recipe, the choice of
tensors, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import ottava
from ottava import checkpoint
from ottava.cli.main import app
from ottava.errors import DTypeError, OptionError, RecipeNotFoundError, UsageError
from ottava.tensors import QuantizedTensor
from ottava_integrations import convert_file
from tests.comparing import assert_same
from tests.integrations.files import dequantized, inner, plain, quantized_names, same_files

#: The blocks of rowwise data that share a scale, by recipe.
BLOCKS = {"current": (99, 99), "delayed": (99, 99), "rowwise": (1, 99), "mxfp8": (1, 32)}
BLOCKS["blockwise"] = (128, 128)
HIGH_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def model(recipe: str, seed: int, *, primary: bool = True, **options: Any) -> Any:
    torch.manual_seed(seed)
    made = ottava.get_recipe(recipe, **options)
    with ottava.quantized_model_init(made, enabled=primary):
        return torch.nn.Sequential(
            ottava.nn.Linear(64, 96, recipe=made), ottava.nn.Linear(96, 64, recipe=made)
        )


def trained(recipe: str, **options: Any) -> Any:
    net = model(recipe, 0, **options)
    net(torch.randn(32, 64)).square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return net


def export(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)], env={"COLUMNS": "200"})


def done(*arguments: Any) -> str:
    result = export(*arguments, "--force")
    assert result.exit_code == 0, result.output
    return result.output


# -- bytes --


@pytest.fixture(scope="module", params=BLOCKS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The name of a recipe, a model that has made a step under it, and its file."""
    net = trained(request.param)
    path = tmp_path_factory.mktemp("source") / "in"
    checkpoint.save_model(net, path)
    return request.param, net, path


@pytest.mark.parametrize("target", BLOCKS)
def test_from_recipe_to_recipe(source: Any, target: str, tmp_path: Path) -> None:
    """Quantizing the dequantized values gives the bytes, and a model goes on with them. Where that
    changes no value, the bytes stay."""
    recipe, net, path = source
    text = done(path, tmp_path / "out", "--recipe", target, "--columnwise")
    same = "quantized" not in text
    assert same if recipe == target else (not same or "mxfp8" not in (recipe, target))
    assert ("dropped" in text) == (recipe == "delayed" != target)
    if recipe == target:
        same_files(path, tmp_path / "out")
    other = model(target, 1)
    missing, unexpected = checkpoint.load_model(other, tmp_path / "out", strict=False)
    assert unexpected == []
    assert all("recipe_state" in name for name in missing)
    for number, (mine, theirs) in enumerate(zip(other, net, strict=True)):
        assert_same(mine.bias, theirs.bias)
        values = torch.tensor(dequantized(path, f"{number}.weight", BLOCKS[recipe]))
        quantizer = ottava.get_recipe(target).quantizer("weight").copy()
        quantizer.initialize(values)
        expected = theirs.weight if same else quantizer.quantize(values)
        assert_same(inner(mine.weight), inner(expected))
        found = dequantized(tmp_path / "out", f"{number}.weight", BLOCKS[target])
        assert_same(found, expected.dequantize(torch.float32))
    other(torch.randn(32, 64)).square().mean().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


def test_to_high_precision(source: Any, tmp_path: Path) -> None:
    recipe, net, path = source
    for name, dtype in HIGH_PRECISION.items():
        done(path, tmp_path / "out", "--recipe", name)
        assert {*plain(tmp_path / "out")} == {"0.weight", "0.bias", "1.weight", "1.bias"}
        written = safetensors.torch.load_file(tmp_path / "out")
        for number, layer in enumerate(net):
            key = f"{number}.weight"
            values = torch.tensor(dequantized(path, key, BLOCKS[recipe]))
            assert_same(written[key], values.to(dtype))
            assert_same(written[f"{number}.bias"], layer.bias.to(dtype))
        assert not convert_file(tmp_path / "out", tmp_path / "x", name).cast


def test_from_a_sharded_checkpoint(source: Any, tmp_path: Path) -> None:
    """A part of a training, by its prefix."""
    recipe, net, path = source
    state = {"model": net.state_dict(), "optimizer": {"moment": torch.ones(3)}}
    checkpoint.save_sharded(state, tmp_path / "run")
    command = [tmp_path / "run", tmp_path / "out", "--recipe", recipe, "--columnwise"]
    done(*command, "--prefix", "model.")
    same_files(tmp_path / "out", path)
    wrong = export(*command, "--prefix", "net.", "--force")
    assert wrong.exit_code == 2
    assert "'model.', 'optimizer.'" in wrong.output


def test_options(tmp_path: Path) -> None:
    """The same options keep the bytes, and others quantize again."""
    values = torch.randn(160, 288)
    safetensors.torch.save_file({"a.weight": values, "b": values[0].clone()}, tmp_path / "in")
    options = ["fp8_format=E5M2", "force_pow_2_scales=true"]
    command = ["--recipe", "current", *(part for o in options for part in ("--option", o))]
    done(tmp_path / "in", tmp_path / "out", *command)
    recipe = ottava.get_recipe("current", fp8_format=ottava.Format.E5M2, force_pow_2_scales=True)
    expected = recipe.quantizer("weight").with_usage(True, False)(values)
    state = checkpoint.load_file(tmp_path / "out")
    assert_same(inner(state["a.weight"]), inner(expected))
    assert_same(state["b"], values[0])
    done(tmp_path / "out", tmp_path / "again", *command)
    same_files(tmp_path / "out", tmp_path / "again")
    converted = convert_file(tmp_path / "out", tmp_path / "again", "current")
    assert converted.quantized == ("a.weight",)
    rows = ottava.get_recipe("current").quantizer("weight").with_usage(True, False)
    again = checkpoint.load_file(tmp_path / "again")["a.weight"]
    assert_same(inner(again), inner(rows(expected.dequantize())))


def test_columns_come_for_the_asking(tmp_path: Path) -> None:
    """A file of 8-bit weights is smaller than one of BF16."""
    checkpoint.save_file({"a.weight": torch.randn(64, 64).bfloat16()}, tmp_path / "in")
    done(tmp_path / "in", tmp_path / "rows", "--recipe", "mxfp8")
    done(tmp_path / "in", tmp_path / "both", "--recipe", "mxfp8", "--columnwise")
    rows, both = plain(tmp_path / "rows"), plain(tmp_path / "both")
    assert {*both} - {*rows} == {f"a.weight.columnwise_{part}" for part in ("data", "scale_inv")}
    assert sum(array.nbytes for array in rows.values()) < 0.55 * 64 * 64 * 2
    # What is quantized already loses its columns, or keeps them.
    done(tmp_path / "both", tmp_path / "x", "--recipe", "mxfp8")
    same_files(tmp_path / "x", tmp_path / "rows")
    done(tmp_path / "both", tmp_path / "x", "--recipe", "mxfp8", "--columnwise")
    same_files(tmp_path / "x", tmp_path / "both")
    # Rows alone get the columns of their values.
    done(tmp_path / "rows", tmp_path / "x", "--recipe", "mxfp8", "--columnwise")
    assert plain(tmp_path / "x").keys() == both.keys()


# -- scaling state, ties, high precision --


def test_scaling_state_of_the_same_recipe_is_kept(tmp_path: Path) -> None:
    """Also of a model in high precision, whose file has only the state to tell of its recipe."""
    net = trained("delayed", primary=False)
    checkpoint.save_model(net, tmp_path / "in")
    assert "dropped" not in done(tmp_path / "in", tmp_path / "out", "--recipe", "delayed")
    other = model("delayed", 1)
    assert checkpoint.load_model(other, tmp_path / "out") == ([], [])
    for mine, theirs in zip(other, net, strict=True):
        assert isinstance(mine.weight, QuantizedTensor)
        assert_same(mine.recipe_state.amax_history, theirs.recipe_state.amax_history)
    # A history of another length fits as it does in load_state_dict, warning included.
    with pytest.warns(UserWarning, match="amax_history"):
        checkpoint.load_model(model("delayed", 1, amax_history_len=4), tmp_path / "out")
    # A layer without a recipe keeps it for a region that comes later.
    waiting = torch.nn.Sequential(ottava.nn.Linear(64, 96), ottava.nn.Linear(96, 64))
    assert checkpoint.load_model(waiting, tmp_path / "in") == ([], [])
    state = waiting.state_dict()
    assert state.keys() == net.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    for target in ("current", "bf16"):
        converted = convert_file(tmp_path / "in", tmp_path / "out", target)
        assert len(converted.dropped) == 6
        assert not any("recipe_state" in name for name in plain(tmp_path / "out"))


def test_the_number_of_steps_of_a_schedule_is_kept(tmp_path: Path) -> None:
    recipe = ottava.get_recipe("nvfp4", high_precision_until_step=2)
    net = ottava.convert(torch.nn.Sequential(torch.nn.Linear(64, 96)), recipe)
    for _ in range(3):
        net(torch.randn(4, 64)).sum().backward()
    checkpoint.save_model(net, tmp_path / "in")
    assert convert_file(tmp_path / "in", tmp_path / "out", recipe).dropped == ()
    assert checkpoint.load_file(tmp_path / "out")["0.recipe_state.steps"].item() == 3
    assert len(convert_file(tmp_path / "in", tmp_path / "out", "nvfp4").dropped) == 1


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    weight, out = torch.randn(4, 8), tmp_path / "out"
    tied = {"a.weight": weight, "b.weight": weight, "c": weight}
    checkpoint.save_file(tied, tmp_path / "in")
    for target, stored in (("current", 2 + 1), ("bf16", 1)):
        convert_file(tmp_path / "in", out, target)
        assert len(plain(out)) == stored
        read: Any = checkpoint.load_file(out)
        assert {*read} == {*tied}
        assert torch.equal(read["a.weight"].float(), read["b.weight"].float())
        assert torch.equal(read["c"], weight if target == "current" else weight.bfloat16())
    convert_file(tmp_path / "in", tmp_path / "q", "current", include=[*tied])
    assert len(plain(tmp_path / "q")) == 2
    convert_file(tmp_path / "q", out, "current", exclude=["b.weight"])
    assert quantized_names(out) == {"a.weight", "c"}
    # A shared tensor whose stored name stays behind is taken along.
    convert_file(tmp_path / "in", out, "fp32", prefix="b.")
    assert checkpoint.load_file(out)["weight"].tolist() == weight.tolist()


def test_what_a_recipe_keeps_in_high_precision(tmp_path: Path) -> None:
    """It is written as any other tensor, and loads into weights that the recipe has made, too."""
    mixed, identity, out = tmp_path / "mixed.yaml", tmp_path / "plain.yaml", tmp_path / "out"
    mixed.write_text("default: current\nlayers: [{match: '1', all: identity}]\n")
    identity.write_text("default: identity")
    values = {"0.weight": torch.randn(8, 8), "1.weight": torch.randn(8, 8).bfloat16()}
    checkpoint.save_file(values, tmp_path / "in")
    for columnwise in ([], ["--columnwise"]):
        text = done(tmp_path / "in", out, "--recipe", mixed, *columnwise)
        assert "Quantized: 0.weight\n" in text
        assert quantized_names(out) == {"0.weight"}
        assert_same(checkpoint.load_file(out)["1.weight"], values["1.weight"])
    again = convert_file(out, tmp_path / "again", str(mixed), include=["*.weight"])
    assert (again.quantized, sorted(again.copied)) == ((), ["0.weight", "1.weight"])
    convert_file(tmp_path / "in", out, "current")
    again = convert_file(out, tmp_path / "again", str(mixed))
    assert (again.dequantized, again.copied) == (("1.weight",), ("0.weight",))
    own, other = model(str(identity), 0), model(str(identity), 1)
    checkpoint.save_model(own, tmp_path / "own")
    again = convert_file(tmp_path / "own", tmp_path / "again", str(identity))
    assert (again.quantized, again.dequantized) == ((), ("0.weight", "1.weight"))
    checkpoint.load_model(other, tmp_path / "again")
    assert isinstance(other[0].weight, QuantizedTensor)
    assert torch.equal(other[0].weight.dequantize(), own[0].weight.dequantize())


# -- the choice of tensors --

FOREIGN = {
    "embed.weight": torch.ones(6, 4).bfloat16(), "layer.weight": torch.ones(3, 40),
    "layer.bias": torch.ones(3), "norm.weight": torch.ones(4).half(),
    "weight": torch.ones(2, 2), "layer.weights": torch.ones(2, 2),
    "ids.weight": torch.arange(6).view(2, 3), "conv.weight": torch.ones(2, 2, 3),
    "double.weight": torch.ones(2, 2).double(),
}  # fmt: skip
CHOICES: list[tuple[dict[str, list[str]], set[str]]] = [
    ({}, {"layer.weight", "weight"}),
    ({"include": ["layer.*"]}, {"layer.weight", "layer.bias", "layer.weights"}),
    ({"include": ["layer.*"], "exclude": ["*.bias"]}, {"layer.weight", "layer.weights"}),
    ({"include": ["conv.weight", "norm.*"]}, {"conv.weight", "norm.weight"}),
    ({"exclude": ["embed*", "layer*"]}, {"weight"}),
]


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A file that another tool has written."""
    metadata = {"tool": "another", "format": "pt"}
    safetensors.torch.save_file(FOREIGN, tmp_path / "in", metadata)
    return tmp_path / "in"


@pytest.mark.parametrize(("patterns", "chosen"), CHOICES)
def test_tensors_of_another_tool(
    patterns: Any, chosen: set[str], foreign: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    out = tmp_path / "out"
    progress = {"progress": lambda *sizes: seen.append(sizes)}
    converted = convert_file(foreign, out, "current", **patterns, **progress)
    assert {*converted.quantized} == quantized_names(out) == chosen
    assert {*converted.copied} == {*FOREIGN} - chosen
    assert converted.skipped == (() if "include" in patterns else ("embed.weight",))
    state = checkpoint.load_file(out)
    assert state.keys() == FOREIGN.keys()
    for name, value in FOREIGN.items():
        assert (state[name].dtype, state[name].shape) == (value.dtype, value.shape)
        assert torch.equal(state[name].float(), value.float())
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata()["tool"] == "another"
    before = sum(value.nbytes for value in FOREIGN.values())
    after = sum(array.nbytes for array in safetensors.torch.load_file(out).values())
    assert (converted.bytes_before, converted.bytes_after) == (before, after)
    assert after < before
    assert [seen[0], seen[-1], len(seen)] == [(0, before), (before, before), len(FOREIGN) + 1]
    # Quantized tensors that are not to be converted get their nominal dtype.
    one = min(chosen)
    convert_file(out, tmp_path / "fp16", "fp16", include=[one])
    dtypes = {name: value.dtype for name, value in checkpoint.load_file(tmp_path / "fp16").items()}
    assert dtypes == {n: value.dtype for n, value in FOREIGN.items()} | {one: torch.float16}


def test_elements_without_scales_are_values(tmp_path: Path) -> None:
    """A recipe, which quantizes high precision, leaves them as they are."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = {"a.weight": torch.randn(8, 16).to(dtype), "b.weight": torch.ones(8, 16)}
        safetensors.torch.save_file(values, tmp_path / "in")
        converted = convert_file(tmp_path / "in", tmp_path / "out", "bf16")
        assert sorted(converted.cast) == ["a.weight", "b.weight"]
        written = safetensors.torch.load_file(tmp_path / "out")
        assert_same(written["a.weight"], values["a.weight"].bfloat16())
        converted = convert_file(tmp_path / "in", tmp_path / "out", "current")
        assert (converted.quantized, converted.copied) == (("b.weight",), ("a.weight",))


def small_gpt() -> torch.nn.Module:
    """What --model makes here: names do not tell what is a linear layer."""
    net = torch.nn.Module()
    net.wte, net.table = torch.nn.Embedding(96, 64), torch.nn.Embedding(32, 64)
    net.h = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(3))
    net.head = torch.nn.Linear(64, 96, bias=False)
    net.head.weight = net.wte.weight
    return net


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    checkpoint.save_model(small_gpt().bfloat16(), tmp_path / "gpt")
    return tmp_path / "gpt"


def test_embeddings_are_left_alone_and_the_choice_is_told(gpt: Path, tmp_path: Path) -> None:
    text = done(gpt, tmp_path / "out", "--recipe", "current")
    layers = {"h.0.weight", "h.1.weight", "h.2.weight"}
    assert quantized_names(tmp_path / "out") == {*layers, "table.weight"}
    assert "Quantized: h.*.weight (3), table.weight" in text
    left = text.partition("Left alone, named as embeddings: ")[2].replace("\n", ", ").split(", ")
    assert {"wte.weight", "head.weight"} <= {*left}
    embeddings = "model.embed_tokens tok_embeddings bert.embeddings.word_embeddings emb "
    embeddings += "transformer.wpe Embed_0"
    others = {"member.weight", "remember.wq.weight", "wq.weight"}
    names = [*(f"{name}.weight" for name in embeddings.split()), *others]
    checkpoint.save_file({name: torch.randn(4, 4) for name in names}, tmp_path / "names")
    convert_file(tmp_path / "names", tmp_path / "out", "current")
    assert quantized_names(tmp_path / "out") == others
    convert_file(tmp_path / "names", tmp_path / "out", "current", include=["emb*"])
    assert quantized_names(tmp_path / "out") == {"emb.weight"}


HERE = "tests.integrations.test_export"


def test_a_model_says_what_is_quantized(gpt: Path, tmp_path: Path) -> None:
    """Exactly what convert quantizes, and nothing of the same form."""
    out, option = tmp_path / "out", ["--recipe", "mxfp8", "--model"]
    for filters in ({}, {"exclude": ["head"]}, {"include": ["h.1", "h.2"], "exclude": ["h.2"]}):
        chosen = [(f"--{key}", one) for key, patterns in filters.items() for one in patterns]
        done(gpt, out, *option, f"{HERE}:small_gpt", *(text for pair in chosen for text in pair))
        net = ottava.convert(small_gpt(), "mxfp8", **filters)
        modules = net.named_modules()
        layers = {name for name, module in modules if isinstance(module, ottava.nn.Linear)}
        assert quantized_names(out) == {f"{name}.weight" for name in layers}
    before = out.read_bytes()
    checkpoint.save_file({"h.0.weight": torch.randn(64, 64)}, tmp_path / "cut")
    for source, reference, words in (
        (gpt, HERE, "cannot be loaded"),
        (gpt, f"{HERE}:absent", "cannot be loaded"),
        (gpt, "absent_module:make", "cannot be loaded"),
        (gpt, "torch:get_num_threads", "makes a int"),
        (gpt, "json:loads", "TypeError"),
        ("cut", f"{HERE}:small_gpt", "misses 'h.1.weight', 'h.2.weight', 'head.weight'"),
    ):
        result = export(tmp_path / source, out, *option, reference, "--force")
        assert result.exit_code == 2
        assert words in result.output
    assert out.read_bytes() == before
    with pytest.raises(OptionError, match="a model, to convert to high precision"):
        convert_file(gpt, out, "bf16", model=small_gpt())


# -- what is refused, and what is told --

REFUSALS: list[tuple[str, str]] = [
    ("in present --recipe bf16", "present exists"),
    ("in out --recipe nonesuch", "no installed package provides recipe 'nonesuch'"),
    ("in out --recipe mxpf8x --option a=1", "bf16, fp16, fp32"),
    ("in out --recipe current --option fp8_format=E9", "one of E4M3, E5M2, HYBRID"),
    ("in out --recipe current --option more=1", "unexpected keyword argument 'more'"),
    ("in out --recipe current --option more", "key=value"),
    ("in out --recipe current --option a=1 --option a=1", "each key once"),
    ("in folder/out --recipe current --model no.such:model", "/folder'. Expected: a file in"),
    ("text out --recipe current", "no safetensors file"),
    ("damaged out --recipe current", "damaged is damaged: its checksum is"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSALS)
def test_refusals_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save_file({"a.weight": torch.randn(4, 4)}, "in")
    raw = bytearray(Path("in").read_bytes())
    raw[-1] ^= 1
    Path("damaged").write_bytes(raw)
    for name in ("present", "text"):
        Path(name).write_bytes(b"some text that is no checkpoint")
    before = sorted(os.listdir())
    result = export(*arguments.split())
    assert result.exit_code == 2
    assert words in result.output
    # An unknown name may be misspelled and is not to be installed.
    assert "install " not in result.output
    assert len(result.output.splitlines()) == 1
    assert sorted(os.listdir()) == before
    assert Path("present").read_bytes() == b"some text that is no checkpoint"


def broken() -> Any:
    """A recipe whose quantizer fails."""
    recipe = ottava.get_recipe("current")
    quantizer = recipe.quantizer("weight").copy()

    class Fails(type(quantizer)):  # type: ignore[misc]
        def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
            raise ZeroDivisionError("inside")

    recipe.set_quantizer_factory(lambda role: Fails(torch.float8_e4m3fn))
    return recipe


CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"recipe": "nonesuch"}, RecipeNotFoundError, "nonesuch"),
    ({"recipe": 3}, DTypeError, "recipe"),
    ({"recipe": "bf16", "options": {"a": 1}}, OptionError, "options"),
    ({"recipe": broken()}, UsageError, "cannot be quantized: ZeroDivisionError: inside"),
    ({"source": None}, DTypeError, "path"),
    # The target is checked before anything is read.
    ({"source": "absent", "target": "."}, UsageError, "cannot be written: .*it is a folder"),
    ({"source": "absent", "target": "/dev/null"}, UsageError, "written: .*no regular file"),
    ({"source": "absent", "target": "no/x"}, UsageError, "cannot be written: .*no'"),
    ({"source": "twice"}, UsageError, r"two tensors would have the name 'w\.weight\.data'"),
    ({"include": ["nope*"]}, OptionError, r"in: pattern 'nope\*' fits no tensor"),
    ({"exclude": ["ids.weight"]}, OptionError, "in: pattern 'ids.weight' fits no tensor"),
    ({"include": ["double.weight"]}, OptionError, "in: pattern 'double.weight' fits no tensor"),
    ({"include": "layer.*"}, DTypeError, "include"),
    ({"prefix": "nope."}, OptionError, "no tensor's name begins with 'nope.'"),
]


@pytest.mark.parametrize(("changes", "error", "words"), CALLS)
def test_refusals_of_the_function(
    changes: Any, error: Any, words: str, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(foreign.parent)
    twice = {"w.weight": torch.ones(2, 2), "w.weight.data": torch.ones(1)}
    checkpoint.save_file(twice, "twice")
    with pytest.raises(error, match=words) as caught:
        convert_file(**{"source": "in", "target": "out", "recipe": "current"} | changes)
    assert "partial" not in str(caught.value)
    assert not Path("out").exists()
