"""What is wrong in a recipe file is told with its place: a line and a column in YAML, the path of a
key in TOML."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ottava.errors import DTypeError, OptionError, OttavaError, PluginError, RecipeNotFoundError
from ottava_custom.files import FileFactory, load_factory
from ottava_custom.files.source import MAX_BYTES

pytestmark = pytest.mark.usefixtures("published_for_files")

IN_LAYERS = "default: alpha\nlayers:\n"
# Text, in which § marks what is wrong: words of the error.
YAML = {
    "default: alpha\n§layer:\n- {match: a, all: alpha}": (
        "a file has no key 'layer'. Expected: one of default, layers. Remedy: use 'layers'."
    ),
    f"{IN_LAYERS}- match: a\n  §wieght: alpha": (
        "a rule has no key 'wieght'. Expected: one of match, all, forward, backward, input, weight,"
        " output, grad_output, grad_input. Remedy: use 'weight'."
    ),
    "default:\n  §recipes: alpha": (
        "what serves a role has no key 'recipes'. Expected: one of recipe, factory, rowwise, "
        "columnwise. Remedy: use 'recipe'."
    ),
    "default: {§forward: alpha}": 'roles are told apart in a rule; one with match "*" is for all',
    "default:\n  §flag: 1\n  factory: weights": "a factory has no key 'flag'. Expected: one of",
    "default:\n  §rowwise: alpha": (
        "a hybrid has no columnwise. Expected: the name of a recipe, identity, or a mapping with "
        "recipe, factory, or rowwise and columnwise. Remedy: identity keeps high precision."
    ),
    "default: {rowwise: alpha,\n  columnwise: alpha, §row: 1}": "a hybrid has no key 'row'",
    "default: {columnwise: alpha, rowwise: §{rowwise: alpha, columnwise: alpha}}": (
        "a hybrid inside a hybrid"
    ),
    "default:\n  rowwise: alpha\n  columnwise: §keeper": (
        "a recipe that keeps state cannot serve one direction. Expected: recipes without state "
        "for rowwise and columnwise. Remedy: let it serve the whole role."
    ),
    "default:\n  rowwise: alpha\n  columnwise: {recipe: §custom, file: FOLDER/state.yaml}": (
        "a recipe that keeps state cannot serve one direction"
    ),
    f"{IN_LAYERS}- match: a\n  all: {{rowwise: alpha, columnwise: §keeper}}": "that keeps state",
    "default: alpha\nlayers: [{match: a, all: alpha}]\n§default: identity": (
        "key 'default' stands there twice, first in line 1. Expected: each key once."
    ),
    "# x\n§- a": "a file is a list. Expected: a mapping with default, layers.",
    "default: alpha\nlayers: §{match: a, all: alpha}": "layers is a mapping. Expected: a list",
    "default: alpha\nlayers: §[]\n": "without entries. Expected: a list of rules. Remedy: take",
    "default: alpha\nlayers:§\n": "layers is nothing",
    f"{IN_LAYERS}- §alpha": "a rule is text, 'alpha'. Expected: a mapping with match",
    f"{IN_LAYERS}\n- §all: alpha": 'in quotes, or a list. Remedy: match: "*" is all layers.',
    f"{IN_LAYERS}- §match: a": "the rule serves no role. Expected: one of all, forward, backward,",
    f"{IN_LAYERS}- match: §[]\n  all: alpha": "match is a list without entries",
    f"{IN_LAYERS}- match: [a,\n   §'']\n  all: alpha": "match is text, ''. Expected: a pattern",
    f"{IN_LAYERS}- all: alpha\n  match: §0": "match is a number, 0. Expected: a pattern",
    "default: §8": "default is a number, 8. Expected: the name of a recipe, identity, or a mapping",
    "default: §{}": "default is a mapping without entries",
    "default: {recipe: §1.5}": "recipe is a number, 1.5. Expected: a name.",
    "default: §a/x.yaml": "'a/x.yaml' is no name. Expected: identity, a recipe or a factory.",
    "default: {recipe: §x.yaml}": "'x.yaml' is no name. Expected: the name of a recipe.",
    "default:\n  recipe: alpha\n  §fp8: E4M3": (
        "recipe 'alpha': got an unexpected keyword argument 'fp8'. Expected: fp8_format, flag, "
        "epsilon, shape"
    ),
    "default:\n  recipe: alpha\n  §name: x": "recipe 'alpha' has no option 'name'",
    "default:\n  recipe: alpha\n  epsilon: 1\n  §flag: 3": "flag is 3. Expected: True or False.",
    "default:\n  recipe: alpha\n  §fp8_format: E9": "'E9'. Expected: one of E4M3, E5M2, HYBRID.",
    f"{IN_LAYERS}- match: a\n  all: {{recipe: §needy}}": (
        "recipe 'needy': missing a required argument: 'scale'. Expected: scale."
    ),
    "default:\n  epsilon: §" + "9" * 5000: "Exceeds the limit",
    "layers:\n- {match: a, all: alpha}\n- {match: '*', input: alpha}": (
        "nothing serves weight, grad_output of layers that no rule names. Expected: the key "
        "default. Remedy: add a default; identity keeps high precision."
    ),
    "layers:\n- {match: '*', all: weights}": "nothing serves input, weight, grad_output of layers",
    "default: alpha\n\nlayers:\n- {match: 'blocks.*', forward: alpha}\n"
    "- match: [blocks.0.up, 'blocks.?.down']\n  grad_output: alpha\n  §weight: alpha": (
        "'weight' never serves, because line 4 takes these layers and roles before. Expected: "
        "rules for few layers before those for many. Remedy: move this rule up, or take it out."
    ),
    f"{IN_LAYERS}- {{match: a, all: alpha}}\n- {{match: b, all: alpha}}\n"
    "- {match: [b, a.c], §all: alpha}": (
        "never serves, because line 3 and line 4 takes these layers and roles before"
    ),
    f"{IN_LAYERS}- match: a\n  §all: alpha\n  forward: alpha\n  backward: alpha": (
        "'all' never serves, because other keys of the rule take all its roles. Expected: a role "
        "that is left. Remedy: take one of the keys out."
    ),
    "": "the file is empty. Expected: the keys default and layers.",
    "---\n# a\n...\n": "the file is empty",
    "default: alpha\nlayers: [{match: a\n- b§": "not YAML: while parsing",
    f"{IN_LAYERS}§\t- match: a": "cannot start any token. Remedy: indent with spaces.",
    "default: alpha\nlayers: §!!python/object/apply:os.system ['touch FOLDER/hacked']": (
        "tag 'tag:yaml.org,2002:python/object/apply:os.system'. Expected: plain values. Remedy: "
        "take the tag"
    ),
    "default: alpha\n\n# §\x07": r"character '\x07' is not allowed in YAML. Remedy: take it out",
    "default: §!!map alpha": "tag 'tag:yaml.org,2002:map'",
    "default: §!!int x": "not a value: invalid literal",
    "default: alpha\n§1: 2": "a key is a number, 1. Expected: text. Remedy: put it in quotes.",
    "default: alpha\n? §[a]\n: 2": "a key is a list. Expected: text.",
    "layers: [{match: a, all: &x {recipe: alpha}}]\ndefault: {§<<: *x}": "has no key '<<'",
    "default: alpha\n§---\ndefault: alpha": "not YAML: expected a single document in the stream",
    "default: alpha\nlayers: " + "[" * 32 + "§" + "[" * 28 + "]" * 60: "nested too deeply",
    "default: " + "[" * 600: "values are nested too deeply",
}
IN_RULE = "default = 'alpha'\n[[layers]]\nmatch = 'a'\n"
# Text: path of the key, words of the error. What follows the reader is that of YAML.
TOML = {
    "'a b' = 1": ("'a b'", "a file has no key 'a b'"),
    f"{IN_RULE}weight.rowwise = 'alpha'\n[layers.weight.columnwise]\nrecipes = 'alpha'": (
        *("layers[0].weight.columnwise.recipes", "has no key 'recipes'"),
    ),
    "default = 'alpha'\n[[layers]]\nall = 'alpha'\nmatch = [\n  'a', # '',\n  '']": (
        *("layers[0].match[1]", "match is text, ''"),
    ),
    "[default]\nrecipe = 'alpha'\nflag = 3": (
        "default.flag",
        "flag is 3. Expected: True or False.",
    ),
    "default = 2020-01-01": ("default", "default is a date or a time, 2020-01-01"),
    "[[layers]]\nmatch = 'a'\nall = 'alpha'": ("", "nothing serves input, weight"),
    f"{IN_RULE}all = 'alpha'\n[[layers]]\nmatch = 'a.b'\nweight = 'alpha'": (
        *(
            "layers[1].weight",
            "never serves, because layers[0] takes these layers and roles before",
        ),
    ),
    "default = 'alpha'\ndefault = 'x'": ("", "not TOML: Cannot overwrite a value"),
    "[default]\nepsilon = " + "9" * 5000: ("", "Exceeds the limit"),
    "# a": ("", "the file is empty"),
    "default = 'alpha'\nlayers = " + "[" * 60 + "]" * 60: ("layers" + "[0]" * 32, "too deeply"),
    "default = " + "{a = " * 40 + "1" + "}" * 40: ("default" + ".a" * 32, "too deeply"),
    "default = " + "[" * 600: ("", "values are nested too deeply"),
}


def check(path: Path, text: str, place: str, words: str, error: type[OttavaError]) -> None:
    """A file of this text is refused in one line, and nothing is written."""
    (path.parent / "state.yaml").write_text("default: keeper")
    path.write_bytes(text.replace("FOLDER", str(path.parent)).encode())
    with pytest.raises(OttavaError) as caught:
        load_factory(path)
    assert type(caught.value) is error
    message = str(caught.value)
    assert message.startswith(f"{path}, {place}: " if place else f"{path}: "), message
    assert words in message
    assert "\n" not in message
    assert sorted(os.listdir(path.parent)) == [path.name, "state.yaml"]


def check_yaml(folder: Path, text: str, words: str, error: type[OttavaError]) -> None:
    before, mark, after = text.partition("§")
    line, column = before.count("\n") + 1, len(before.rpartition("\n")[2]) + 1
    place = f"line {line}, column {column}" if mark else ""
    check(folder / "model.yaml", before + after, place, words, error)


@pytest.mark.parametrize("text", YAML, ids=YAML.values())
def test_what_is_wrong_in_yaml_is_told_with_its_line_and_column(tmp_path: Path, text: str) -> None:
    check_yaml(tmp_path, text, YAML[text], OptionError)


@pytest.mark.parametrize("text", TOML, ids=[words for _, words in TOML.values()])
def test_what_is_wrong_in_toml_is_told_with_the_path_of_its_key(tmp_path: Path, text: str) -> None:
    check(tmp_path / "model.toml", text, *TOML[text], OptionError)


@pytest.mark.parametrize(
    ("text", "words", "error"),
    [
        (
            *(
                "default: §identiti",
                "no installed recipe or quantizer factory is named 'identiti'.",
            ),
            RecipeNotFoundError,
        ),
        ("default:\n  recipe: §zzz", "no installed package provides recipe", RecipeNotFoundError),
        ("default: §fourbit", "pip install ottava-recipes-fourbit", RecipeNotFoundError),
        ("default:\n  factory: §wieghts", "quantizer factory 'wieghts'", RecipeNotFoundError),
        ("default: §raising", "cannot be built: ValueError: at build", PluginError),
    ],
)
def test_names_that_are_not_installed_and_recipes_that_fail(
    text: str, words: str, error: type[OttavaError], tmp_path: Path
) -> None:
    check_yaml(tmp_path, text, words, error)


def test_a_misspelled_name_does_not_become_a_command_that_installs_it() -> None:
    # However often the file is read.
    for _ in range(2):
        with pytest.raises(RecipeNotFoundError, match=r"use 'identity'") as caught:
            FileFactory("a.yaml", "default: identiti")
        assert "pip" not in str(caught.value)


# Name: bytes, words of the error.
BYTES: dict[str, tuple[bytes, str]] = {
    "UTF-16": (
        "default".encode("utf-16"),
        "line 1: byte 0xff is not UTF-8. Expected: UTF-8. Remedy: save the file as UTF-8",
    ),
    "a byte in line 3": (b"# \xc3\xa9\n# a\r\n# \xff", "line 3: byte 0xff is not UTF-8"),
    "Latin-1": ("default: alpha # \u00e9".encode("latin-1"), "line 1: byte 0xe9 is not UTF-8"),
    "a zero byte": (b"default\x00", "model"),
    "many": (b"#" * (MAX_BYTES + 1), f"is larger than {MAX_BYTES} bytes.*Remedy: use fewer patter"),
}


@pytest.mark.parametrize("suffix", ["yaml", "toml"])
@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_text(tmp_path: Path, suffix: str, name: str) -> None:
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(BYTES[name][0])
    with pytest.raises(OptionError, match=BYTES[name][1]) as caught:
        load_factory(path)
    assert str(path) in str(caught.value)


def test_what_is_no_file_of_a_language(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, words in (
        ("missing.yaml", "cannot be read: No such file or directory"),
        ("folder.yaml", "is no regular file"),
        ("pipe.yaml", "is no regular file"),
        ("model.json", "has the suffix '.json'. Expected: one of .yaml, .yml, .toml"),
        ("model", "has the suffix ''"),
    ):
        with pytest.raises(OptionError, match=re.escape(words)) as caught:
            load_factory(tmp_path / name)
        assert name in str(caught.value)
    for wrong in (3, None, b"model.yaml"):
        with pytest.raises(DTypeError, match="the path is a"):
            load_factory(wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=f"a.yaml is larger than {MAX_BYTES} bytes"):
        FileFactory("a.yaml", "#" * (MAX_BYTES + 1))
