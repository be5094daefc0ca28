"""The checks, one module for each subject. Importing a module puts its checks into the table."""

import importlib

from ottava_testing.table import CHECKS, Check

# Checks that others build on come first, so that their failures are reported first.
for _name in (
    *("quantizers", "values", "products", "storages", "files", "tensors", "updates", "autograd"),
    *("layers", "accumulation", "training", "stochastic", "compiling", "states", "ranks"),
):
    importlib.import_module(f"{__name__}.{_name}")


def list_checks() -> tuple[Check, ...]:
    """All checks, in the order in which they run."""
    return tuple(CHECKS.values())
