"""Recipe files: which quantizer serves which layers and roles, in YAML or TOML."""

from ottava_custom.files.factory import SUFFIXES, FileFactory, load_factory

__all__ = ["SUFFIXES", "FileFactory", "load_factory"]
