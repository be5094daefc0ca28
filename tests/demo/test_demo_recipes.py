"""The demo with recipes that can be trained, and others that cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.core.fake_plugins import RECIPE, offers, plugin, run

DEMO = ["demo", "--steps", "1", "--size", "tiny", "--device", "cpu"]
TRAINS = """
from tests.core.layouts.layouts import E4M3, PerTensor
Thing.make_quantizer = lambda self, role, **k: PerTensor(E4M3)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """One recipe that trains and every way not to."""
    folder = tmp_path / "site"
    folder.mkdir()
    for name, source in {
        "good": TRAINS,
        "raises": "def Thing(): raise ValueError('<b>ctor</b> [/red]')",
        "needs": "class Thing(Thing):\n    def __init__(self, scale): ...",
        "gone": "del Thing",
    }.items():
        plugin(folder, f"aaa-{name}", f"aaa_{name}", offers(name, factory=f"impl_{name}:Thing"))
        (folder / f"impl_{name}.py").write_text(RECIPE + source)
    for dist in ("bbb-one", "bbb-two"):
        plugin(folder, dist, dist.replace("-", "_"), offers("taken", factory="impl_good:Thing"))
    plugin(folder, "ccc-broken", "ccc_broken", "raise ZeroDivisionError('at import')")
    return folder


def test_what_fails_is_left_out_and_told(site: Path, tmp_path: Path) -> None:
    """Where it is built or in training; the others are trained."""
    plugin(site, "aaa-fails", "aaa_fails", offers("fails", factory="impl_fails:Thing"))
    failing = "def fail(self, role, **k): raise ValueError('no quantizer')\n"
    (site / "impl_fails.py").write_text(f"{RECIPE}{failing}Thing.make_quantizer = fail\n")
    done = run(site, *DEMO, "--out", str(tmp_path / "out"))
    assert done.returncode == 1, done.stderr
    assert "fails failed in training: ValueError: no quantizer" in done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    trained = {one["name"] for one in results["runs"]}
    assert {"bf16", "good"} <= trained
    page = (tmp_path / "out" / "index.html").read_text()
    reasons = {one["name"]: one["reason"] for one in results["skipped"]}
    for name, words in (
        ("raises", "ctor"),
        ("needs", "missing a required argument: 'scale'"),
        ("gone", "cannot be imported"),
        ("taken", "bbb-one 1.2"),
        ("ccc-broken:main", "at import"),
        ("fails", "no quantizer"),
    ):
        assert words in reasons.pop(name)
        assert name not in trained
        assert name == "fails" or f"skipped {name}: " in done.stderr
        assert f"<li>{name}: " in page
        assert [line for line in done.stdout.splitlines() if name in line and "not run" in line]
    assert not reasons
    assert "<b>ctor" not in page


def test_what_is_asked_for_must_be_fit(site: Path, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"))
    strict = {"OTTAVA_STRICT_PLUGINS": "true"}
    cases: list[tuple[tuple[str, ...], str, dict[str, str]]] = [
        (("--recipe", "raises"), "of aaa-raises 1.2 cannot be built: ValueError: <b>ctor", {}),
        (("--recipe", "nonesuch"), "no installed package provides recipe 'nonesuch'", {}),
        (("--seed", "99999999999999999999"), "seed", {}),
        (("--out", "/proc/nonesuch"), "/proc/nonesuch", {}),
        ((), "plugin ccc-broken:main 1.2 is broken: ZeroDivisionError", strict),
    ]
    for options, words, variables in cases:
        done = run(site, *DEMO, "--recipe", "good", *out, *options, **variables)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert words in line
    assert not (tmp_path / "out").exists()
