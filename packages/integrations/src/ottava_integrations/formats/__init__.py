"""The published formats of quantized weights: one table, and the tensors of a layer in each.

- ``schemes``: the table: names, shapes, dtypes and recipes.
- ``tensors``: a quantized weight as the tensors that a format has for it, and back.
- ``companions``: what a file holds of a layer besides.
"""

from ottava_integrations.formats.companions import (
    Companions,
    attach,
    companions_of,
    is_as_published,
)
from ottava_integrations.formats.schemes import (
    FORMATS,
    SCHEMES,
    Library,
    Names,
    RecipeChoice,
    Scheme,
    scheme_of,
    schemes_of,
)
from ottava_integrations.formats.tensors import (
    PublishedLevel,
    published_tensors,
    quantized_weight,
)

__all__ = [
    "FORMATS",
    "SCHEMES",
    "Companions",
    "Library",
    "Names",
    "PublishedLevel",
    "RecipeChoice",
    "Scheme",
    "attach",
    "companions_of",
    "is_as_published",
    "published_tensors",
    "quantized_weight",
    "scheme_of",
    "schemes_of",
]
