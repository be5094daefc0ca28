"""Recipe files that keep something in high precision: read back they say exactly what was
written."""

import os

import pytest
import torch
import yaml

import ottava
from ottava.errors import OptionError, RecipeNotFoundError
from ottava.formats import Format
from ottava_custom import CustomRecipe
from ottava_custom.files.source import MAX_BYTES
from ottava_debug import located, operands
from ottava_debug.log_files import StatisticsFile
from ottava_debug.output import write_text
from ottava_debug.recipe_file import Keep, recipe_text, write_recipe_file

ROLES = ("input", "weight", "grad_output")


def served(recipe, layer):
    """Role -> what serves its rows and its columns."""
    explained = {
        role: recipe.explain(ottava.QuantizerRole("linear", role, layer)) for role in ROLES
    }
    return {role: (found.rowwise, found.columnwise) for role, found in explained.items()}


CURRENT = {
    "input": ("current E4M3",) * 2,
    "weight": ("current E4M3",) * 2,
    "grad_output": ("current E5M2",) * 2,
}
KEPT = dict.fromkeys(ROLES, ("identity", "identity"))


def test_layers_roles_and_directions_are_kept_and_nothing_else(tmp_path):
    keeps = [
        Keep("blocks.0.up", "SQNR 12.3 dB"),
        Keep("blocks.1.up", "underflow", role="grad_output"),
        Keep("blocks.2.up", "an outlier", role="weight", direction="columnwise"),
        Keep("blocks.2.up", "and one more", role="input", direction="rowwise"),
        Keep("blocks.3.up", "first", role="weight", direction="columnwise"),
        Keep("blocks.3.up", "second", role="weight", direction="rowwise"),
    ]
    recipe = write_recipe_file(
        tmp_path / "kept.yaml", keeps, about="Found by a search.\nTwo lines."
    )
    assert recipe == CustomRecipe.from_file(tmp_path / "kept.yaml")
    assert served(recipe, "blocks.0.up") == KEPT
    assert served(recipe, "blocks.1.up") == CURRENT | {"grad_output": ("identity",) * 2}
    one_side = {"weight": ("current E4M3", "identity"), "input": ("identity", "current E4M3")}
    assert served(recipe, "blocks.2.up") == CURRENT | one_side
    assert served(recipe, "blocks.3.up") == CURRENT | {"weight": ("identity",) * 2}
    assert served(recipe, "blocks.0.down") == served(recipe, "blocks.00.up") == CURRENT
    text = (tmp_path / "kept.yaml").read_text()
    assert text.startswith("# Found by a search.\n# Two lines.\ndefault: current\n")
    for keep in keeps:
        assert f"# {keep.reason}\n" in text
    assert [rule.text for rule in recipe.rules()] == [f"blocks.{number}.up" for number in range(4)]


NAMES = [
    "",
    "a",
    "null",
    "True",
    "1e4",
    "0o17",
    "~",
    "a: b",
    "#a",
    "it's",
    '"',
    "\\",
    "[x]*?",
    "é😀",
    "a\nb",
    "-",
    " a ",
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_taken_character_by_character(tmp_path, name):
    recipe = write_recipe_file(
        tmp_path / "kept.yaml", [Keep(name, f"because of {name}\n- match: x\x00")]
    )
    assert served(recipe, name) == KEPT
    other = recipe.explain(ottava.QuantizerRole("linear", "weight", "another"))
    assert other.rowwise == ("current E4M3" if name else "identity")
    assert yaml.safe_load((tmp_path / "kept.yaml").read_text()).keys() == {"default", "layers"}


def test_a_module_in_a_kept_one_may_be_kept_too(tmp_path):
    keeps = [
        Keep(name, "x", role=role)
        for name, role in (("", "input"), ("a", "weight"), ("a.b", None), ("a.b.c", None))
    ]
    recipe = write_recipe_file(tmp_path / "kept.yaml", keeps)
    assert served(recipe, "a.b.c") == served(recipe, "a.b") == KEPT
    assert served(recipe, "a.c") == CURRENT | {
        "weight": ("identity",) * 2,
        "input": ("identity",) * 2,
    }
    assert served(recipe, "d") == CURRENT | {"input": ("identity",) * 2}


def test_options_and_files_serve_the_rest(tmp_path):
    keeps = [Keep("a", "x", role="weight", direction="rowwise")]
    first = write_recipe_file(
        tmp_path / "first.yaml", keeps, "current", {"fp8_format": Format.E4M3}
    )
    assert served(first, "b") == dict.fromkeys(ROLES, ("current E4M3",) * 2)
    assert served(first, "a") == served(first, "b") | {"weight": ("identity", "current E4M3")}
    second = write_recipe_file(
        tmp_path / "second.yaml", [Keep("b", "y")], str(tmp_path / "first.yaml")
    )
    of_file = f", file={tmp_path / 'first.yaml'}"
    assert served(second, "a") == {
        role: (a + of_file, b + of_file) for role, (a, b) in served(first, "a").items()
    }
    assert served(second, "b") == KEPT


@pytest.mark.parametrize("default", ["delayed", "hybrid.yaml"])
def test_where_one_direction_cannot_be_served_alone_the_role_is_kept(tmp_path, default):
    if default != "delayed":
        default = str(tmp_path / default)
        with open(default, "w") as file:
            file.write("default: {rowwise: mxfp8, columnwise: current}\n")
    keeps = [Keep("a", "x", role="weight", direction="rowwise")]
    recipe = write_recipe_file(tmp_path / "kept.yaml", keeps, default)
    assert served(recipe, "a") == served(recipe, "b") | {"weight": ("identity",) * 2}
    assert "Only rowwise data need it" in (tmp_path / "kept.yaml").read_text()


@pytest.mark.parametrize(("gemm", "tensor"), operands.OPERANDS)
def test_an_operand_that_is_kept_is_what_its_product_takes(tmp_path, gemm, tensor):
    keep = Keep.of_operand("0", "x", gemm, tensor)
    recipe = write_recipe_file(tmp_path / "kept.yaml", [keep])
    torch.manual_seed(0)
    x, dy = torch.randn(8, 32, requires_grad=True), torch.randn(8, 16)
    weight = torch.nn.Linear(32, 16, bias=False)
    model = ottava.convert(torch.nn.Sequential(weight), recipe)
    y = model(x)
    y.backward(dy)

    def operand(of, name, values):
        if (of, name) == (gemm, tensor):
            return values.detach()
        quantizer = ottava.get_recipe("current").quantizer(operands.ROLES[name])
        return quantizer.quantize(values.detach()).dequantize()

    w = model[0].weight
    expected = {
        "fprop": (y, operand("fprop", "activation", x) @ operand("fprop", "weight", w).t()),
        "dgrad": (x.grad, operand("dgrad", "gradient", dy) @ operand("dgrad", "weight", w)),
        "wgrad": (w.grad, operand("wgrad", "gradient", dy).t() @ operand("wgrad", "activation", x)),
    }
    for found, wanted in expected.values():
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_without_anything_kept_the_file_is_the_recipe(tmp_path):
    recipe = write_recipe_file(tmp_path / "kept.yml", [], "mxfp8")
    assert recipe.explain("weight").rowwise == "mxfp8 E4M3"
    assert recipe_text([], "mxfp8") == "default: mxfp8\n"


def test_a_file_that_is_too_large_to_be_read_is_not_written(tmp_path):
    """Neither over another one nor anew; the largest one is read back."""
    path = tmp_path / "kept.yaml"
    write_recipe_file(path, [Keep("a", "x")])
    before = path.read_bytes()
    for name in ("kept.yaml", "new.yaml"):
        with pytest.raises(OptionError, match=rf"is larger than {MAX_BYTES} bytes.*fewer patterns"):
            write_recipe_file(tmp_path / name, [Keep("a", "é" * MAX_BYTES)])
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept.yaml"]
    # A comment of several lines takes more room than its text.
    room = MAX_BYTES - len(recipe_text([], about="x"))
    write_recipe_file(path, [], about="\n".join(["x" * 97] * (room // 100)))
    assert MAX_BYTES - 200 < path.stat().st_size <= MAX_BYTES


def test_pipes_are_refused(tmp_path):
    """Nobody has their other ends: to open one would wait for ever."""
    pipe = tmp_path / "kept.yaml"
    os.mkfifo(pipe)
    logs = tmp_path / "nvdlfw_inspect_statistics_logs"
    logs.mkdir()
    os.mkfifo(logs / "nvdlfw_inspect_globalrank-0.log")
    for call in (
        lambda: write_recipe_file(pipe, []),
        lambda: CustomRecipe.from_file(pipe),
        lambda: located.read(pipe),
        lambda: write_text(pipe, "a report"),
        lambda: write_text("/dev/null", "a report"),
        lambda: StatisticsFile(tmp_path),
    ):
        with pytest.raises(OptionError, match=r"no regular file"):
            call()


def test_bad_input_is_told_and_nothing_is_written(tmp_path):
    with pytest.raises(OptionError, match=r"\.yaml or \.yml"):
        write_recipe_file(tmp_path / "kept.toml", [])
    with pytest.raises(RecipeNotFoundError, match="nothing-such"):
        write_recipe_file(tmp_path / "kept.yaml", [], "nothing-such")
    with pytest.raises(OptionError, match="cannot be written"):
        write_recipe_file(tmp_path / "none" / "kept.yaml", [])
    with pytest.raises(OptionError, match="role is 'bias'"):
        Keep("a", "x", role="bias")
    with pytest.raises(OptionError, match="direction is 'up'"):
        Keep("a", "x", role="weight", direction="up")
    with pytest.raises(OptionError, match="of no role"):
        Keep("a", "x", direction="rowwise")
    with pytest.raises(OptionError, match="fprop activation"):
        Keep.of_operand("a", "x", "fprop", "gradient")
    assert not list(tmp_path.iterdir())
