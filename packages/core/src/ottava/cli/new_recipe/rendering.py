"""The files of a new recipe package."""

from __future__ import annotations

from importlib.resources import files
from string import Template

import ottava
from ottava.cli.new_recipe.names import Names

# File of the package -> its template, in the folder beside this module. Both have $names.
FILES = {
    "pyproject.toml": "pyproject.toml.tmpl",
    "README.md": "README.md.tmpl",
    ".gitignore": "gitignore.tmpl",
    ".github/workflows/tests.yml": "tests.yml.tmpl",
    "src/$package/__init__.py": "init.py.tmpl",
    "src/$package/plugin.py": "plugin.py.tmpl",
    "src/$package/recipe.py": "recipe.py.tmpl",
    "src/$package/py.typed": "py.typed.tmpl",
    "tests/test_conformance.py": "test_conformance.py.tmpl",
    "tests/test_$package.py": "test_recipe.py.tmpl",
}


def compatible_versions(version: str) -> str:
    """The versions of Ottava that a package written for ``version`` works with: up to the next that may break it.

    Before 1.0 that is every second number, ``>=0.1,<0.2``; from then on every first, ``>=1.2,<2``.
    """
    major, minor = (int(number) for number in version.split(".")[:2])
    return f">={major}.{minor},<{f'0.{minor + 1}' if major == 0 else major + 1}"


def render(names: Names) -> dict[str, str]:
    """Path in the package, with slashes, to the text of the file."""
    values = {
        "name": names.recipe,
        "package": names.package,
        "distribution": names.distribution,
        "format": names.format,
        "ottava_versions": compatible_versions(ottava.__version__),
    }
    folder = files("ottava.cli.new_recipe") / "template"
    return {
        Template(path).substitute(values): Template((folder / source).read_text("utf-8")).substitute(values)
        for path, source in FILES.items()
    }
