"""The page of ``ottava analyze``: one file that asks for nothing else, in a browser without an
error."""

import html
import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser

import pytest
import torch

import ottava_debug
from benchmarks.installed import recipes
from ottava_debug.analysis.output import suggestion
from ottava_debug.analysis.page import page
from ottava_debug.analysis.report import Analysis, Noise, TensorReport
from ottava_debug.measures import Measures
from tests.debug.checkpoints import demo_checkpoint, real_checkpoint

ASKING = {
    "src",
    "srcset",
    "href",
    "action",
    "formaction",
    "poster",
    "data",
    "background",
    "manifest",
    "ping",
    "cite",
}
HARMFUL = {"iframe", "object", "embed", "base", "form", "audio", "video", "img"}


class Parser(HTMLParser):
    """What a page asks for, its tags, and its text."""

    def __init__(self, text):
        super().__init__()
        self.asked, self.tags, self.text = [], [], {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.asked += [(tag, key, value) for key, value in attributes if key in ASKING]
        self.asked += [(tag, key, value) for key, value in attributes if key.startswith("on")]
        self.asked += [(tag, key, value) for key, value in attributes if "url(" in (value or "")]

    def handle_data(self, data):
        self.text[self.tags[-1] if self.tags else ""] = (
            self.text.get(self.tags[-1] if self.tags else "", "") + data
        )


def report_of(layers, recipes=("current", "mxfp8")):
    """Any report, of invented numbers."""
    tensors = []
    for number, layer in enumerate(layers):
        for role in ("weight", "input", "grad_output"):
            measures = Measures(100, 0, 2.0, number % 40, 0.5, 10.0 + number % 30, 0.99)
            noise = {recipe: Noise(measures) for recipe in recipes}
            exponents = {exponent: 5 + exponent % 7 for exponent in range(-30, 1)}
            tensors.append(
                TensorReport(layer, role, (10, 10), "bfloat16", 100, 0, 2.0, exponents, noise)
            )
    return Analysis("a <model>", tuple(recipes), tuple(tensors), steps=2)


def rendered(report):
    installed = {*report.recipes} <= {*recipes()}
    return page(report, suggestion(report) if installed else "default: current")


def test_the_page_asks_for_nothing_and_shows_the_numbers(tmp_path):
    report = ottava_debug.analyze(demo_checkpoint(tmp_path))
    text = rendered(report)
    parser = Parser(text)
    assert parser.asked == [("link", "href", "data:,")]
    assert not HARMFUL & {*parser.tags}
    assert not re.search(r"url\(|@import", parser.text["style"])
    assert not re.search(r"fetch|XMLHttp|import\(|WebSocket|https?:|//\w", parser.text["script"])
    assert parser.tags.count("svg") == len(report.tensors) == 16
    for tensor in report.tensors:
        for noise in tensor.noise.values():
            assert f'data-t="{noise.sqnr:.1f}|' in text
    assert text.count('class="c k') == len(report.tensors) * len(report.recipes)
    assert html.escape(suggestion(report)) in text


def test_names_are_escaped():
    name = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'"
    parser = Parser(rendered(report_of([name])))
    assert parser.tags.count("script") == 1
    assert "img" not in parser.tags
    assert parser.asked == [("link", "href", "data:,")]


def test_a_page_of_five_hundred_layers_is_made_at_once():
    start = time.perf_counter()
    text = rendered(
        report_of(
            [f"model.layers.{n // 7}.mlp.{n % 7}" for n in range(500)], recipes=tuple("abcdef")
        )
    )
    assert time.perf_counter() - start < 20
    assert len(text) < 6_000_000


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
  change("metric", "1");
  found.underflow = column(4);
  change("only", true);
  found.bad = column(0);
  change("only", false);
  change("filter", "BLOCKS.2");
  found.filtered = column(0);
  found.resources = performance.getEntriesByType("resource").map(entry => entry.name);
  found.wide = document.documentElement.scrollWidth > innerWidth;
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


def in_browser(text, folder, *options):
    """What :data:`WATCH` finds in a browser, and what the browser's console says."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("the distribution's package chromium is not installed")
    file = folder / "watched.html"
    file.write_text(text.replace("<head>", WATCH, 1), encoding="utf-8")
    quiet = (
        "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    )
    quiet += (
        " --disable-component-update --disable-sync --enable-logging=stderr "
        "--virtual-time-budget=5000"
    )
    profile = folder / "profile"
    command = [
        browser,
        "--headless",
        *quiet.split(),
        f"--user-data-dir={profile}",
        *options,
        "--dump-dom",
        file.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    dumped = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert dumped, done.stderr[-2000:]
    return json.loads(html.unescape(dumped[1])), [
        line for line in done.stderr.splitlines() if "CONSOLE" in line
    ]


@pytest.mark.parametrize("of", ["demo", "real"])
def test_a_browser_shows_it_without_an_error(of, tmp_path):
    path = demo_checkpoint(tmp_path) if of == "demo" else real_checkpoint()
    report = ottava_debug.analyze(path, recipes=["current", "mxfp8"])
    ottava_debug.write_html(report, tmp_path / "report.html")
    found, console = in_browser((tmp_path / "report.html").read_text(), tmp_path)
    assert found["errors"] == console == []
    assert found["resources"] == []
    assert found["layers"] == [tensor.layer for tensor in report.tensors]
    values = [f"{tensor.noise['current'].sqnr:.1f}" for tensor in report.tensors]
    assert found["ascending"] == sorted(values, key=float)
    assert found["descending"] == sorted(values, key=float, reverse=True)
    assert len(found["underflow"]) == len(values)
    assert all(re.fullmatch(r"0|(< )?[\d.]+ %", text) for text in found["underflow"])
    assert {*found["bad"]} == {*report.complaints("current")}
    assert {*found["filtered"]} == {layer for layer in report.layers if "blocks.2" in layer}


def test_a_narrow_window_is_not_wider_than_itself(tmp_path):
    text = rendered(
        report_of(
            [f"encoder.layer.{n}.attention.output.dense" for n in range(4)], tuple("abcdefgh")
        )
    )
    found, console = in_browser(text, tmp_path, "--window-size=500,900")
    assert found["wide"] is False
    assert found["errors"] == console == []


def test_the_browser_would_tell_of_a_request_and_of_an_error(tmp_path):
    text = rendered(report_of(["a"])).replace(
        "</body>", '<img src="http://127.0.0.1:9/x.png"><script>nothing()</script>'
    )
    found, console = in_browser(text, tmp_path)
    assert any("127.0.0.1" in error for error in found["errors"])
    assert any("nothing" in error for error in found["errors"])
    assert any("CONSOLE" in line for line in console)


def test_layers_without_values_and_broken_recipes_have_a_page():
    report = ottava_debug.analyze({"weight": torch.zeros(32, 32)}, recipes=["current"])
    assert report.layers == ("",)
    assert "(root)" in rendered(report)
    broken = Noise(error="no <luck>")
    tensor = TensorReport("a", "weight", (2, 2), "float32", 4, 4, 0.0, {}, {"x": broken})
    text = rendered(
        Analysis(
            "x", ("current",), (TensorReport(**(vars(tensor) | {"noise": {"current": broken}})),)
        )
    )
    assert "fails: no &lt;luck&gt;" in text
