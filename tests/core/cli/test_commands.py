"""``ottava recipes`` and ``ottava doctor`` as a user runs them, with broken plugins and bad
environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forking
import pytest
from fake_plugins import GOOD, HOOK, RECIPE, hook, offers, plugin, run
from typer.testing import CliRunner

from ottava.cli import main
from ottava.kernels import products


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    plugin(tmp_path, "aaa-good", "aaa_good", GOOD + HOOK.format(name="mine", module="aaa_impl"))
    (tmp_path / "aaa_impl.py").write_text(RECIPE)
    plugin(tmp_path, "bbb-raises", "bbb_raises", "raise ZeroDivisionError('at import [/red]')")
    plugin(
        tmp_path,
        "ccc-signature",
        "ccc_signature",
        GOOD + "@h.hookimpl\ndef ottava_recipes(wrong):\n    return []\n",
    )
    plugin(tmp_path, "ddd-taken", "ddd_taken", offers("mine", "own", factory="ddd_taken:Thing"))
    plugin(
        tmp_path,
        "eee-unknown",
        "eee_unknown",
        GOOD + "@h.hookimpl\ndef ottava_nonesuch():\n    return []\n",
    )
    old = HOOK.format(name="o", module="m").replace("summary='s'", "summary='s', api_version=9")
    plugin(tmp_path, "fff-old", "fff_old", GOOD + old)
    return tmp_path


def listing(folder: Path, **environment: str) -> dict[str, list[dict[str, str]]]:
    done = run(folder, "recipes", "--json", **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def checks(folder: Path, **environment: str) -> dict[str, dict[str, Any]]:
    done = run(folder, "doctor", "--json", **environment)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    assert report["ok"] == all(check["ok"] for check in report["checks"])
    return {check["name"]: check for check in report["checks"]}


def test_recipes_lists_the_healthy_and_names_the_broken(plugins: Path) -> None:
    rows = {(row["distribution"], row["name"]): row for row in listing(plugins)["recipes"]}
    assert rows["ddd-taken", "own"]["status"] == "ok"
    for dist in ("aaa-good", "ddd-taken"):
        assert rows[dist, "mine"]["status"] == "refused"
        for part in ("mine", "aaa-good 1.2", "ddd-taken 1.2"):
            assert part in rows[dist, "mine"]["error"]
    for dist, said in (
        ("bbb-raises", "at import [/red]"),
        ("ccc-signature", "wrong"),
        ("eee-unknown", "ottava_nonesuch"),
        ("fff-old", "version 9"),
    ):
        assert rows[dist, ""]["status"] == "broken"
        assert said in rows[dist, ""]["error"]
    text = run(plugins, "recipes").stdout
    assert "own" in text
    assert "bbb-raises:main 1.2 is broken: ZeroDivisionError: at import [/red]" in text
    assert "ddd-taken:main 1.2 mine is refused" in text


def test_plugins_can_be_disabled_or_required(plugins: Path) -> None:
    disabled = "bbb-raises,ccc_signature,aaa.good,eee-unknown,fff-old"
    rows = listing(plugins, OTTAVA_DISABLE_PLUGINS=disabled)["recipes"]
    statuses = {(row["distribution"], row["name"]): row["status"] for row in rows}
    assert (
        statuses["bbb-raises", ""]
        == statuses["ccc-signature", ""]
        == statuses["aaa-good", ""]
        == "disabled"
    )
    assert statuses["ddd-taken", "mine"] == "ok"


@pytest.mark.parametrize("command", [["recipes"], ["recipes", "--json"]])
def test_strict_is_told_in_short(plugins: Path, command: list[str]) -> None:
    done = run(plugins, *command, OTTAVA_STRICT_PLUGINS="true")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: plugin bbb-raises:main 1.2 is broken: ZeroDivisionError")
    assert len(done.stderr.splitlines()) == 1


def test_quantizer_factories_are_listed(tmp_path: Path) -> None:
    spec = "return [FactorySpec(name='{}', summary='by row', factory='{}')]"
    name = "ottava_quantizer_factories"
    plugin(tmp_path, "aaa-rows", "aaa_rows", hook(spec.format("rows", "builtins:str"), name))
    plugin(tmp_path, "bbb-gone", "bbb_gone", hook(spec.format("gone", "nonesuch_module:f"), name))
    plugin(tmp_path, "ccc-gone", "ccc_gone", hook(spec.format("taken", "builtins:str"), name))
    plugin(tmp_path, "ddd-gone", "ddd_gone", hook(spec.format("taken", "builtins:str"), name))
    given = listing(tmp_path)
    rows = {(row["distribution"], row["name"]): row for row in given["quantizer_factories"]}
    assert rows["aaa-rows", "rows"] == {
        "name": "rows",
        "summary": "by row",
        "plugin": "aaa-rows:main",
        "distribution": "aaa-rows",
        "version": "1.2",
        "status": "ok",
        "error": "",
    }
    assert "ddd-gone 1.2" in rows["ccc-gone", "taken"]["error"]
    assert not [
        row for row in given["recipes"] if row["distribution"][:3] in ("aaa", "bbb", "ccc", "ddd")
    ]
    assert "by row" in run(tmp_path, "recipes").stdout
    found = checks(tmp_path)
    assert found["quantizer factory rows"]["ok"]
    assert not found["quantizer factory gone"]["ok"]
    assert not found["plugin ccc-gone:main"]["ok"]


def test_an_empty_plugin_is_told(tmp_path: Path) -> None:
    plugin(tmp_path, "aaa-empty", "aaa_empty", hook("return []"))
    rows = {row["distribution"]: row for row in listing(tmp_path)["recipes"]}
    assert (rows["aaa-empty"]["status"], rows["aaa-empty"]["error"]) == (
        "empty",
        "it offers nothing",
    )


@pytest.mark.parametrize(
    ("factory", "source", "said"),
    [
        ("aaa_impl:Thing", "", ""),
        ("aaa_impl:build", "def build(need): return Thing()", ""),
        ("nonesuch_module:Thing", "", "No module named 'nonesuch_module'"),
        ("aaa_impl:nonesuch", "", "nonesuch"),
        ("math:pi", "", "type float"),
        (
            "aaa_impl:build",
            "def build(): raise ValueError('ctor [/red] [bold]')",
            "ctor [/red] [bold]",
        ),
        ("builtins:object", "", "type object"),
    ],
)
def test_doctor_builds_the_recipes(tmp_path: Path, factory: str, source: str, said: str) -> None:
    plugin(tmp_path, "aaa-good", "aaa_good", offers("mine", factory=factory))
    (tmp_path / "aaa_impl.py").write_text(RECIPE + source)
    check = checks(tmp_path)["recipe mine"]
    assert check["ok"] == (not said)
    assert said in str(check["detail"])
    if "need" in source:
        assert "'need'" in str(check["detail"])


def test_doctor_says_what_is_wrong(plugins: Path) -> None:
    wrong = {name for name, check in checks(plugins).items() if not check["ok"]}
    assert {
        "plugin bbb-raises:main",
        "plugin aaa-good:main",
        "plugin ddd-taken:main",
        "recipe own",
    } <= wrong
    assert "kernel self-test" not in wrong
    # A text of a plugin is no markup.
    text = run(plugins, "doctor")
    assert text.returncode == 1
    assert "ZeroDivisionError: at import [/red]" in text.stdout


def test_doctor_finds_a_healthy_installation(tmp_path: Path) -> None:
    healthy = run(tmp_path, "doctor")
    assert healthy.returncode == 0, healthy.stdout
    assert "instruction set" in healthy.stdout


@pytest.mark.parametrize("wanted", ["bfloat16", "float32", ""])
def test_doctor_says_how_bfloat16_is_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    monkeypatch.setattr(products, "_bfloat16_is_fast", None)
    check = checks(tmp_path, OTTAVA_CPU_PRODUCT=wanted)["bfloat16 products on cpu"]
    assert check["ok"]
    if wanted:
        assert check["detail"] == f"in {wanted}, since OTTAVA_CPU_PRODUCT says so"
    else:
        assert check["detail"] in (
            "in bfloat16, since torch has a fast one of bfloat16 here",
            "in float32, since torch has no fast one of bfloat16 here",
        )


def test_doctor_shows_variables_that_name_nothing(tmp_path: Path) -> None:
    """In a process of its own, because the kernels read these variables once."""
    names = ("OTTAVA_BACKEND", "OTTAVA_ISA", "OTTAVA_CPU_PRODUCT")
    variables = dict.fromkeys(names, "nonesuch")
    code = "from ottava.cli.main import app; app()"
    bad = forking.python(code, "doctor", "--json", path=tmp_path, **variables)
    assert bad.returncode == 1
    assert "Traceback" not in bad.stderr
    wrong = [check["detail"] for check in json.loads(bad.stdout)["checks"] if not check["ok"]]
    for name in names:
        assert any(name in detail and "'nonesuch'" in detail for detail in wrong)


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


def command_package(folder: Path, dist: str, **commands: str) -> None:
    """A distribution that adds commands."""
    info = folder / f"{dist.replace('-', '_')}-1.2.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
    entries = "".join(
        f"{name.replace('_', '-')} = {reference}\n" for name, reference in commands.items()
    )
    (info / "entry_points.txt").write_text(f"[ottava.commands]\n{entries}")


@pytest.fixture
def with_commands(tmp_path: Path) -> Path:
    (tmp_path / "aaa_commands.py").write_text(COMMANDS)
    (tmp_path / "bbb_commands.py").write_text("raise ZeroDivisionError('at import [/red]')")
    hello = "aaa_commands:hello"
    command_package(
        tmp_path,
        "aaa-commands",
        say_hello=hello,
        strange="aaa_commands:strange",
        twice=hello,
        doctor="aaa_commands:x",
    )
    command_package(
        tmp_path,
        "bbb-commands",
        breaks="bbb_commands:run",
        twice="bbb_commands:run",
        number="math:pi",
    )
    return tmp_path


def test_other_packages_add_commands(with_commands: Path) -> None:
    said = run(with_commands, "say-hello", "--name", "me")
    assert (said.returncode, said.stdout) == (0, "hello me\n"), said.stderr
    failed = run(with_commands, "say-hello", "--name", "nobody")
    assert (failed.returncode, failed.stderr) == (2, "error: nobody is here [/red].\n")
    listed = run(with_commands, "--help")
    assert listed.returncode == 0, listed.stderr
    assert "Says hello [/red]." in listed.stdout
    # Core's own commands are nobody else's.
    assert run(with_commands, "doctor", "--help").stdout.count("Check versions") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "breaks",
            "'breaks' of bbb-commands 1.2 cannot be imported: ZeroDivisionError: at import [/red]",
        ),
        ("number", "the command 'number'"),
        ("strange", "the command 'strange'"),
        ("twice", "the command 'twice' is offered by aaa-commands 1.2 and by bbb-commands 1.2"),
    ],
)
def test_a_broken_command_is_named_and_harms_no_other(
    with_commands: Path, name: str, said: str
) -> None:
    done = run(with_commands, name, "--anything", "else")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    listed = run(with_commands, "--help").stdout
    assert name in listed
    assert "Says hello [/red]." in listed
    assert run(with_commands, "say-hello").returncode == 0


def test_a_command_of_a_package_that_is_not_installed_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main, "discover", lambda group: [])
    for name, arguments in (
        ("check-recipe", []),
        ("check-recipe", ["current", "--fast"]),
        ("new-recipe", []),
        ("demo", []),
        ("analyze", ["model.safetensors"]),
        ("bisect", []),
        ("export", ["in", "out", "--recipe", "bf16"]),
    ):
        done = CliRunner().invoke(main.app, [name, *arguments])
        assert done.exit_code == 2
        assert done.output.startswith(f"error: the command {name!r} is not installed")
        assert "pip install ottava-" in done.output
    assert "pip install ottava-integrations" in done.output
    assert CliRunner().invoke(main.app, ["nonesuch"]).exit_code == 2


PROBE = """
import sys, ottava
from ottava.cli.main import app
from ottava.recipes.registry import list_recipes

def imported():
    return [name for name in ("torch", "aaa_impl") if name in sys.modules]

assert "mine" in [spec.name for spec in list_recipes()]
print(imported())
import aaa_impl
print(imported())
"""


def test_listing_recipes_imports_neither_torch_nor_the_recipe(tmp_path: Path) -> None:
    plugin(tmp_path, "aaa-good", "aaa_good", GOOD + HOOK.format(name="mine", module="aaa_impl"))
    (tmp_path / "aaa_impl.py").write_text("Thing = dict\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    # The second line shows that the probe sees an import.
    assert done.stdout.split("\n")[:2] == ["[]", "['aaa_impl']"], done.stderr
