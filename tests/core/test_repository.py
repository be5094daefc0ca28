"""What the root of the repository says to people and to machines agrees with the rest of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
#: What runs code that a file contains.
UNSAFE = re.compile(
    r"\bpickle\.loads?\(|\bUnpickler\(|\byaml\.(?:unsafe_|full_)?load\(|\bweights_only=False"
    r"|\ballow_pickle=True|(?<![.`\w])(?<!def )(?:eval|exec)\("
)


def tools() -> dict[str, list[str]]:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    return dict(groups)


def test_pre_commit_has_the_versions_of_nox() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    repeated = re.findall(r'additional_dependencies: \["(.+)"\]', text)
    assert set(repeated) == set(tools()["lint"])
    pins = [tool for group in ("lint", "types") for tool in tools()[group] if "==" in tool]
    assert [pin.partition("==")[0] for pin in pins] == ["ruff", "clang-format", "mypy"]
    # The sessions install these, and state no versions of their own.
    noxfile = (ROOT / "noxfile.py").read_text()
    assert re.search(r"(ruff|clang-format|mypy)[=<>~]", noxfile) is None
    assert {f'TOOLS["{group}"]' for group in tools()} <= set(re.findall(r"TOOLS\[.+?\]", noxfile))


def test_pre_commit_runs_what_nox_runs() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    noxfile = (ROOT / "noxfile.py").read_text()
    assert "entry: ruff check ." in text
    assert 'session.run("ruff", "check", ".")' in noxfile
    assert "entry: ruff format ." in text
    assert '"ruff", "format", "--check", "."' in noxfile
    assert text.count(".ci/types") == 1
    assert 'session.run(".ci/types"' in noxfile
    # clang-format gets the same files.
    (pattern,) = re.findall(r"files: (\S+)\n +- id: mypy", text)
    folders = [ROOT / "packages" / "core" / "csrc", ROOT / "tests" / "core" / "csrc"]
    native = [p for f in folders for p in f.rglob("*") if p.suffix in (".h", ".cpp", ".cu")]
    names = [path.relative_to(ROOT).as_posix() for path in native]
    assert len(names) > 50
    assert [name for name in names if re.search(pattern, name) is None] == []


def test_ci_calls_the_script_that_runs_everywhere() -> None:
    assert re.search(r"- run: \.ci/run$", (ROOT / ".github/workflows/ci.yml").read_text(), re.M)


def heading_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as a forge and Sphinx make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for path, anchor in LINK.findall(prose):
        target = page.parent / path if path else page
        if target == ROOT / "docs" / "contributing.md":
            target = ROOT / "CONTRIBUTING.md"
        if not target.exists() or (anchor and anchor not in heading_anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert broken == []


def test_the_contributing_page_of_the_documentation_is_that_of_the_root() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text()
    assert page == "```{include} ../CONTRIBUTING.md\n:relative-docs: docs/\n```\n"


def test_nothing_that_is_read_from_a_file_is_run() -> None:
    """SECURITY.md promises it."""
    every = sorted(ROOT.glob("packages/*/src/**/*.py"))
    # The conformance kit sends pickles to processes that it starts.
    kit = ROOT / "packages" / "testing" / "src" / "ottava_testing"
    sources = [p for p in every if p not in (kit / "subject.py", kit / "checks" / "ranks.py")]
    found = {f"{p.name}: {m[0]}" for p in sources for m in UNSAFE.finditer(p.read_text())}
    calls = [text for p in sources for text in re.findall(r"\btorch\.load\(([^)]*)", p.read_text())]
    assert len(every) - 2 == len(sources) > 150
    assert found == set()
    assert [call for call in calls if "weights_only=True" not in call] == []


@pytest.mark.parametrize(
    "planted",
    ["pickle.load(f)", "yaml.load(f, Loader)", "torch.load(p, weights_only=False)", "eval(text)"],
)
def test_a_planted_read_that_runs_code_is_found(planted: str) -> None:
    assert UNSAFE.search(planted)
    assert not UNSAFE.search("model.eval(); yaml.safe_load(f); regex.exec(text)")
