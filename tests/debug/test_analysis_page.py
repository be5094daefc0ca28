"""The page of ``ottava analyze``: one file that requests nothing else, without an error in a
browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava_debug
from ottava_debug import Analysis
from ottava_debug.analysis.output import suggestion
from ottava_debug.analysis.page import page
from ottava_debug.analysis.report import Noise
from tests.debug.analyses import demo_checkpoint, noise_of, tensor_of

REQUESTS = re.compile(
    r"\s(?:src|srcset|href|action|formaction|poster|background|manifest|ping|on\w+)=[\"']?([^\"'>\s]*)"
)
HARMFUL = re.compile(r"<(iframe|object|embed|base|form|audio|video|img)|url\(|@import")
SCRIPTED = re.compile(r"fetch|XMLHttp|import\(|WebSocket|https?:|//\w")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    path = demo_checkpoint(tmp_path_factory.mktemp("demo"))
    return ottava_debug.analyze(path, recipes=["current", "mxfp8"])


def test_the_page_requests_nothing_and_shows_the_numbers(demo: Analysis) -> None:
    text = page(demo, suggestion(demo))
    assert REQUESTS.findall(text) == ["data:,"]
    assert not HARMFUL.search(text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    assert not SCRIPTED.search(script)
    assert text.count("<svg") == len(demo.tensors) == 16
    for tensor in demo.tensors:
        for noise in tensor.noise.values():
            assert f'data-t="{noise.sqnr:.1f}|' in text
    assert text.count('class="c k') == len(demo.tensors) * len(demo.recipes)
    assert html.escape(suggestion(demo)) in text


def test_names_and_reasons_are_escaped() -> None:
    def marks(name: str) -> list[int]:
        tensor = tensor_of(name, "weight", current=noise_of(10.0, 3.0))
        text = page(Analysis("a <model>", ("current",), (tensor,)), name)
        return [text.count(mark) for mark in "<>\"'"]

    assert marks("<script>alert('x')</script><img src=x onerror=alert(1)>\"'") == marks("name")
    broken = tensor_of("", "weight", current=Noise(error="no <luck>"))
    text = page(Analysis("x", ("current",), (broken,)), "")
    assert "fails: no &lt;luck&gt;" in text
    assert "(root)" in text
    zeros = ottava_debug.analyze({"weight": torch.zeros(32, 32)}, recipes=["current"])
    assert "no value but zeros" in page(zeros, "")


# -- in a browser --

WATCH = """<head><script>
window.found = {errors: []};
addEventListener("error", event => found.errors.push(String(event.message)), true);
addEventListener("securitypolicyviolation", event => found.errors.push(event.blockedURI));
addEventListener("load", () => {
  const shown = "#rows tr:not([hidden])";
  const column = number =>
    Array.from(document.querySelectorAll(shown), row => row.cells[number].textContent);
  const change = (id, value) => { const element = document.getElementById(id);
    if (element.type === "checkbox") element.checked = value; else element.value = value;
    element.dispatchEvent(new Event("change")); element.dispatchEvent(new Event("input")); };
  found.layers = column(0);
  document.querySelector("[data-sort='0']").click();
  found.ascending = column(4);
  document.querySelector("[data-sort='0']").click();
  found.descending = column(4);
  change("only", true);
  found.bad = column(0);
  change("only", false);
  change("filter", "BLOCKS.2");
  found.filtered = column(0);
  found.resources = performance.getEntriesByType("resource").map(entry => entry.name);
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


def in_browser(text: str, folder: Path, *options: str) -> tuple[dict[str, Any], list[str]]:
    """What :data:`WATCH` finds in a browser, and the lines of the browser's console."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("the distribution's package chromium is not installed")
    file = folder / "watched.html"
    file.write_text(text.replace("<head>", WATCH, 1), encoding="utf-8")
    quiet = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --disable-component-update --disable-sync "
        "--enable-logging=stderr --virtual-time-budget=5000 --dump-dom"
    )
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [browser, *quiet.split(), profile, *options, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    dumped = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert dumped, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(dumped[1])), console


def test_a_browser_sorts_and_filters_without_an_error(demo: Analysis, tmp_path: Path) -> None:
    ottava_debug.write_html(demo, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    found, console = in_browser(text, tmp_path, "--window-size=500,900")
    assert found["errors"] == found["resources"] == console == []
    assert found["layers"] == [tensor.layer for tensor in demo.tensors]
    values = [f"{tensor.noise['current'].sqnr:.1f}" for tensor in demo.tensors]
    assert found["ascending"] == sorted(values, key=float)
    assert found["descending"] == sorted(values, key=float, reverse=True)
    assert {*found["bad"]} == {*demo.complaints("current")}
    assert {*found["filtered"]} == {layer for layer in demo.layers if "blocks.2" in layer}
