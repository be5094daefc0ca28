"""The files of a new recipe package."""

from __future__ import annotations

from pathlib import Path
from string import Template

import ottava
from ottava_testing.new_recipe.names import Names

# The package as it is to be, PACKAGE in paths for its module's name, and $names in texts; each file
# ends in .tmpl.
TEMPLATE = Path(__file__).parent / "template"


def compatible_versions(version: str) -> str:
    """The versions of Ottava that a package written for ``version`` works with: up to the next that
    may break it.

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
    paths = {
        path.relative_to(TEMPLATE).as_posix(): path for path in sorted(TEMPLATE.rglob("*.tmpl"))
    }
    return {
        name.removesuffix(".tmpl").replace("PACKAGE", names.package): Template(
            path.read_text("utf-8")
        ).substitute(values)
        for name, path in paths.items()
    }
