"""``ottava recipes`` and ``ottava doctor`` as a user runs them, with broken plugins and bad environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = "import ottava.recipes.hookspecs as h\nfrom ottava.recipes.spec import RecipeSpec\n"
HOOK = (
    "@h.hookimpl\ndef ottava_recipes():\n"
    "    return [RecipeSpec(name='{name}', summary='s', factory='{module}:Thing')]\n"
)


def plugin(folder: Path, dist: str, module: str, source: str) -> None:
    """A distribution as pip would leave it: a module and its dist-info with an entry point."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{dist.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[ottava]\nmain = {module}\n")


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", "from ottava.cli.main import app; app()", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **environment},
    )


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    plugin(tmp_path, "aaa-good", "aaa_good", GOOD + HOOK.format(name="mine", module="aaa_good"))
    plugin(tmp_path, "bbb-raises", "bbb_raises", "raise ZeroDivisionError('at import')")
    plugin(
        tmp_path, "ccc-signature", "ccc_signature", GOOD + "@h.hookimpl\ndef ottava_recipes(wrong):\n    return []\n"
    )
    plugin(tmp_path, "ddd-taken", "ddd_taken", GOOD + HOOK.format(name="mine", module="ddd_taken"))
    plugin(tmp_path, "eee-unknown", "eee_unknown", GOOD + "@h.hookimpl\ndef ottava_nonesuch():\n    return []\n")
    old = HOOK.format(name="o", module="m").replace("summary='s'", "summary='s', api_version=9")
    plugin(tmp_path, "fff-old", "fff_old", GOOD + old)
    return tmp_path


def test_recipes_lists_the_healthy_and_names_the_broken(plugins: Path) -> None:
    done = run(plugins, "recipes", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["distribution"]: row for row in json.loads(done.stdout)}
    assert rows["aaa-good"]["status"] == "ok"
    assert rows["aaa-good"]["name"] == "mine"
    assert "at import" in rows["bbb-raises"]["error"]
    assert "wrong" in rows["ccc-signature"]["error"]
    for part in ("mine", "aaa-good", "ddd-taken", "1.2"):
        assert part in rows["ddd-taken"]["error"]
    assert "ottava_nonesuch" in rows["eee-unknown"]["error"]
    assert "version 9" in rows["fff-old"]["error"]
    assert all(rows[d]["status"] == "broken" for d in rows if d[:3] in ("bbb", "ccc", "ddd", "eee", "fff"))
    text = run(plugins, "recipes").stdout
    assert "mine" in text
    assert "at import" in text


def test_plugins_can_be_disabled_or_required(plugins: Path) -> None:
    disabled = "bbb-raises,ccc_signature,aaa-good,eee-unknown,fff-old"
    rows = json.loads(run(plugins, "recipes", "--json", OTTAVA_DISABLE_PLUGINS=disabled).stdout)
    statuses = {row["distribution"]: row["status"] for row in rows}
    assert statuses["bbb-raises"] == statuses["ccc-signature"] == "disabled"
    assert statuses["ddd-taken"] == "ok"
    strict = run(plugins, "recipes", OTTAVA_STRICT_PLUGINS="1")
    assert strict.returncode != 0
    assert "bbb-raises" in strict.stderr


def test_doctor_says_what_is_wrong(plugins: Path, tmp_path: Path) -> None:
    done = run(plugins, "doctor", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    wrong = {check["name"] for check in report["checks"] if not check["ok"]}
    assert "plugin bbb-raises:main" in wrong
    assert "kernel self-test" not in wrong
    healthy = run(tmp_path / "empty", "doctor")
    assert healthy.returncode == 0, healthy.stdout
    assert "instruction set" in healthy.stdout
    for name, value in (("OTTAVA_BACKEND", "nonesuch"), ("OTTAVA_ISA", "nonesuch")):
        bad = run(tmp_path / "empty", "doctor", **{name: value})
        assert bad.returncode == 1
        assert "nonesuch" in bad.stdout
        assert "Traceback" not in bad.stderr


PROBE = (
    "import sys, ottava; from ottava.cli.main import app; from ottava.recipes.registry import list_recipes;"
    "list_recipes(); {extra}; bad = [m for m in ('torch', 'aaa_impl') if m in sys.modules];"
    "sys.exit(','.join(bad) or 0)"
)


@pytest.mark.parametrize(
    ("extra", "expected"), [("pass", ""), ("ottava.convert", "torch"), ("import aaa_impl", "aaa_impl")]
)
def test_listing_recipes_imports_neither_torch_nor_the_recipe(tmp_path: Path, extra: str, expected: str) -> None:
    # The second and third case show that the probe can fail.
    plugin(tmp_path, "aaa-good", "aaa_good", GOOD + HOOK.format(name="mine", module="aaa_impl"))
    (tmp_path / "aaa_impl.py").write_text("Thing = dict\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(extra=extra)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stderr.strip() == expected
    assert done.returncode == (1 if expected else 0)
