"""The commands of core as a user runs them: what they print, where broken plugins are named, and
how they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from typer.testing import CliRunner

from ottava.cli import main
from ottava.cli.output import (
    PlainColumn,
    console,
    escaped,
    parse_options,
    say,
    show_json,
    table,
)
from ottava.cli.recipes import DEMO_LAYERS
from ottava.cli.references import resolve
from ottava.errors import OptionError
from ottava.kernels import products
from tests.core import forking
from tests.core.fake_plugins import distribution, hook, offers, plugin, run

FACTORIES = "ottava_quantizer_factories"
IMPL = """
import torch
import ottava
from ottava.errors import OptionError
from ottava.recipes.role import Explanation, RecipeRule
from ottava.tensors import Float8QuantizerBase


class Q(Float8QuantizerBase):
    def quantize_impl(self, tensor, dtype): ...


class Thing(ottava.Recipe):
    name = "mine"
    def make_quantizer(self, role, *, amax_reduction_group=None):
        return Q(torch.float8_e5m2 if role.is_gradient else torch.float8_e4m3fn)


class Ruled(Thing):
    RULES = (RecipeRule("*.up [red]", "line 3"), RecipeRule("nothing", "line 7"))
    def __init__(self, file):
        if "bad" in file:
            raise OptionError(f"{file}, line 3: bad")
    def explain(self, role):
        if role.name.endswith("up"):
            return Explanation(f"rows of {role.name}", "columns", self.RULES[0], "line 4")
        return Explanation("same", "same", place="line 1")
    def rules(self):
        return self.RULES


def needs(option): ...
def fails(): raise ValueError("ctor [/red] [bold]")
"""
COMMANDS = """
import typer
from ottava.errors import UsageError


def hello(name: str = "you") -> None:
    \"\"\"Says hello [/red].\"\"\"
    if name == "nobody":
        raise UsageError("nobody is here [/red]")
    print("hello", name)


def strange(what: int | str) -> None: ...
"""


def spec(name: str, factory: str, more: str = "") -> str:
    return f"RecipeSpec(name={name!r}, summary='s', factory={factory!r}{more})"


def factory(name: str, reference: str) -> str:
    body = f"return [FactorySpec(name={name!r}, summary='by row', factory={reference!r})]"
    return hook(body, FACTORIES)


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages, healthy and broken, with recipes, quantizer factories and commands."""
    folder = tmp_path_factory.mktemp("site")
    specs = [
        spec("plain", "cli_impl:Thing"),
        spec("ruled", "cli_impl:Ruled", ", file_suffixes=('.rules',)"),
        spec("needs", "cli_impl:needs"),
        spec("fails", "cli_impl:fails"),
        spec("number", "math:pi"),
        spec("gone", "nonesuch_module:Thing"),
    ]
    plugin(folder, "aaa-good", "aaa_good", hook(f"return [{', '.join(specs)}]"))
    (folder / "cli_impl.py").write_text(IMPL)
    raises = "raise ZeroDivisionError('at import [/red]')"
    plugin(folder, "bbb-raises", "bbb_raises", raises)
    plugin(folder, "ccc-first", "ccc_first", offers("taken", factory="a:B"))
    plugin(folder, "ddd-second", "ddd_second", offers("taken", "own", factory="ddd_second:Thing"))
    plugin(folder, "ggg-empty", "ggg_empty", hook("return []"))
    plugin(folder, "hhh-rows", "hhh_rows", factory("rows", "builtins:str"))
    plugin(folder, "iii-lost", "iii_lost", factory("lost", "nonesuch_module:f"))
    (folder / "aaa_commands.py").write_text(COMMANDS)
    (folder / "bbb_commands.py").write_text(raises)
    hello, broken = "aaa_commands:hello", "bbb_commands:run"
    one = f"say-hello = {hello}\nstrange = aaa_commands:strange\ntwice = {hello}\ndoctor = a:x\n"
    two = f"breaks = {broken}\ntwice = {broken}\nnumber = math:pi\n"
    distribution(folder, "jjj-commands", f"[ottava.commands]\n{one}")
    distribution(folder, "kkk-commands", f"[ottava.commands]\n{two}")
    return folder


# -- recipes --


def test_recipes_lists_the_healthy_and_names_the_broken(plugins: Path) -> None:
    done = run(plugins, "recipes", "--json")
    assert done.returncode == 0, done.stderr
    listing = json.loads(done.stdout)
    rows = {(row["distribution"], row["name"]): row for row in listing["recipes"]}
    assert rows["ddd-second", "own"]["status"] == "ok"
    for dist in ("ccc-first", "ddd-second"):
        assert rows[dist, "taken"]["status"] == "refused"
        for part in ("taken", "ccc-first 1.2", "ddd-second 1.2"):
            assert part in rows[dist, "taken"]["error"]
    # A package that offers nothing else is not "empty" besides.
    assert ("ccc-first", "") not in rows
    assert rows["bbb-raises", ""]["status"] == "broken"
    assert "at import [/red]" in rows["bbb-raises", ""]["error"]
    empty = rows["ggg-empty", ""]
    assert (empty["status"], empty["error"]) == ("empty", "it offers nothing")
    assert not [dist for dist, _ in rows if dist in ("hhh-rows", "iii-lost")]
    factory_row = {"name": "rows", "summary": "by row", "plugin": "hhh-rows:main"}
    factory_row |= {"distribution": "hhh-rows", "version": "1.2", "status": "ok", "error": ""}
    assert factory_row in listing["quantizer_factories"]
    text = run(plugins, "recipes").stdout
    for words in ("own", "by row", "ddd-second:main 1.2 taken is refused"):
        assert words in text
    assert "bbb-raises:main 1.2 is broken: ZeroDivisionError: at import [/red]" in text


def test_plugins_can_be_disabled_or_required(plugins: Path) -> None:
    done = run(plugins, "recipes", "--json", OTTAVA_DISABLE_PLUGINS="bbb_raises,CCC.first")
    rows = {(r["distribution"], r["name"]): r["status"] for r in json.loads(done.stdout)["recipes"]}
    assert rows["bbb-raises", ""] == rows["ccc-first", ""] == "disabled"
    assert rows["ddd-second", "taken"] == "ok"
    for options in ([], ["--json"]):
        done = run(plugins, "recipes", *options, OTTAVA_STRICT_PLUGINS="true")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: plugin bbb-raises:main 1.2 is broken: ZeroDivision")
        assert len(done.stderr.splitlines()) == 1


def explained(folder: Path, *arguments: object) -> Any:
    done = run(folder, "recipes", "--json", "--explain", *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_explain_tells_lines_rules_and_the_layers_of_the_demo(plugins: Path) -> None:
    layers = explained(plugins, "plain")["layers"]
    assert list(dict.fromkeys(row["layer"] for row in layers)) == list(DEMO_LAYERS)
    roles = ["input", "weight", "grad_output"]
    assert [row["role"] for row in layers] == roles * len(DEMO_LAYERS)
    elements = {(row["role"] == "grad_output", row["rowwise"].split()[-1]) for row in layers}
    assert elements == {(False, "E4M3"), (True, "E5M2")}
    assert {(row["place"], row["rule"]) for row in layers} == {("", None)}
    names = ["--layer", "a.up", "--layer", "b", "--layer", "a.up"]
    found = explained(plugins, "model.rules", *names)
    rows = {(row["layer"], row["role"]): row for row in found["layers"]}
    assert len(found["layers"]) == 6
    assert rows["a.up", "weight"] == {
        "layer": "a.up",
        "role": "weight",
        "rowwise": "rows of a.up",
        "columnwise": "columns",
        "place": "line 4",
        "rule": "*.up [red]",
    }
    assert (rows["b", "input"]["place"], rows["b", "input"]["rule"]) == ("line 1", None)
    assert found["unused"] == [{"place": "line 7", "rule": "nothing"}]
    text = run(plugins, "recipes", "--explain", "model.rules", *names).stdout
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if "│" in line
    ]
    assert cells[0] == ["a.up", "input", "rows of a.up", "columns", "line 4"]
    assert [row[0] for row in cells] == ["a.up", "", "", "b", "", ""]
    assert "unused: the rule in line 7, nothing, serves none of these layers" in text
    assert "[red]" in run(plugins, "recipes", "--explain", "model.rules", "--layer", "b").stdout


REFUSED = {
    "--layer a": "--layer without --explain. Remedy: say which recipe: --explain NAME.",
    "--checkpoint a --layer b --json": "--layer and --checkpoint without --explain.",
    "--explain nonesuch": "no installed package provides recipe 'nonesuch'",
    "--explain model.other": "the file 'model.other' is read by no installed recipe",
    "--explain bad.rules --json": "bad.rules, line 3: bad.",
    "--explain plain --layer=": "--layer ''. Expected: the qualified name of a layer.",
    "--explain plain --checkpoint absent": "absent cannot be read",
}


def test_wrong_use_is_one_line(plugins: Path) -> None:
    for arguments, words in REFUSED.items():
        done = run(plugins, "recipes", *arguments.split())
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert done.stderr.startswith(f"error: {words}")
        assert len(done.stderr.splitlines()) == 1


# -- doctor --


def checks(folder: Path, **environment: str) -> dict[str, dict[str, Any]]:
    done = run(folder, "doctor", "--json", **environment)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    assert report["ok"] == all(check["ok"] for check in report["checks"])
    return {check["name"]: check for check in report["checks"]}


def test_doctor_builds_the_recipes_and_says_what_is_wrong(plugins: Path) -> None:
    found = checks(plugins)
    wrong = {name: check["detail"] for name, check in found.items() if not check["ok"]}
    expected = {
        "recipe fails": "ctor [/red] [bold]",
        "recipe number": "type float",
        "recipe gone": "No module named 'nonesuch_module'",
        "recipe own": "",
        "quantizer factory lost": "",
        "plugin bbb-raises:main": "at import [/red]",
        "plugin ccc-first:main": "taken",
        "plugin ddd-second:main": "taken",
    }
    kinds = ("recipe", "plugin", "quantizer")
    assert set(expected) == {name for name in wrong if name.startswith(kinds)}
    for name, words in expected.items():
        assert words in wrong[name]
    assert "'option'" in found["recipe needs"]["detail"]
    assert found["quantizer factory rows"]["ok"]
    assert found["kernel self-test"]["ok"]
    # A text of a plugin is no markup.
    text = run(plugins, "doctor")
    assert text.returncode == 1
    assert "ZeroDivisionError: at import [/red]" in text.stdout


def test_doctor_finds_a_healthy_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = run(tmp_path, "doctor")
    assert healthy.returncode == 0, healthy.stdout
    assert "instruction set" in healthy.stdout
    torchs = "a fast" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "no fast"
    reasons = {
        "bfloat16": "in bfloat16, since OTTAVA_CPU_PRODUCT says so",
        "float32": "in float32, since OTTAVA_CPU_PRODUCT says so",
        "": f"since torch has {torchs} one of bfloat16 here",
    }
    for wanted, reason in reasons.items():
        monkeypatch.setattr(products, "_bfloat16_is_fast", None)
        check = checks(tmp_path, OTTAVA_CPU_PRODUCT=wanted)["bfloat16 products on cpu"]
        assert check["ok"]
        assert check["detail"].endswith(reason)


@pytest.mark.xdist_group("forked processes")
def test_doctor_shows_variables_that_name_nothing(tmp_path: Path) -> None:
    """In a process of its own, because the kernels read these variables once."""
    names = ("OTTAVA_BACKEND", "OTTAVA_ISA", "OTTAVA_CPU_PRODUCT")
    code = "from ottava.cli.main import app; app()"
    variables = dict.fromkeys(names, "nonesuch")
    bad = forking.python(code, "doctor", "--json", path=tmp_path, **variables)
    assert bad.returncode == 1
    assert "Traceback" not in bad.stderr
    wrong = [check["detail"] for check in json.loads(bad.stdout)["checks"] if not check["ok"]]
    for name in names:
        assert any(name in detail and "'nonesuch'" in detail for detail in wrong)


# -- commands of other packages --


def test_other_packages_add_commands(plugins: Path) -> None:
    good = run(plugins, "say-hello", "--name", "me")
    assert (good.returncode, good.stdout) == (0, "hello me\n"), good.stderr
    failed = run(plugins, "say-hello", "--name", "nobody")
    assert (failed.returncode, failed.stderr) == (2, "error: nobody is here [/red].\n")
    listed = run(plugins, "--help")
    assert listed.returncode == 0, listed.stderr
    assert "Says hello [/red]." in listed.stdout
    # Core's own commands are nobody else's.
    assert run(plugins, "doctor", "--help").stdout.count("Check versions") == 1
    raised = "'breaks' of kkk-commands 1.2 cannot be imported: ZeroDivisionError: at import [/red]"
    twice = "the command 'twice' is offered by jjj-commands 1.2 and by kkk-commands 1.2"
    broken = {"breaks": raised, "twice": twice}
    broken |= {name: f"the command {name!r}" for name in ("number", "strange")}
    for name, words in broken.items():
        done = run(plugins, name, "--anything", "else")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert name in listed.stdout


def test_a_command_that_is_not_installed_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main, "discover", lambda group: [])
    packages = {
        "check-recipe current --fast": "ottava-",
        "new-recipe": "ottava-",
        "demo": "ottava-",
        "analyze model.safetensors": "ottava-",
        "bisect": "ottava-",
        "vectors mxfp8": "ottava-verify",
        "verify a b": "ottava-verify",
        "export in out --recipe bf16": "ottava-integrations",
    }
    for arguments, package in packages.items():
        done = CliRunner().invoke(main.app, arguments.split())
        assert done.exit_code == 2
        name = arguments.split()[0]
        assert done.output.startswith(f"error: the command {name!r} is not installed")
        assert f"pip install {package}" in done.output
    assert CliRunner().invoke(main.app, ["nonesuch"]).exit_code == 2


def test_listing_recipes_imports_neither_torch_nor_the_recipe(plugins: Path) -> None:
    code = (
        "import sys; from ottava.recipes.registry import list_recipes\n"
        "print('plain' in [spec.name for spec in list_recipes()])\n"
        "print([name for name in ('torch', 'cli_impl', 'aaa_good') if name in sys.modules])"
    )
    path = os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["True", "['aaa_good']"], done.stderr


def test_the_working_directory_is_searched_for_a_callable_alone() -> None:
    before = list(sys.path)
    assert resolve("--option", "json:dumps") is json.dumps
    for wrong in ("json", "json:nonesuch", "nonesuch:dumps"):
        with pytest.raises(OptionError, match=r"--option .* cannot be had"):
            resolve("--option", wrong)
    assert sys.path == before


# -- texts --


@pytest.mark.parametrize(
    ("text", "shown", "in_lines"),
    [
        ("blocks.1.up [red]", "blocks.1.up [red]", "blocks.1.up [red]"),
        ("größe 层 🙂", "größe 层 🙂", "größe 层 🙂"),
        ("\x1b[31m\x9b", r"\x1b[31m\x9b", r"\x1b[31m\x9b"),
        ("a\r\x07\x08\x7f", r"a\r\x07\x08\x7f", r"a\r\x07\x08\x7f"),
        ("a\n\tb", r"a\n\tb", "a\n\tb"),
        ("\u202ea\u2028\ud800", r"\u202ea\u2028\ud800", r"\u202ea\u2028\ud800"),
    ],
)
def test_control_characters_are_written_as_python_does(
    text: str, shown: str, in_lines: str, capsys: Any
) -> None:
    assert escaped(text) == shown
    assert escaped(text, lines=True) == in_lines
    say(text)
    assert capsys.readouterr().out == f"{shown}\n"
    console().print(table("title", ("head",), [[text]]))
    with Progress(PlainColumn("{task.description}"), console=console()) as progress:
        progress.add_task(text, total=1)
    assert capsys.readouterr().out.count(shown) >= 2
    show_json({text: text})
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert all(c.isprintable() or c == "\n" for c in printed)
    assert json.loads(printed) == {text: text}


def test_options_are_read_from_texts() -> None:
    texts = ["a=BLUE", "b=[3, 4]", "c=2.5", "d=None", "e=True", "f=false", "g=x=[", 'h="1"']
    values = ["BLUE", [3, 4], 2.5, None, True, False, "x=[", "1"]
    assert list(parse_options(texts).items()) == list(zip("abcdefgh", values, strict=True))
    for refused in (["a"], ["a b=1"], ["a=1", "a=2"]):
        with pytest.raises(OptionError, match="key=value, each key once"):
            parse_options(refused)
