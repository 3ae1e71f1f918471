# SPDX-License-Identifier: Apache-2.0
"""Pins the recipe's canonical form and runtime key, against vectors made by hand.

The literals are SHA-256 sums (sha256sum) of canonical texts that were typed, not of
anything the code printed: a change here changes every key that was ever published.
"""

import copy
import json

import pytest
from packaging.version import Version

from fork import recipe
from fork.edits import Assigns, InsertAfter, SetKeyword
from fork.tree import Overlay

NEW = "vllm/new.py"
WIDTH = SetKeyword(
    "vllm/cache.py", "Cache.__init__", call="Pages", keyword="width", old="32", new="64"
)
SIZE = InsertAfter("vllm/cache.py", "Cache", anchor=Assigns("size"), code="größe = 1")

# {"edits":[{"call":"Pages","file":"vllm/cache.py","keyword":"width","new":"64","old":"32",
# "scope":"Cache.__init__","verb":"SetKeyword"}],"modules":{"vllm/new.py":"680bf464…"}}
ONE = "13e6cfff95fd0f99ef527057e20a3c472c749aff85efc2f0c27c2659d6aafbd9"
# {"edits":[{"anchor":["Assigns","size"],"code":"größe = 1","file":"vllm/cache.py",
# "scope":"Cache","verb":"InsertAfter"}],"modules":{}}
TWO = "463a161f71fdf7587176a9b61489b672dee389657b77124b1e63d1535801fda8"
# {"base":{"deep_gemm":"2.8","flashinfer":"0.7","torch":"2.14","transformers":">=5",
# "version":"0.33.0","wheels":{"aarch64":"b…b","x86_64":"a…a"}},"members":[
# {"name":"p_one","sha256":ONE},{"name":"p_two","sha256":TWO}],"release":1,"schema":1}
KEY = "d92a17bc4e820439442b0b12f87be91105f73b40cba2d2936360e8b133fa9397"


@pytest.fixture
def members(make_patch, tmp_path):
    (tmp_path / NEW).parent.mkdir()
    (tmp_path / NEW).write_bytes(b"NEW = 1\n")
    return [make_patch("p_one", WIDTH, modules=(NEW,)), make_patch("p_two", SIZE)]


@pytest.fixture
def built(tiny_pin, members):
    return recipe.build(tiny_pin, members)


def test_build(built):
    assert built == {
        "schema": 1,
        "release": 1,
        "base": {
            "version": "0.33.0",
            "wheels": {"x86_64": "a" * 64, "aarch64": "b" * 64},
            "flashinfer": "0.7",
            "torch": "2.14",
            "transformers": ">=5",
            "deep_gemm": "2.8",
        },
        "members": [{"name": "p_one", "sha256": ONE}, {"name": "p_two", "sha256": TWO}],
    }


def test_runtime_key(built):
    assert recipe.runtime_key(built) == KEY


def test_canonical_form():
    given = {"b": {"c": None}, "a": [1, "ü"]}
    assert recipe.canonical(given) == '{"a":[1,"ü"],"b":{"c":null}}'.encode()
    assert recipe.runtime_key(given) == (
        "6c79494736375fb2b352206d4255d7d3ea68b2a078801548e7503e43b9b7de50"
    )


def test_order_of_keys_does_not_count(built):
    turned = dict(reversed(built.items()))
    turned["base"] = dict(reversed(built["base"].items()))
    turned["base"]["wheels"] = dict(reversed(built["base"]["wheels"].items()))
    assert list(turned) != list(built)
    assert recipe.runtime_key(turned) == KEY


def leaves(value, path=()):
    """The path of every scalar in a nested structure."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, (*path, key))
    else:
        yield path


def test_every_pin_and_content_changes_the_key(built):
    keys = {KEY}
    paths = list(leaves(built))
    for *way, last in paths:
        changed = copy.deepcopy(built)
        inner = changed
        for step in way:
            inner = inner[step]
        inner[last] = f"{inner[last]}0"
        keys.add(recipe.runtime_key(changed))
    assert len(paths) == 13  # schema, release, five pins, two wheels, two members of two
    assert len(keys) == 1 + len(paths)


@pytest.mark.parametrize("pick", [(1, 0), (0,), (1,), (), (0, 1, 1)])
def test_order_and_number_of_members_change_the_key(tiny_pin, members, pick):
    other = recipe.build(tiny_pin, [members[i] for i in pick])
    assert recipe.runtime_key(other) != KEY


def test_a_module_s_byte_changes_the_key(tiny_pin, members, tmp_path):
    (tmp_path / NEW).write_bytes(b"NEW = 1\r\n")
    assert recipe.runtime_key(recipe.build(tiny_pin, members)) != KEY


def test_members_are_digested_for_the_base(make_patch, tiny_pin, members):
    """A base the patch has no variant for is another content."""
    member = make_patch("p_one", WIDTH, bases="<0.33", modules=(NEW,))
    assert member.digest(Version("0.32.0")) == ONE
    assert recipe.build(tiny_pin, [member])["members"][0]["sha256"] != ONE


def test_document_and_back(built, write_tree, tmp_path):
    tree = Overlay(write_tree(tmp_path / "tree"), {recipe.PATH: recipe.document(built)})
    assert recipe.carried_by(tree) == {"runtime_key": KEY, "recipe": built}
    assert recipe.members_of(tree) == ["p_one", "p_two"]
    assert recipe.document(built).endswith(b"}\n")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("p_one", "p_two"),
        lambda text: text.replace(KEY, KEY[::-1]),
        lambda text: json.dumps(json.loads(text)["recipe"]),
        lambda text: "[]",
        lambda text: "null",
        lambda text: "\udcff",
    ],
    ids=["empty", "half", "content", "key", "no key", "list", "null", "not UTF-8"],
)
def test_damaged_document_is_not_carried(built, write_tree, tmp_path, damage):
    text = damage(recipe.document(built).decode())
    data = text.encode("utf-8", "surrogateescape")
    tree = Overlay(write_tree(tmp_path / "tree"), {recipe.PATH: data})
    assert recipe.carried_by(tree) is None


def test_stock_tree_carries_none(write_tree, tmp_path):
    tree = write_tree(tmp_path / "tree")
    assert recipe.carried_by(tree) is None
    assert recipe.members_of(tree) == []
