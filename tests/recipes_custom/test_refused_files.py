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
# Name: text, line and column, words of the error.
YAML: dict[str, tuple[str, str, str]] = {
    "unknown key of the file": (
        *("default: alpha\nlayer:\n- {match: a, all: alpha}", "2:1"),
        "a file has no key 'layer'. Expected: one of default, layers. Remedy: use 'layers'.",
    ),
    "unknown key of a rule": (
        *(f"{IN_LAYERS}- match: a\n  wieght: alpha", "4:3"),
        "a rule has no key 'wieght'. Expected: one of match, all, forward, backward, input, weight,"
        " output, grad_output, grad_input. Remedy: use 'weight'.",
    ),
    "unknown key of a quantizer": (
        *("default:\n  recipes: alpha", "2:3"),
        "what serves a role has no key 'recipes'. Expected: one of recipe, factory, rowwise, "
        "columnwise. Remedy: use 'recipe'.",
    ),
    "roles in the default": (
        *("default: {forward: alpha}", "1:11"),
        "has no key 'forward'. Expected: one of recipe, factory, rowwise, columnwise. Remedy: "
        'roles are told apart in a rule; one with match "*" is for all layers',
    ),
    "a factory with options": (
        *("default:\n  flag: 1\n  factory: weights", "2:3"),
        "a factory has no key 'flag'. Expected: one of factory.",
    ),
    "one direction only": (
        *("default:\n  rowwise: alpha", "2:3"),
        "a hybrid has no columnwise. Expected: the name of a recipe, identity, or a mapping with "
        "recipe, factory, or rowwise and columnwise. Remedy: identity keeps high precision.",
    ),
    "more than directions": (
        *("default: {rowwise: alpha,\n  columnwise: alpha, row: 1}", "2:22"),
        "a hybrid has no key 'row'. Expected: one of rowwise, columnwise. Remedy: use 'rowwise'.",
    ),
    "a hybrid in a hybrid": (
        "default: {rowwise: {rowwise: alpha, columnwise: alpha}, columnwise: alpha}",
        *("1:20", "a hybrid inside a hybrid"),
    ),
    "a recipe with state in a hybrid": (
        *("default:\n  rowwise: alpha\n  columnwise: keeper", "3:15"),
        "a recipe that keeps state cannot serve one direction. Expected: recipes without state "
        "for rowwise and columnwise. Remedy: let it serve the whole role.",
    ),
    "a recipe with state in a hybrid of a file": (
        "default:\n  rowwise: alpha\n  columnwise: {recipe: custom, file: FOLDER/state.yaml}",
        *("3:24", "a recipe that keeps state cannot serve one direction"),
    ),
    "a key twice": (
        "default: alpha\nlayers: [{match: a, all: alpha}]\ndefault: identity",
        *("3:1", "key 'default' stands there twice, first in line 1. Expected: each key once."),
    ),
    "a file that is a list": (
        *("# x\n- a", "2:1", "a file is a list. Expected: a mapping with default, layers."),
    ),
    "layers that are a mapping": (
        "default: alpha\nlayers: {match: a, all: alpha}",
        *("2:9", "layers is a mapping. Expected: a list of rules."),
    ),
    "no rules": (
        *("default: alpha\nlayers: []\n", "2:9"),
        "layers is a list without entries. Expected: a list of rules. Remedy: take the key out",
    ),
    "layers that are nothing": (IN_LAYERS, "2:8", "layers is nothing"),
    "a rule that is text": (
        f"{IN_LAYERS}- alpha",
        *("3:3", "a rule is text, 'alpha'. Expected: a mapping with match"),
    ),
    "a rule without match": (
        *(f"{IN_LAYERS}\n- all: alpha", "4:3"),
        "a rule has no match. Expected: a pattern of layer names, in quotes, or a list. "
        'Remedy: match: "*" is all layers.',
    ),
    "a rule without roles": (
        f"{IN_LAYERS}- match: a",
        *("3:3", "the rule serves no role. Expected: one of all, forward, backward, input,"),
    ),
    "no patterns": (
        *(f"{IN_LAYERS}- match: []\n  all: alpha", "3:10"),
        "match is a list without entries. Expected: a pattern of layer names, in quotes, or a ",
    ),
    "an empty pattern": (
        f"{IN_LAYERS}- match: [a,\n   '']\n  all: alpha",
        *("4:4", "match is text, ''. Expected: a pattern of layer names, in quotes."),
    ),
    "a pattern that is a number": (
        f"{IN_LAYERS}- all: alpha\n  match: 0",
        *("4:10", "match is a number, 0. Expected: a pattern of layer names, in quotes"),
    ),
    "a quantizer that is a number": (
        *("default: 8", "1:10"),
        "default is a number, 8. Expected: the name of a recipe, identity, or a mapping with "
        "recipe, factory",
    ),
    "an empty quantizer": ("default: {}", "1:10", "default is a mapping without entries"),
    "a name that is a number": (
        *("default: {recipe: 1.5}", "1:19", "recipe is a number, 1.5. Expected: a name."),
    ),
    "a path for a name": (
        "default: a/x.yaml",
        *("1:10", "'a/x.yaml' is no name. Expected: identity, a recipe or a factory."),
    ),
    "a path for a recipe": (
        "default: {recipe: x.yaml}",
        *("1:19", "'x.yaml' is no name. Expected: the name of a recipe."),
    ),
    "a path for a factory": ("default: {factory: x.yaml}", "1:20", "'x.yaml' is no name."),
    "an option that the recipe does not have": (
        *("default:\n  recipe: alpha\n  fp8: E4M3", "3:3"),
        "recipe 'alpha': got an unexpected keyword argument 'fp8'. Expected: fp8_format, flag, "
        "epsilon, shape",
    ),
    "an option called name": (
        "default:\n  recipe: alpha\n  name: x",
        *("3:3", "recipe 'alpha' has no option 'name'"),
    ),
    "an option that the recipe refuses": (
        "default:\n  recipe: alpha\n  epsilon: 1\n  flag: 3",
        *("4:3", "flag is 3. Expected: True or False."),
    ),
    "a format that there is not": (
        "default:\n  recipe: alpha\n  fp8_format: E9",
        *("3:3", "fp8_format is 'E9'. Expected: one of E4M3, E5M2, HYBRID."),
    ),
    "a missing option": (
        f"{IN_LAYERS}- match: a\n  all: {{recipe: needy}}",
        *("4:17", "recipe 'needy': missing a required argument: 'scale'. Expected: scale."),
    ),
    "a number of too many digits": (
        *("default:\n  epsilon: " + "9" * 5000, "2:12", "Exceeds the limit"),
    ),
    "no default": (
        *("layers:\n- {match: a, all: alpha}\n- {match: '*', input: alpha}", ""),
        "nothing serves weight, grad_output of layers that no rule names. Expected: the key "
        "default. Remedy: add a default; identity keeps high precision.",
    ),
    "a factory for all": (
        "layers:\n- {match: '*', all: weights}",
        *("", "nothing serves input, weight, grad_output of layers that no rule names"),
    ),
    "a rule that an earlier one covers": (
        "default: alpha\n\nlayers:\n- {match: 'blocks.*', forward: alpha}\n"
        "- match: [blocks.0.up, 'blocks.?.down']\n  grad_output: alpha\n  weight: alpha",
        "7:3",
        "'weight' never serves, because line 4 takes these layers and roles before. Expected: "
        "rules for few layers before those for many. Remedy: move this rule up, or take it out.",
    ),
    "a rule that two earlier ones cover": (
        f"{IN_LAYERS}- {{match: a, all: alpha}}\n- {{match: b, all: alpha}}\n"
        "- {match: [b, a.c], all: alpha}",
        *("5:21", "never serves, because line 3 and line 4 takes these layers and roles before"),
    ),
    "a key that the others of its rule cover": (
        *(f"{IN_LAYERS}- match: a\n  all: alpha\n  forward: alpha\n  backward: alpha", "4:3"),
        "'all' never serves, because other keys of the rule take all its roles. Expected: a role "
        "that is left. Remedy: take one of the keys out.",
    ),
    "nothing": ("", "", "the file is empty. Expected: the keys default and layers."),
    "comments": ("# a\n\n# b", "", "the file is empty"),
    "an empty document": ("---\n...\n", "", "the file is empty"),
    "no syntax": ("default: alpha\nlayers: [{match: a\n- b", "3:4", "not YAML: while parsing a f"),
    "a tab": (
        *(f"{IN_LAYERS}\t- match: a", "3:1"),
        r"not YAML: while scanning for the next token found character '\t' that cannot start any "
        "token. Remedy: indent with spaces.",
    ),
    "a character": (
        "default: alpha\n# \x07",
        *("2", r"character '\x07' is not allowed in YAML. Remedy: take it out."),
    ),
    "a tag that runs code": (
        "default: alpha\nlayers: !!python/object/apply:os.system ['touch FOLDER/hacked']",
        "2:9",
        "tag 'tag:yaml.org,2002:python/object/apply:os.system'. Expected: plain values. Remedy: "
        "take the tag",
    ),
    "a tag of one's own": ("default: !recipe alpha", "1:10", "tag '!recipe'"),
    "a tag of another kind": ("default: !!map alpha", "1:10", "tag 'tag:yaml.org,2002:map'"),
    "a tag that does not fit": ("default: !!int x", "1:10", "not a value: invalid literal"),
    "a key that is a number": (
        "default: alpha\n1: 2",
        *("2:1", "a key is a number, 1. Expected: text. Remedy: put it in quotes."),
    ),
    "a key that is a list": (
        *("default: alpha\n? [a]\n: 2", "2:3", "a key is a list. Expected: text."),
    ),
    "a merge key": (
        "layers: [{match: a, all: &x {recipe: alpha}}]\ndefault: {<<: *x}",
        *("2:11", "what serves a role has no key '<<'"),
    ),
    "several documents": (
        *("default: alpha\n---\ndefault: alpha", "2:1"),
        "not YAML: expected a single document in the stream but found another document",
    ),
    "an unknown alias": (
        "default: alpha\nlayers: *x",
        *("2:9", "not YAML: found undefined alias 'x'"),
    ),
    "a deep list": (
        "default: alpha\nlayers: " + "[" * 60 + "]" * 60,
        *("2:41", "values are nested too deeply"),
    ),
    "a very deep list": ("default: " + "[" * 600, "", "values are nested too deeply"),
}
IN_RULE = "default = 'alpha'\n[[layers]]\nmatch = 'a'\n"
# Name: text, path of the key, words of the error. What follows the reader is that of YAML.
TOML: dict[str, tuple[str, str, str]] = {
    "a key in quotes": ("'a b' = 1", "'a b'", "a file has no key 'a b'"),
    "a key inside of keys": (
        f"{IN_RULE}weight.rowwise = 'alpha'\n[layers.weight.columnwise]\nrecipes = 'alpha'",
        *("layers[0].weight.columnwise.recipes", "has no key 'recipes'"),
    ),
    "an empty pattern": (
        "default = 'alpha'\n[[layers]]\nall = 'alpha'\nmatch = [\n  'a', # '',\n  '']",
        *("layers[0].match[1]", "match is text, ''"),
    ),
    "an option that the recipe refuses": (
        "[default]\nrecipe = 'alpha'\nepsilon = 1\nflag = 3",
        *("default.flag", "flag is 3. Expected: True or False."),
    ),
    "a date": ("default = 2020-01-01", "default", "default is a date or a time, 2020-01-01"),
    "no default": ("[[layers]]\nmatch = 'a'\nall = 'alpha'", "", "nothing serves input, weight"),
    "a rule that an earlier one covers": (
        f"{IN_RULE}all = 'alpha'\n[[layers]]\nmatch = 'a.b'\nweight = 'alpha'",
        "layers[1].weight",
        "'weight' never serves, because layers[0] takes these layers and roles before.",
    ),
    "a key twice": ("default = 'alpha'\ndefault = 'x'", "", "not TOML: Cannot overwrite a value"),
    "a number of too many digits": ("[default]\nepsilon = " + "9" * 5000, "", "Exceeds the limit"),
    "nothing": ("# a", "", "the file is empty"),
    "a deep list": (
        "default = 'alpha'\nlayers = " + "[" * 60 + "]" * 60,
        *("layers" + "[0]" * 32, "values are nested too deeply"),
    ),
    "a very deep list": ("default = " + "[" * 600, "", "values are nested too deeply"),
}
# Of names that are not installed, and recipes that fail.
OTHER_ERRORS: dict[str, tuple[str, str, str, type[OttavaError]]] = {
    "an unknown name": (
        *("default: identiti", "1:10"),
        "no installed recipe or quantizer factory is named 'identiti'. Expected: one of alpha, ",
        RecipeNotFoundError,
    ),
    "an unknown recipe": (
        "default:\n  recipe: zzz",
        *("2:11", "no installed package provides recipe 'zzz'", RecipeNotFoundError),
    ),
    "a recipe of a package": (
        "default: fourbit",
        *("1:10", "pip install ottava-recipes-fourbit", RecipeNotFoundError),
    ),
    "an unknown factory": (
        "default:\n  factory: wieghts",
        *("2:12", "no installed package provides quantizer factory 'wieghts'", RecipeNotFoundError),
    ),
    "a recipe that cannot be built": (
        *("default: raising", "1:10", "cannot be built: ValueError: at build", PluginError),
    ),
}
CASES = {
    **{f"YAML: {name}": ("yaml", *case, OptionError) for name, case in YAML.items()},
    **{f"TOML: {name}": ("toml", *case, OptionError) for name, case in TOML.items()},
    **{name: ("yaml", *case) for name, case in OTHER_ERRORS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, name: str) -> None:
    suffix, text, place, words, error = CASES[name]
    (tmp_path / "state.yaml").write_text("default: keeper")
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(text.replace("FOLDER", str(tmp_path)).encode())
    with pytest.raises(OttavaError) as caught:
        load_factory(path)
    assert type(caught.value) is error
    if suffix == "yaml" and place:
        place = "line {}, column {}".format(*place.split(":")) if ":" in place else f"line {place}"
    message = str(caught.value)
    assert message.startswith(f"{path}, {place}: " if place else f"{path}: "), message
    assert words in message
    assert "\n" not in message
    assert sorted(os.listdir(tmp_path)) == [path.name, "state.yaml"]


def test_a_misspelled_name_does_not_become_a_command_that_installs_it() -> None:
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
