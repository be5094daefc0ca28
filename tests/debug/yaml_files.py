"""Texts of configuration files."""

from __future__ import annotations

#: A file in which nothing is wrong.
GOOD = """
it:
  enabled: True
  layers:
    layer_name_regex_pattern: .*
  transformer_engine:
    FakeQuant:
      enabled: True
      gemms: [fprop]
      tensors: [weight]
      quant_format: FP8E4M3
"""


def section(
    feature: str,
    options: str = "",
    *,
    name: str = "it",
    layers: str = "layer_types: [layer]",
    namespace: str = "transformer_engine",
    more: str = "",
) -> str:
    """A section with one feature, whose options are in YAML's flow style, and another key."""
    enabled = ", ".join(filter(None, ["enabled: True", options]))
    last = f"  {more}\n" if more else ""
    return (
        f"{name}:\n"
        f"  enabled: True\n"
        f"  layers: {{{layers}}}\n"
        f"  {namespace}:\n"
        f"    {feature}: {{{enabled}}}\n"
        f"{last}"
    )
