"""What the root of the repository says to people and to machines agrees with the rest of it, and
what no source does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
#: What runs code that a file contains.
UNSAFE = re.compile(
    r"\bpickle\.loads?\(|\bUnpickler\(|\byaml\.(?:unsafe_|full_)?load\(|\bweights_only=False"
    r"|\ballow_pickle=True|(?<![.`\w])(?<!def )(?:eval|exec)\("
)


def test_pre_commit_and_nox_run_the_same_tools_and_ci_the_same_script() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    text, noxfile = ((ROOT / p).read_text() for p in (".pre-commit-config.yaml", "noxfile.py"))
    assert set(re.findall(r'additional_dependencies: \["(.+)"\]', text)) == set(groups["lint"])
    pins = [tool for group in ("lint", "types") for tool in groups[group] if "==" in tool]
    assert [pin.partition("==")[0] for pin in pins] == ["ruff", "clang-format", "mypy"]
    # The sessions install these, and state no versions of their own.
    assert re.search(r"(ruff|clang-format|mypy)[=<>~]", noxfile) is None
    assert {f'TOOLS["{group}"]' for group in groups} <= set(re.findall(r"TOOLS\[.+?\]", noxfile))
    for entry, command in (
        ("entry: ruff check .", 'session.run("ruff", "check", ".")'),
        ("entry: ruff format .", '"ruff", "format", "--check", "."'),
        (".ci/types", 'session.run(".ci/types"'),
    ):
        assert entry in text
        assert command in noxfile
    # clang-format gets the same files.
    (pattern,) = re.findall(r"files: (\S+)\n +- id: mypy", text)
    folders = [ROOT / "packages" / "core" / "csrc", ROOT / "tests" / "core" / "csrc"]
    native = [p for f in folders for p in f.rglob("*") if p.suffix in (".h", ".cpp", ".cu")]
    names = [path.relative_to(ROOT).as_posix() for path in native]
    assert len(names) > 50
    assert [name for name in names if re.search(pattern, name) is None] == []
    assert re.search(r"- run: \.ci/run$", (ROOT / ".github/workflows/ci.yml").read_text(), re.M)


def requirements(package: str) -> set[str]:
    """The folders of a package and of all packages of the repository that it needs."""
    path = ROOT / "packages" / package / "pyproject.toml"
    needed = tomllib.loads(path.read_text())["project"]["dependencies"]
    names = [re.match(r"[\w-]+", each)[0] for each in needed]  # type: ignore[index]
    folders = {"core" if name == "ottava" else name.removeprefix("ottava-") for name in names}
    own = {name for name in folders if (ROOT / "packages" / name / "pyproject.toml").exists()}
    return {package}.union(*map(requirements, own - {package}))


def test_each_readme_installs_all_that_its_package_needs() -> None:
    """No index has the packages, so that pip finds none of them by itself."""
    for path in sorted(ROOT.glob("packages/*/README.md")):
        package, text = path.parent.name, path.read_text().replace("\\\n", " ")
        if package != "core":
            lines = re.findall(r"^    pip install (\./packages/.+)$", text, re.M)
            assert lines, package
            for line in lines:
                installed = set(re.findall(r"\./packages/([\w-]+)", line))
                assert requirements(package) <= installed, package


def test_nothing_that_is_read_from_a_file_is_run() -> None:
    """SECURITY.md promises it. The conformance kit sends pickles to processes that it starts."""
    sends = ("ottava_testing/subject.py", "ottava_testing/checks/ranks.py")
    sources = [path for path in SOURCES if not path.as_posix().endswith(sends)]
    assert len(sources) == len(SOURCES) - len(sends) > 150
    assert {f"{p.name}: {m[0]}" for p in sources for m in UNSAFE.finditer(p.read_text())} == set()
    calls = [c for p in SOURCES for c in re.findall(r"\btorch\.load\(([^)]*)", p.read_text())]
    assert [call for call in calls if "weights_only=True" not in call] == []
    for planted in ("pickle.load(f)", "yaml.load(f, L)", "load(p, weights_only=False)", "eval(t)"):
        assert UNSAFE.search(planted)
    assert not UNSAFE.search("model.eval(); yaml.safe_load(f); regex.exec(text)")
