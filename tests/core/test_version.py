"""The packages have one version, which core states; every other place says the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import ottava

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
#: A requirement of one of the packages, and its bounds.
REQUIREMENT = re.compile(r"\bottava[a-z0-9-]*(>=[\d.]+,<[\d.]+)")


def bounds() -> str:
    """The versions that the packages accept of one another: those with the same API."""
    major, minor = (int(number) for number in ottava.__version__.split(".")[:2])
    return f">={major}.{minor},<" + (f"{major}.{minor + 1}" if major == 0 else f"{major + 1}")


def test_every_package_reads_its_version_from_its_module() -> None:
    versions = {}
    for package in PACKAGES:
        settings = tomllib.loads((package / "pyproject.toml").read_text())
        assert settings["project"]["dynamic"] == ["version"], package.name
        # A file of the package itself, because an sdist has no other.
        source = package / settings["tool"]["hatch"]["version"]["path"]
        assert package in source.resolve().parents
        versions[source] = re.findall(r'^__version__ = "(.+)"$', source.read_text(), re.M)
    assert len(versions) > 10
    assert {p: v for p, v in versions.items() if v != [ottava.__version__]} == {}


def test_other_files_say_the_same_version() -> None:
    assert f"\nversion: {ottava.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert changes[0] == ottava.__version__


def test_every_requirement_of_a_package_has_the_bounds_of_the_version() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")]
    files = [package / "pyproject.toml" for package in PACKAGES] + pages
    found = {path: REQUIREMENT.findall(path.read_text()) for path in files}
    assert sum(map(len, found.values())) > 10
    wrong = {path: texts for path, texts in found.items() if set(texts) - {bounds()}}
    assert wrong == {}
