"""Recipe files: which quantizer serves which layers and roles, in YAML or TOML."""

from ottava_custom.files.factory import FileFactory, load_factory
from ottava_custom.files.language import SUFFIXES

__all__ = ["SUFFIXES", "FileFactory", "load_factory"]
