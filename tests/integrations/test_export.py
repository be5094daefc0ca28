"""``ottava export`` between all recipes, from every kind of source, and what it tells."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import forking
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import ottava
from ottava import checkpoint
from ottava.cli.main import app
from ottava.errors import CheckpointError
from ottava.tensors import QuantizedTensor
from ottava_integrations import convert_file

RECIPES = ["blockwise", "current", "delayed", "mxfp8", "rowwise"]


def model(recipe: str, seed: int, *, primary: bool = True, **options: Any) -> Any:
    torch.manual_seed(seed)
    made = ottava.get_recipe(recipe, **options)
    with ottava.quantized_model_init(made, enabled=primary):
        return torch.nn.Sequential(
            ottava.nn.Linear(64, 96, recipe=made), ottava.nn.Linear(96, 64, recipe=made)
        )


def export(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)], env={"COLUMNS": "200"})


def done(*arguments: Any) -> str:
    result = export(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def same_tensors(a: Path, b: Path) -> None:
    one, two = (safetensors.torch.load_file(path) for path in (a, b))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), two[name].reshape(-1).view(torch.uint8)
        ), name


@pytest.fixture(params=RECIPES)
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A model that has made a step, in a file, with the name of its recipe."""
    net = model(request.param, 0)
    net(torch.randn(32, 64)).square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    checkpoint.save_model(net, tmp_path / "in")
    return request.param, net


@pytest.mark.parametrize("target", RECIPES)
def test_from_recipe_to_recipe(trained: Any, target: str, tmp_path: Path) -> None:
    """The bytes are those of quantizing the dequantized values, and a model of the target goes on
    with them.

    Where that changes no value, as of one recipe, they are those of the source.
    """
    source, net = trained
    text = done(tmp_path / "in", tmp_path / "out", "--recipe", target, "--columnwise")
    kept = "quantized" not in text
    assert kept if source == target else (not kept or "mxfp8" not in (source, target))
    assert ("dropped" in text) == (source == "delayed" != target)
    other = model(target, 1)
    missing, unexpected = checkpoint.load_model(other, tmp_path / "out", strict=False)
    assert unexpected == []
    assert all("recipe_state" in name for name in missing)
    for mine, theirs in zip(other, net, strict=True):
        assert torch.equal(mine.bias, theirs.bias)
        values = theirs.weight.detach().dequantize(torch.float32)
        quantizer = ottava.get_recipe(target).quantizer("weight").copy()
        quantizer.initialize(values)
        expected = theirs.weight if kept else quantizer.quantize(values)
        for a, b in zip(mine.weight.inner_list(), expected.inner_list(), strict=True):
            assert a is None if b is None else torch.equal(a, b)
    other(torch.randn(32, 64)).square().mean().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    if source == target:
        same_tensors(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_to_high_precision(trained: Any, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    _, net = trained
    done(tmp_path / "in", tmp_path / "out", "--recipe", name)
    plain = safetensors.torch.load_file(tmp_path / "out")
    assert set(plain) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for number, layer in enumerate(net):
        assert torch.equal(
            plain[f"{number}.weight"], layer.weight.detach().dequantize(torch.float32).to(dtype)
        )
        assert torch.equal(plain[f"{number}.bias"], layer.bias.detach().to(dtype))


def test_scaling_state_of_the_same_recipe_is_kept(tmp_path: Path) -> None:
    """Of a model in high precision as well, whose file has only the state to tell of its recipe."""
    net = model("delayed", 0, primary=False)
    net(torch.randn(32, 64)).square().mean().backward()
    checkpoint.save_model(net, tmp_path / "in")
    assert "dropped" not in done(tmp_path / "in", tmp_path / "out", "--recipe", "delayed")
    other = model("delayed", 1)
    assert checkpoint.load_model(other, tmp_path / "out") == ([], [])
    for mine, theirs in zip(other, net, strict=True):
        assert isinstance(mine.weight, QuantizedTensor)
        assert torch.equal(mine.recipe_state.amax_history, theirs.recipe_state.amax_history)
    # A history of another length fits as it does in load_state_dict, warning included.
    short = model("delayed", 1, amax_history_len=4)
    with pytest.warns(UserWarning, match="amax_history"):
        checkpoint.load_model(short, tmp_path / "out")


def test_state_for_a_region_that_is_to_come(tmp_path: Path) -> None:
    net = model("delayed", 0, primary=False)
    net(torch.randn(32, 64)).square().mean().backward()
    checkpoint.save_model(net, tmp_path / "in")
    waiting = torch.nn.Sequential(ottava.nn.Linear(64, 96), ottava.nn.Linear(96, 64))
    assert checkpoint.load_model(waiting, tmp_path / "in") == ([], [])
    held, expected = waiting.state_dict(), net.state_dict()
    assert held.keys() == expected.keys()
    assert expected["0.recipe_state.amax_history"].any()
    assert all(torch.equal(held[name], value) for name, value in expected.items())


def test_options(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a.weight": torch.randn(64, 64)}, tmp_path / "in")
    values = safetensors.torch.load_file(tmp_path / "in")["a.weight"]
    for recipe, options, made in (
        ("current", ["fp8_format=E5M2"], {"fp8_format": ottava.Format.E5M2}),
        ("current", ["fp8_format=E4M3", "force_pow_2_scales=true"], {"force_pow_2_scales": True}),
        ("current", ["amax_epsilon=100"], {"amax_epsilon": 100}),
        ("mxfp8", ["scale_rounding=floor"], {"scale_rounding": "floor"}),
        ("mxfp8", ["with_2d_quantization=True"], {"with_2d_quantization": True}),
    ):  # fmt: skip
        chosen = [part for option in options for part in ("--option", option)]
        done(tmp_path / "in", tmp_path / "out", "--recipe", recipe, *chosen, "--force")
        expected = ottava.get_recipe(recipe, **made).quantizer("weight")(values)
        read = checkpoint.load_file(tmp_path / "out")["a.weight"]
        for a, b in zip(read.inner_list(), expected.inner_list(), strict=True):
            # Rows alone, where columns are data of their own.
            assert a is None or torch.equal(a, b)
        # The same options keep the bytes.
        done(tmp_path / "out", tmp_path / "x", "--recipe", recipe, *chosen, "--force")
        again = checkpoint.load_file(tmp_path / "x")["a.weight"]
        for a, b in zip(again.inner_list(), read.inner_list(), strict=True):
            assert a is None or torch.equal(a, b)


def test_what_a_recipe_keeps_in_high_precision_is_not_quantized(tmp_path: Path) -> None:
    """It is written as any other tensor is, and loads into weights that the recipe has made,
    too."""
    mixed, values = (
        tmp_path / "mixed.yaml",
        {"0.weight": torch.randn(8, 8), "1.weight": torch.randn(8, 8).bfloat16()},
    )
    mixed.write_text("default: current\nlayers: [{match: '1', all: identity}]\n")
    checkpoint.save_file(values, tmp_path / "in")
    for columnwise in ([], ["--columnwise"]):
        text = done(tmp_path / "in", tmp_path / "out", "--recipe", mixed, "--force", *columnwise)
        assert "Quantized: 0.weight\n" in text
        read: Any = checkpoint.load_file(tmp_path / "out")
        assert isinstance(read["0.weight"], QuantizedTensor)
        assert type(read["1.weight"]) is torch.Tensor
        assert torch.equal(read["1.weight"], values["1.weight"])
    again = convert_file(tmp_path / "out", tmp_path / "again", str(mixed), include=["*.weight"])
    assert (again.quantized, sorted(again.copied)) == ((), ["0.weight", "1.weight"])
    convert_file(tmp_path / "in", tmp_path / "all", "current")
    again = convert_file(tmp_path / "all", tmp_path / "again", str(mixed))
    assert (again.dequantized, again.copied) == (("1.weight",), ("0.weight",))
    (tmp_path / "plain.yaml").write_text("default: identity")
    own = model(str(tmp_path / "plain.yaml"), 0)
    checkpoint.save_model(own, tmp_path / "own")
    kept = convert_file(tmp_path / "own", tmp_path / "kept", str(tmp_path / "plain.yaml"))
    assert (kept.quantized, kept.dequantized) == ((), ("0.weight", "1.weight"))
    other = model(str(tmp_path / "plain.yaml"), 1)
    checkpoint.load_model(other, tmp_path / "kept")
    assert isinstance(other[0].weight, QuantizedTensor)
    assert torch.equal(other[0].weight.dequantize(), own[0].weight.dequantize())


def test_a_sharded_checkpoint(trained: Any, tmp_path: Path) -> None:
    source, net = trained
    checkpoint.save_sharded(net.state_dict(), tmp_path / "sharded")
    done(tmp_path / "sharded", tmp_path / "out", "--recipe", source)
    checkpoint.load_model(other := model(source, 1), tmp_path / "out")
    # Rows alone are quantized again where columns are held as well: the same, but for the rounding
    # of float32 scales.
    rtol = 2.0**-22 if source == "rowwise" else 0.0
    for mine, theirs in zip(other, net, strict=True):
        torch.testing.assert_close(
            mine.weight.dequantize(), theirs.weight.dequantize(), rtol=rtol, atol=0.0
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["in", "present", "--recipe", "bf16"], "present exists"),
        (["absent", "out", "--recipe", "bf16"], "absent cannot be read"),
        (["in", "out", "--recipe", "nonesuch"], "no installed package provides recipe 'nonesuch'"),
        (
            ["in", "out", "--recipe", "current", "--option", "fp8_format=E9"],
            "one of E4M3, E5M2, HYBRID",
        ),
        (
            ["in", "out", "--recipe", "current", "--option", "more=1"],
            "unexpected keyword argument 'more'",
        ),
        (["in", "out", "--recipe", "current", "--option", "more"], "key=value"),
        (
            ["in", "out", "--recipe", "current", *["--option", "amax_epsilon=1"] * 2],
            "each key once",
        ),
        (["in", "out", "--recipe", "bf16", "--option", "a=1"], "without the name of a recipe"),
        (["in", "out", "--recipe", "current", "--include", "x*"], "'x*' fits no tensor"),
        (
            ["in", "folder/out", "--recipe", "current", "--model", "no.such:model"],
            "/folder'. Expected: a file in",
        ),
        (["text", "out", "--recipe", "current"], "no safetensors file"),
        (["damaged", "out", "--recipe", "current"], "damaged is damaged: its checksum is"),
    ],
)
def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save_file({"a.weight": torch.randn(4, 4)}, "in")
    raw = bytearray(Path("in").read_bytes())
    raw[-1] ^= 1
    Path("damaged").write_bytes(raw)
    for name in ("present", "text"):
        Path(name).write_bytes(b"some text that is no checkpoint")
    before = sorted(os.listdir())
    result = export(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.splitlines()) == 1
    assert sorted(os.listdir()) == before
    assert Path("present").read_bytes() == b"some text that is no checkpoint"


def test_force_replaces(tmp_path: Path) -> None:
    checkpoint.save_file({"a.weight": torch.randn(4, 4)}, tmp_path / "in")
    done(tmp_path / "in", tmp_path / "in", "--recipe", "current", "--force")
    assert isinstance(checkpoint.load_file(tmp_path / "in")["a.weight"], QuantizedTensor)


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """Drawn on a terminal, and left out where the output goes to a program."""
    safetensors.torch.save_file(
        {f"{n}.weight": torch.randn(256, 256) for n in range(8)}, tmp_path / "in"
    )
    program = "from ottava.cli.main import app; app()"
    command = [sys.executable, "-c", program, "export", str(tmp_path / "in")]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    shown = subprocess.Popen(
        [*command, str(tmp_path / "a"), "--recipe", "current"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    bar = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        bar += part
    os.close(ours)
    table = shown.communicate(timeout=120)[0].decode()
    assert shown.returncode == 0
    assert b"Converting" in bar
    assert b"2.1/2.1 MB" in bar
    assert "Converted to current" in table
    assert "Converting" not in table
    quiet = forking.python(
        program, "export", tmp_path / "in", tmp_path / "b", "--recipe", "current"
    )
    assert quiet.stderr == ""
    same_tensors(tmp_path / "a", tmp_path / "b")


def test_the_model_of_a_training(tmp_path: Path) -> None:
    """``--prefix`` takes it out of a sharded checkpoint; a shared tensor that stays behind is taken
    along."""
    with ottava.quantized_model_init("current"):
        model = torch.nn.Sequential(ottava.nn.Linear(8, 8, dtype=torch.bfloat16))
    moment = torch.randn(8, 8)
    checkpoint.save_sharded(
        {"model": model.state_dict(), "optimizer": {"moment": moment}}, tmp_path / "run"
    )
    out = tmp_path / "model.safetensors"
    done = CliRunner().invoke(
        app, ["export", str(tmp_path / "run"), str(out), "--recipe", "bf16", "--prefix", "model."]
    )
    assert done.exit_code == 0, done.output
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8)).bfloat16()
    checkpoint.load_model(plain, out)
    assert torch.equal(plain[0].weight, model[0].weight.dequantize())
    wrong = CliRunner().invoke(
        app,
        [
            "export",
            str(tmp_path / "run"),
            str(out),
            "--recipe",
            "bf16",
            "--prefix",
            "net.",
            "--force",
        ],
    )
    assert wrong.exit_code == 2
    assert "'model.', 'optimizer.'" in wrong.output
    shared = torch.randn(4)
    checkpoint.save_file({"a.x": shared, "b.x": shared, "b.y": shared}, tmp_path / "shared")
    convert_file(tmp_path / "shared", tmp_path / "b", "fp32", prefix="b.")
    assert {
        name: value.tolist() for name, value in checkpoint.load_file(tmp_path / "b").items()
    } == {
        "x": shared.tolist(),
        "y": shared.tolist(),
    }


def test_a_pickle_with_code_is_refused_in_our_words(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(
        CheckpointError, match=r"it needs code to be run \(torch.nn.modules.linear.Linear\)"
    ) as caught:
        convert_file(tmp_path / "module.pt", tmp_path / "out", "bf16")
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    "value", [torch.zeros(1).expand(2**14, 2**14), torch.zeros(1).expand(2**24, 2**24)]
)
def test_a_small_file_with_a_large_tensor_is_refused(value: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"w.weight": value}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 4000
    with pytest.raises(CheckpointError, match=r"'w.weight' is on meta, sparse, nested or expanded"):
        convert_file(tmp_path / "x.pt", tmp_path / "out", "bf16")


# -- what is chosen --


def small_gpt() -> torch.nn.Module:
    """What --model makes in these tests: names that tell nothing of what is a linear layer."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = torch.nn.Embedding(96, 64)
            self.table = torch.nn.Embedding(32, 64)
            self.h = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(3))
            self.head = torch.nn.Linear(64, 96, bias=False)
            self.head.weight = self.wte.weight

    return Net()


def no_model() -> int:
    return 3


def quantized_in(path: Path) -> set[str]:
    return {
        name
        for name, value in checkpoint.load_file(path).items()
        if isinstance(value, QuantizedTensor)
    }


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    checkpoint.save_model(small_gpt().bfloat16(), tmp_path / "gpt")
    return tmp_path / "gpt"


def test_mx_files_hold_rows_unless_asked(gpt: Path, tmp_path: Path) -> None:
    """A file of 8-bit weights is smaller than one of BF16, and columns come for the asking."""
    sizes = {}
    for name, more in (("rows", []), ("both", ["--columnwise"])):
        done(gpt, tmp_path / name, "--recipe", "mxfp8", *more)
        stored = safetensors.torch.load_file(tmp_path / name)
        assert any("columnwise" in key for key in stored) == (name == "both")
        sizes[name] = sum(tensor.nbytes for key, tensor in stored.items() if key.startswith("h."))
    assert sizes["rows"] < 0.55 * 3 * 64 * 64 * 2 < sizes["both"]
    # What was quantized already loses its columns, or keeps them; its rows stay.
    done(tmp_path / "both", tmp_path / "again", "--recipe", "mxfp8")
    rows, again = (checkpoint.load_file(tmp_path / name) for name in ("rows", "again"))
    assert rows.keys() == again.keys()
    for name, value in rows.items():
        mine, theirs = (
            t.inner_list() if isinstance(t, QuantizedTensor) else [t] for t in (value, again[name])
        )
        assert all(a is None or _same_bytes(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not any("columnwise" in key for key in safetensors.torch.load_file(tmp_path / "again"))
    before = safetensors.torch.load_file(tmp_path / "both")
    done(tmp_path / "both", tmp_path / "both", "--recipe", "mxfp8", "--columnwise", "--force")
    after = safetensors.torch.load_file(tmp_path / "both")
    assert before.keys() == after.keys()
    assert all(_same_bytes(before[key], after[key]) for key in before)


def test_embeddings_are_left_alone_and_the_choice_is_told(gpt: Path, tmp_path: Path) -> None:
    """By their names, and what is tied to one; whatever else is a matrix named weight is quantized,
    and said to be."""
    text = done(gpt, tmp_path / "out", "--recipe", "current")
    assert quantized_in(tmp_path / "out") == {
        "h.0.weight",
        "h.1.weight",
        "h.2.weight",
        "table.weight",
    }
    assert "Quantized: h.*.weight (3), table.weight" in text
    assert "Left alone, named as embeddings: " in text
    assert {"wte.weight", "head.weight"} <= set(
        text.partition("embeddings: ")[2].replace("\n", ", ").split(", ")
    )
    names = [
        "model.embed_tokens.weight",
        "tok_embeddings.weight",
        "bert.embeddings.word_embeddings.weight",
    ]
    names += ["emb.weight", "transformer.wpe.weight", "Embed_0.weight"]
    others = ["member.weight", "remember.wq.weight", "wq.weight"]
    checkpoint.save_file({name: torch.randn(4, 4) for name in names + others}, tmp_path / "names")
    done(tmp_path / "names", tmp_path / "out", "--recipe", "current", "--force")
    assert quantized_in(tmp_path / "out") == {"member.weight", "remember.wq.weight", "wq.weight"}
    done(
        tmp_path / "names", tmp_path / "out", "--recipe", "current", "--include", "emb*", "--force"
    )
    assert quantized_in(tmp_path / "out") == {"emb.weight"}


def test_a_model_says_what_is_quantized(
    gpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly what convert quantizes, and nothing of the same form."""
    (tmp_path / "models_of_tests.py").write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_export import small_gpt, no_model\n"
        "def fails(): raise ValueError('not today')\n"
    )
    monkeypatch.chdir(tmp_path)
    for filters in ({}, {"exclude": ["head"]}, {"include": ["h.1", "h.2"], "exclude": ["h.2"]}):
        chosen = [
            text
            for key, patterns in filters.items()
            for one in patterns
            for text in (f"--{key}", one)
        ]
        done(
            gpt,
            tmp_path / "out",
            "--recipe",
            "mxfp8",
            "--model",
            "models_of_tests:small_gpt",
            *chosen,
            "--force",
        )
        model = ottava.convert(small_gpt(), "mxfp8", **filters)
        layers = {
            name for name, module in model.named_modules() if isinstance(module, ottava.nn.Linear)
        }
        assert quantized_in(tmp_path / "out") == {f"{name}.weight" for name in layers}
    assert "table.weight" not in quantized_in(tmp_path / "out")
    before = (tmp_path / "out").read_bytes()
    for reference, said in (
        ("models_of_tests", "cannot be loaded"),
        ("models_of_tests:absent", "cannot be loaded"),
        ("absent_module:make", "cannot be loaded"),
        ("models_of_tests:no_model", "makes a int"),
        ("models_of_tests:fails", "ValueError: not today"),
    ):
        result = export(gpt, tmp_path / "out", "--recipe", "mxfp8", "--model", reference, "--force")
        assert result.exit_code == 2
        assert said in result.output
    checkpoint.save_file({"h.0.weight": torch.randn(64, 64)}, tmp_path / "cut")
    result = export(
        tmp_path / "cut",
        tmp_path / "out",
        "--recipe",
        "mxfp8",
        "--model",
        "models_of_tests:small_gpt",
        "--force",
    )
    assert "the file misses 'h.1.weight', 'h.2.weight', 'head.weight'" in result.output
    assert (tmp_path / "out").read_bytes() == before


@pytest.mark.parametrize("more", [[], ["--option", "a=1"]])
def test_an_unknown_recipe_is_not_to_be_installed(
    gpt: Path, tmp_path: Path, more: list[str]
) -> None:
    result = export(gpt, tmp_path / "out", "--recipe", "mxpf8x", *more)
    assert result.exit_code == 2
    assert "'mxpf8x'" in result.output
    assert "mxfp8" in result.output
    assert "bf16" in result.output
    assert "install " not in result.output
    assert "ottava-recipes" not in result.output
