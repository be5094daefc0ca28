"""What is wrong in a recipe file is told with its place: a line and a column in YAML, the path of a
key in TOML."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ottava.errors import OptionError, OttavaError, PluginError, RecipeNotFoundError

sys.path.insert(0, str(Path(__file__).parent))

from file_plugins import recipe_file_packages, write  # noqa: F401

from ottava_custom.files import load_factory


@dataclass(frozen=True)
class Case:
    """A wrong text in either language, the place in each (0 or nothing: the whole file), and what
    is told."""

    said: str
    yaml: tuple[str, int, int] | None = None
    toml: tuple[str, str] | None = None
    error: type[OttavaError] = OptionError


RULE = "\n[[layers]]\nmatch = 'a'\n"
CASES = {
    "unknown key of the file": Case(
        "a file has no key 'layer'. Expected: one of default, layers. Remedy: use 'layers'.",
        ("default: alpha\nlayer:\n- {match: a, all: alpha}", 2, 1),
        ('default = "alpha"\n[[layer]]\nmatch = "a"', "layer"),
    ),
    "unknown key of a rule": Case(
        "a rule has no key 'wieght'. Expected: one of match, all, forward, backward, input, "
        "weight, output, "
        "grad_output, grad_input. Remedy: use 'weight'.",
        ("default: alpha\nlayers:\n- match: a\n  wieght: alpha", 4, 3),
        ("default = 'alpha'" + RULE + "# a\nwieght = 'alpha'", "layers[0].wieght"),
    ),
    "unknown key of a quantizer": Case(
        "what serves a role has no key 'recipes'. Expected: one of recipe, factory, rowwise, "
        "columnwise. "
        "Remedy: use 'recipe'.",
        ("default:\n  recipes: alpha", 2, 3),
        ("[default]\nrecipes = 'alpha'", "default.recipes"),
    ),
    "roles in the default": Case(
        "has no key 'forward'. Expected: one of recipe, factory, rowwise, columnwise. Remedy: "
        "roles are told apart in "
        'a rule; one with match "*" is for all layers',
        ("default: {forward: alpha}", 1, 11),
        ("default = {forward = 'alpha'}", "default.forward"),
    ),
    "a factory with options": Case(
        "a factory has no key 'flag'. Expected: one of factory.",
        ("default:\n  flag: 1\n  factory: weights", 2, 3),
        ("default.flag = 1\ndefault.factory = 'weights'", "default.flag"),
    ),
    "one direction only": Case(
        "a hybrid has no columnwise. Expected: the name of a recipe, identity, or a mapping with "
        "recipe, factory, or rowwise and columnwise. Remedy: identity keeps high precision.",
        ("default:\n  rowwise: alpha", 2, 3),
        ("\ndefault = {rowwise = 'alpha'}", "default"),
    ),
    "more than directions": Case(
        "a hybrid has no key 'row'. Expected: one of rowwise, columnwise. Remedy: use 'rowwise'.",
        ("default: {rowwise: alpha,\n  columnwise: alpha, row: 1}", 2, 22),
        ("default = {rowwise = 'alpha', columnwise = 'alpha', row = 1}", "default.row"),
    ),
    "a hybrid in a hybrid": Case(
        "a hybrid inside a hybrid",
        ("default: {rowwise: {rowwise: alpha, columnwise: alpha}, columnwise: alpha}", 1, 20),
        (
            "[default]\ncolumnwise = 'alpha'\n[default.rowwise]\nrowwise = 'alpha'\ncolumnwise = "
            "'alpha'",
            "default.rowwise",
        ),
    ),
    "a stateful recipe in a hybrid": Case(
        "a recipe that keeps state cannot serve one direction. Expected: recipes without state "
        "for rowwise and "
        "columnwise. Remedy: let it serve the whole role.",
        ("default:\n  rowwise: alpha\n  columnwise: keeper", 3, 15),
        ("[default]\nrowwise = 'alpha'\ncolumnwise = 'keeper'", "default.columnwise"),
    ),
    "a stateful recipe in a hybrid of a file": Case(
        "a recipe that keeps state cannot serve one direction",
        (
            "default:\n  rowwise: alpha\n  columnwise: {recipe: custom, file: "
            "FOLDER/stateful.yaml}",
            3,
            24,
        ),
        (
            "[default]\nrowwise = 'alpha'\n[default.columnwise]\nrecipe = 'custom'\nfile = "
            "'FOLDER/stateful.yaml'",
            "default.columnwise.recipe",
        ),
    ),
    "a key twice": Case(
        "key 'default' stands there twice, first in line 1. Expected: each key once.",
        ("default: alpha\nlayers: [{match: a, all: alpha}]\ndefault: identity", 3, 1),
    ),
    "a key twice in TOML": Case(
        "not TOML: Cannot overwrite a value (at ",
        None,
        ("default = 'alpha'\n\ndefault = '''\nidentity'''", ""),
    ),
    "a key of a rule twice": Case(
        "key 'all' stands there twice, first in line 3",
        ("default: alpha\nlayers:\n- {match: a, all: alpha,\n  'all': alpha}", 4, 3),
    ),
    "a key of a rule twice in TOML": Case(
        "not TOML: Duplicate inline table key 'all' (at line 3, column 37)",
        None,
        ("default = 'alpha'\nlayers = [\n{match = 'a', all = 'x', 'all' = 'y'}]", ""),
    ),
    "a table twice": Case(
        "not TOML: Cannot declare ('default',) twice (at line 3, column 9)",
        None,
        ("[default]\nrecipe = 'alpha'\n[default]\nflag = true", ""),
    ),
    "a file that is a list": Case(
        "a file is a list. Expected: a mapping with default, layers.", ("# x\n- a", 2, 1)
    ),
    "a file that is a text": Case("a file is text, 'alpha'", ("alpha", 1, 1)),
    "layers that are a mapping": Case(
        "layers is a mapping. Expected: a list of rules.",
        ("default: alpha\nlayers: {match: a, all: alpha}", 2, 9),
        ("default = 'alpha'\n[layers]\nmatch = 'a'", "layers"),
    ),
    "no rules": Case(
        "layers is a list without entries. Expected: a list of rules. Remedy: take the key out",
        ("default: alpha\nlayers: []\n", 2, 9),
        ("default = 'alpha'\nlayers = []", "layers"),
    ),
    "layers that are nothing": Case("layers is nothing", ("default: alpha\nlayers:\n", 2, 8)),
    "a rule that is text": Case(
        "a rule is text, 'alpha'. Expected: a mapping with match",
        ("default: alpha\nlayers:\n- alpha", 3, 3),
        ("default = 'alpha'\nlayers = [\n  'alpha']", "layers[0]"),
    ),
    "a rule without match": Case(
        "a rule has no match. Expected: a pattern of layer names, in quotes, or a list. "
        'Remedy: match: "*" is all layers.',
        ("default: alpha\nlayers:\n\n- all: alpha", 4, 3),
        ("default = 'alpha'\n[[layers]]\nall = 'alpha'", "layers[0]"),
    ),
    "a rule without roles": Case(
        "the rule serves no role. Expected: one of all, forward, backward, input,",
        ("default: alpha\nlayers:\n- match: a", 3, 3),
        ("default = 'alpha'" + RULE, "layers[0]"),
    ),
    "an empty list of patterns": Case(
        "match is a list without entries. Expected: a pattern of layer names, in quotes, or a ",
        ("default: alpha\nlayers:\n- match: []\n  all: alpha", 3, 10),
        ("default = 'alpha'\n[[layers]]\nall = 'alpha'\nmatch = []", "layers[0].match"),
    ),
    "an empty pattern": Case(
        "match is text, ''. Expected: a pattern of layer names, in quotes.",
        ("default: alpha\nlayers:\n- match: [a,\n   '']\n  all: alpha", 4, 4),
        (
            "default = 'alpha'\n[[layers]]\nall = 'alpha'\nmatch = [\n  'a', # '',\n  '']",
            "layers[0].match[1]",
        ),
    ),
    "a pattern that is a number": Case(
        "match is a number, 0. Expected: a pattern of layer names, in quotes",
        ("default: alpha\nlayers:\n- all: alpha\n  match: 0", 4, 10),
        ("default = 'alpha'\n[[layers]]\nall = 'alpha'\nmatch = [ 0 ]", "layers[0].match[0]"),
    ),
    "a pattern that is nothing": Case(
        "match is nothing. Expected: a pattern of layer names, in quotes, or a list.",
        ("default: alpha\nlayers: [{match: , all: alpha}]", 2, 17),
    ),
    "a quantizer that is a number": Case(
        "default is a number, 8. Expected: the name of a recipe, identity, or a mapping with "
        "recipe, factory",
        ("default: 8", 1, 10),
        ("\n\ndefault = 8", "default"),
    ),
    "a quantizer that is nothing": Case(
        "default is nothing", ("default:\nlayers: [{match: a, all: alpha}]", 1, 9)
    ),
    "a quantizer that is a list": Case(
        "default is a list", ("default: [alpha]", 1, 10), ("default = ['alpha']", "default")
    ),
    "a quantizer that is a date": Case(
        "default is a date or a time, 2020-01-01", None, ("default = 2020-01-01", "default")
    ),
    "an empty quantizer": Case(
        "default is a mapping without entries", ("default: {}", 1, 10), ("default = {}", "default")
    ),
    "a name that is a number": Case(
        "recipe is a number, 1.5. Expected: a name.",
        ("default: {recipe: 1.5}", 1, 19),
        ("default = {recipe = 1.5}", "default.recipe"),
    ),
    "a name that is none": Case(
        "'a/x.yaml' is no name. Expected: identity, a recipe or a factory.",
        ("default: a/x.yaml", 1, 10),
        ("default = 'a/x.yaml'", "default"),
    ),
    "a recipe's name that is none": Case(
        "'x.yaml' is no name. Expected: the name of a recipe.",
        ("default: {recipe: x.yaml}", 1, 19),
        ("default = {recipe = 'x.yaml'}", "default.recipe"),
    ),
    "an unknown name": Case(
        "no installed recipe or quantizer factory is named 'identiti'",
        ("default: identiti", 1, 10),
        ("default = 'identiti'", "default"),
        RecipeNotFoundError,
    ),
    "an unknown recipe": Case(
        "no installed package provides recipe 'zzz'",
        ("default:\n  recipe: zzz", 2, 11),
        ("[default]\nrecipe = 'zzz'", "default.recipe"),
        RecipeNotFoundError,
    ),
    "an unknown factory": Case(
        "no installed package provides quantizer factory 'wieghts'",
        ("default:\n  factory: wieghts", 2, 12),
        ("[default]\nfactory = 'wieghts'", "default.factory"),
        RecipeNotFoundError,
    ),
    "an option that the recipe does not have": Case(
        "recipe 'alpha': got an unexpected keyword argument 'fp8'. Expected: fp8_format, flag, "
        "epsilon, shape",
        ("default:\n  recipe: alpha\n  fp8: E4M3", 3, 3),
        ("default = { fp8 = 'E4M3', recipe = 'alpha' }", "default.fp8"),
    ),
    "an option that the recipe refuses": Case(
        "flag is 3. Expected: True or False.",
        ("default:\n  recipe: alpha\n  epsilon: 1\n  flag: 3", 4, 3),
        ("[default]\nrecipe = 'alpha'\nepsilon = 1\nflag = 3", "default.flag"),
    ),
    "a format that there is not": Case(
        "fp8_format is 'E9'. Expected: one of E4M3, E5M2, HYBRID.",
        ("default:\n  recipe: alpha\n  fp8_format: E9", 3, 3),
        ("[default]\nrecipe = 'alpha'\nfp8_format = 'E9'", "default.fp8_format"),
    ),
    "a missing option": Case(
        "recipe 'needy': missing a required argument: 'scale'. Expected: scale.",
        ("default: alpha\nlayers:\n- match: a\n  all: needy", 4, 8),
        ("default = 'alpha'" + RULE + "all = 'needy'", "layers[0].all"),
    ),
    "a recipe that cannot be built": Case(
        "cannot be built: ValueError: at build",
        ("default: raising", 1, 10),
        ("default = {recipe = 'raising'}", "default.recipe"),
        PluginError,
    ),
    "a number of too many digits": Case(
        "Exceeds the limit",
        ("default:\n  epsilon: " + "9" * 5000, 2, 12),
        ("[default]\nepsilon = " + "9" * 5000, ""),
    ),
    "no default": Case(
        "nothing serves weight, grad_output of layers that no rule names. Expected: the key "
        "default. Remedy: add a default; identity keeps high precision.",
        ("layers:\n- {match: a, all: alpha}\n- {match: '*', input: alpha}", 0, 0),
        ("[[layers]]\nmatch = 'a'\nall = 'alpha'\n[[layers]]\nmatch = '*'\ninput = 'alpha'", ""),
    ),
    "a factory for all": Case(
        "nothing serves input, weight, grad_output of layers that no rule names",
        ("layers:\n- {match: '*', all: weights}", 0, 0),
    ),
    "a rule that an earlier one covers": Case(
        "'weight' never serves, because line 4 takes these layers and roles before. "
        "Expected: rules for few "
        "layers before those for many. Remedy: move this rule up, or take it out.",
        (
            "default: alpha\n\nlayers:\n- {match: 'blocks.*', forward: alpha}\n"
            "- match: [blocks.0.up, 'blocks.?.down']\n  grad_output: alpha\n  weight: alpha",
            7,
            3,
        ),
    ),
    "a rule that an earlier one covers in TOML": Case(
        "'weight' never serves, because layers[0] takes these layers and roles before.",
        None,
        (
            "default = 'alpha'\n\n\n[[layers]]\nmatch = 'blocks.*'\nforward = 'alpha'\n"
            "[[layers]]\nmatch = ['blocks.0.up', 'blocks.?.down']\nweight = 'alpha'",
            "layers[1].weight",
        ),
    ),
    "a rule that two earlier ones cover": Case(
        "'all' never serves, because line 3 and line 4 takes these layers and roles before",
        (
            "default: alpha\nlayers:\n- {match: a, all: alpha}\n- {match: b, all: alpha}\n"
            "- {match: [b, a.c], all: alpha}",
            5,
            21,
        ),
    ),
    "a key that the others of its rule cover": Case(
        "'all' never serves, because other keys of the rule take all its roles. Expected: a role "
        "that is left. Remedy: take one of the keys out.",
        (
            "default: alpha\nlayers:\n- match: a\n  all: alpha\n  forward: alpha\n  backward: "
            "alpha",
            4,
            3,
        ),
        (
            "default = 'alpha'" + RULE + "all = 'alpha'\nforward = 'alpha'\nbackward = 'alpha'",
            "layers[0].all",
        ),
    ),
    "nothing": Case(
        "the file is empty. Expected: the keys default and layers.", ("", 0, 0), ("", "")
    ),
    "comments": Case("the file is empty", ("# a\n\n# b", 0, 0), ("# a\n\n# b", "")),
    "nothing in a document": Case("the file is empty", ("---\n...\n", 0, 0)),
    "no syntax": Case(
        "not YAML: while parsing a flow", ("default: alpha\nlayers: [{match: a\n- b", 3, 4)
    ),
    "no syntax of TOML": Case(
        "not TOML: Invalid value", None, ("default = 'alpha'\nlayers = alpha", "")
    ),
    "an end too early": Case(
        "not TOML: Invalid value", None, ("default = 'alpha'\nlayers = [\n\n", "")
    ),
    "YAML in a file of TOML": Case("not TOML: Expected '='", None, ("default: alpha", "")),
    "a tab": Case(
        r"not YAML: while scanning for the next token found character '\t' that cannot start any "
        "token. Remedy: indent with spaces.",
        ("default: alpha\nlayers:\n\t- match: a", 3, 1),
    ),
    "a character": Case(
        r"character '\x07' is not allowed in YAML. Remedy: take it out.",
        ("default: alpha\n# \x07", 2, 0),
    ),
    "a character in TOML": Case(
        r"not TOML: Found invalid character '\x07'", None, ("default = 'alpha'\n# \x07", "")
    ),
    "a tag": Case(
        "tag 'tag:yaml.org,2002:python/object/apply:os.system'. Expected: plain values. Remedy: "
        "take the tag",
        ("default: alpha\nlayers: !!python/object/apply:os.system ['touch FOLDER/hacked']", 2, 9),
    ),
    "a tag of one's own": Case("tag '!recipe'", ("default: !recipe alpha", 1, 10)),
    "a tag of another kind": Case("tag 'tag:yaml.org,2002:map'", ("default: !!map alpha", 1, 10)),
    "a tag that does not fit": Case("not a value: invalid literal", ("default: !!int x", 1, 10)),
    "a key that is a number": Case(
        "a key is a number, 1. Expected: text. Remedy: put it in quotes.",
        ("default: alpha\n1: 2", 2, 1),
    ),
    "a key that is a list": Case(
        "a key is a list. Expected: text.", ("default: alpha\n? [a]\n: 2", 2, 3)
    ),
    "a merge key": Case(
        "what serves a role has no key '<<'",
        ("layers: [{match: a, all: &x {recipe: alpha}}]\ndefault: {<<: *x}", 2, 11),
    ),
    "several documents": Case(
        "not YAML: expected a single document in the stream but found another document",
        ("default: alpha\n---\ndefault: alpha", 2, 1),
    ),
    "an unknown alias": Case(
        "not YAML: found undefined alias 'x'", ("default: alpha\nlayers: *x", 2, 9)
    ),
    "a deep list": Case(
        "values are nested too deeply",
        ("default: alpha\nlayers: " + "[" * 60 + "]" * 60, 2, 41),
        (
            "default = 'alpha'\nlayers = " + "[" * 60 + "]" * 60,
            "layers" + "[0]" * 32,
        ),
    ),
    "a very deep list": Case(
        "values are nested too deeply",
        ("default: " + "[" * 100000, 0, 0),
        ("default = " + "[" * 100000, ""),
    ),
}
PAIRS = [
    (name, kind)
    for name, case in CASES.items()
    for kind in ("yaml", "toml")
    if getattr(case, kind) is not None
]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, name: str, kind: str) -> None:
    case = CASES[name]
    text, *place = getattr(case, kind)
    where = place[0] if kind == "toml" else "line {}, column {}".format(*place)
    # The reader of YAML tells no column of a character, and no place of what is far too deep.
    where = where.removesuffix(", column 0").removesuffix("line 0")
    write(tmp_path, "default: keeper", "stateful.yaml")
    before = sorted(os.listdir(tmp_path))
    path = write(tmp_path, text.replace("FOLDER", str(tmp_path)), f"model.{kind}")
    with pytest.raises(OttavaError) as caught:
        load_factory(path)
    assert type(caught.value) is case.error
    message = str(caught.value)
    assert message.startswith(f"{path}, {where}: " if where else f"{path}: "), message
    assert case.said.replace("FOLDER", str(tmp_path)) in message
    assert "\n" not in message
    path.unlink()
    assert sorted(os.listdir(tmp_path)) == before


def test_a_missing_package_is_named_unless_the_name_is_misspelled(tmp_path: Path) -> None:
    with pytest.raises(RecipeNotFoundError, match=r"pip install ottava-recipes-fourbit"):
        load_factory(write(tmp_path, "default: fourbit"))
    with pytest.raises(
        RecipeNotFoundError, match=r"Expected: one of alpha, .*use 'identity'"
    ) as caught:
        load_factory(write(tmp_path, "default: identiti"))
    assert "pip" not in str(caught.value)


def test_every_line_ending_counts_once(tmp_path: Path) -> None:
    for ending in ("\n", "\r\n", "\r"):
        text = ending.join(["default: alpha", "# b", "layers: 3"])
        with pytest.raises(OptionError, match="line 3, column 9: layers is"):
            load_factory(write(tmp_path, text))
