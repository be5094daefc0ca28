"""The checks, one module for each subject. Importing a module puts its checks into the table."""

from ottava_testing.checks import (
    accumulation,
    autograd,
    compiling,
    files,
    gemms,
    layers,
    quantizers,
    ranks,
    states,
    storages,
    tensors,
    training,
    updates,
    values,
)
from ottava_testing.table import CHECKS, Check

# Checks that others build on come first, so that their failures are reported first.
_ORDER = (
    *(quantizers, values, gemms, storages, files, tensors, updates, autograd, layers),
    *(accumulation, training, compiling, states, ranks),
)


def list_checks() -> tuple[Check, ...]:
    """All checks, in the order in which they run."""
    return tuple(
        c for module in _ORDER for c in CHECKS.values() if c.run.__module__ == module.__name__
    )
