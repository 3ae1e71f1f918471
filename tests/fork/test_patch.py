# SPDX-License-Identifier: Apache-2.0
"""Pins a patch's verdict on a tree, its digest, and the refusals of ``load``."""

import sys

import pytest
from packaging.version import Version

from fork import ForkError, patch
from fork.edits import Assigns, InsertAfter, SetKeyword, SetReturn, SetValue, State
from fork.patch import Variant, Verdict, changes, examine, load
from fork.tree import Overlay

BASE = Version("0.33.0")
CACHE, RUN, NEW = "vllm/cache.py", "vllm/worker/run.py", "vllm/worker/new.py"
WIDTH = SetKeyword(CACHE, "Cache.__init__", call="Pages", keyword="width", old="32", new="64")
SIZES = SetReturn(RUN, "sizes", old="[128]", new="[64]")
SIZE = SetValue(CACHE, "Cache", target="size", old="8", new="16")
# Another way in which upstream may land the same.
ACCEPTED = SetKeyword(CACHE, "Cache.__init__", call="Pages", keyword="width", old="32", new="WIDE")

DONE = {
    WIDTH: (CACHE, b"width=32", b"width=64"),
    SIZES: (RUN, b"[128]", b"[64]"),
    SIZE: (CACHE, b"int = 8", b"int = 16"),
    ACCEPTED: (CACHE, b"width=32", b"width=WIDE"),
}


@pytest.fixture
def tree(write_tree, tmp_path):
    """The miniature tree; ``changed(path, old, new)`` lays a change over it."""
    under = write_tree(tmp_path / "tree")

    def changed(*replacements):
        overlay = Overlay(under)
        for path, old, new in replacements:
            data = overlay.read(path)
            assert old in data
            overlay.changes[path] = data.replace(old, new)
        return overlay

    return changed


@pytest.fixture
def new_module(tmp_path):
    """The checkout's new module."""
    (tmp_path / NEW).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / NEW).write_bytes(b"NEW = 1\n")


def test_pending(tree, make_patch):
    standing = examine(make_patch("p", WIDTH, SIZES), tree(), ours=False)
    assert (standing.verdict, standing.why) == (Verdict.PENDING, ())
    assert [f.what for f in standing.findings] == [WIDTH.describe(), SIZES.describe()]


@pytest.mark.parametrize(("ours", "verdict"), [(True, Verdict.APPLIED), (False, Verdict.UPSTREAM)])
def test_our_form_is_applied_with_a_recipe_and_upstream_without(tree, make_patch, ours, verdict):
    standing = examine(make_patch("p", WIDTH, SIZES), tree(DONE[WIDTH], DONE[SIZES]), ours=ours)
    assert standing.verdict is verdict
    assert bool(standing.why) != ours


def test_half_landed_is_drift_and_lists_both(tree, make_patch):
    standing = examine(make_patch("p", WIDTH, SIZES), tree(DONE[WIDTH]), ours=True)
    assert standing.verdict is Verdict.DRIFT
    assert standing.why[0].startswith("half-landed")
    assert f"{WIDTH.describe()}: applied" in standing.why
    assert f"{SIZES.describe()}: pending" in standing.why


@pytest.mark.parametrize("done", [(), (DONE[SIZES],)], ids=["rest pending", "rest applied"])
def test_one_drifted_edit_is_drift_and_only_it_is_named(tree, make_patch, done):
    drifted = tree((CACHE, b"width=32", b"width=48"), *done)
    standing = examine(make_patch("p", WIDTH, SIZES), drifted, ours=False)
    assert standing.verdict is Verdict.DRIFT
    [why] = standing.why
    assert why.startswith(WIDTH.describe())
    assert "'48'" in why and "'32'" in why


@pytest.mark.parametrize(
    ("there", "ours", "verdict"),
    [
        (None, False, Verdict.PENDING),
        (b"NEW = 1\n", True, Verdict.APPLIED),
        (b"NEW = 1\n", False, Verdict.UPSTREAM),
        (b"NEW = 2\n", True, Verdict.DRIFT),
        (b"NEW = 1\r\n", True, Verdict.DRIFT),
        (b"", False, Verdict.DRIFT),
    ],
)
def test_new_module_alone(tree, make_patch, new_module, there, ours, verdict):
    overlay = tree()
    overlay.changes[NEW] = there
    standing = examine(make_patch("p", modules=(NEW,)), overlay, ours)
    assert standing.verdict is verdict
    if verdict is Verdict.DRIFT:
        assert NEW in standing.why[0] and "other contents" in standing.why[0]


@pytest.mark.parametrize("there", [True, False], ids=["module only", "edit only"])
def test_edit_and_module_land_together_or_it_is_drift(tree, make_patch, new_module, there):
    overlay = tree() if there else tree(DONE[WIDTH])
    overlay.changes[NEW] = b"NEW = 1\n" if there else None
    standing = examine(make_patch("p", WIDTH, modules=(NEW,)), overlay, ours=True)
    assert standing.verdict is Verdict.DRIFT
    assert standing.why[0].startswith("half-landed")


def test_no_variant_for_a_base(tree, make_patch):
    [why] = examine(make_patch("p", WIDTH, bases=">=0.30,<0.33"), tree(), ours=False).why
    assert "0.33.0" in why and ">=0.30,<0.33" in why
    verdict = examine(make_patch("p", WIDTH, bases=">=0.30,<0.33"), tree(), ours=False).verdict
    assert verdict is Verdict.DRIFT


def test_the_variant_is_the_one_of_the_base(make_patch):
    old, new = Variant(">=0.30,<0.32", (WIDTH,)), Variant(">=0.32,<0.34", (SIZES,))
    member = make_patch("p", variants=(old, new))
    assert member.variant(Version("0.31.9")) is old
    assert member.variant(Version("0.32.0")) is new
    assert member.variant(Version("0.33.0rc1")) is new
    assert member.variant(Version("0.34.0")) is None


def test_overlapping_variants_are_an_error(make_patch):
    member = make_patch("p", variants=(Variant(">=0.30", (WIDTH,)), Variant("<0.34", (SIZES,))))
    with pytest.raises(ValueError, match=r"two variants for 0\.33\.0"):
        member.variant(BASE)


@pytest.mark.parametrize("edits", [(WIDTH,), (WIDTH, SIZES)], ids=["instead", "half-landed"])
def test_accepted_form_is_upstream(tree, make_patch, edits):
    member = make_patch("p", *edits, accepted=(Variant(">=0.33", (ACCEPTED,)),))
    standing = examine(member, tree(DONE[ACCEPTED]), ours=False)
    assert standing.verdict is Verdict.UPSTREAM
    assert ACCEPTED.describe() in standing.why[0]


def test_accepted_form_counts_although_no_variant_is_left(tree, make_patch):
    member = make_patch("p", WIDTH, bases="<0.33", accepted=(Variant(">=0.33", (ACCEPTED,)),))
    assert examine(member, tree(DONE[ACCEPTED]), ours=False).verdict is Verdict.UPSTREAM


def test_accepted_form_beside_a_pending_anchor(tree, make_patch):
    """Upstream solved it elsewhere: ours would still fit, and is not needed."""
    member = make_patch("p", WIDTH, accepted=(Variant(">=0.33", (SIZES,)),))
    assert examine(member, tree(DONE[SIZES]), ours=False).verdict is Verdict.UPSTREAM


@pytest.mark.parametrize(
    "form",
    [Variant("<0.33", (ACCEPTED,)), Variant(">=0.33", (ACCEPTED, SIZES))],
    ids=["another base's", "half of it"],
)
def test_accepted_form_that_is_not_whole_or_not_of_this_base(tree, make_patch, form):
    standing = examine(make_patch("p", WIDTH, accepted=(form,)), tree(DONE[ACCEPTED]), ours=False)
    assert standing.verdict is Verdict.DRIFT


@pytest.mark.parametrize(
    "broken",
    [b"match x:\n  case 1\n", b"class Cache(:\n", b"x = '\xff'\n", b"# coding: unheard-of\n"],
    ids=["match", "class", "not UTF-8", "coding"],
)
def test_syntax_not_understood_is_drift_and_names_the_file(tree, make_patch, broken):
    overlay = tree()
    overlay.changes[CACHE] = broken
    standing = examine(make_patch("p", WIDTH, SIZES), overlay, ours=False)
    assert standing.verdict is Verdict.DRIFT
    [why] = standing.why
    assert CACHE in why and "not understood" in why


def test_missing_file_is_drift_and_named(tree, make_patch):
    overlay = tree()
    overlay.changes[RUN] = None
    [why] = examine(make_patch("p", WIDTH, SIZES), overlay, ours=False).why
    assert RUN in why and "no such file" in why


def test_changes_are_the_new_bytes_and_back(tree, make_patch, new_module):
    member = make_patch("p", WIDTH, SIZE, SIZES, modules=(NEW,))
    overlay = tree()
    to = changes(member, overlay, State.APPLIED)
    edited = tree(DONE[WIDTH], DONE[SIZE], DONE[SIZES])
    assert to == {**edited.changes, NEW: b"NEW = 1\n"}
    back = changes(member, Overlay(overlay, to), State.PENDING)
    assert back == {CACHE: overlay.read(CACHE), RUN: overlay.read(RUN), NEW: None}


@pytest.mark.parametrize(
    "edits",
    [
        (WIDTH, SetValue(CACHE, "Cache.__init__", "self.pages", "Pages(width=32)", "None")),
        (
            InsertAfter(CACHE, "Cache", anchor=Assigns("size"), code="a = 1"),
            InsertAfter(CACHE, "Cache", anchor=Assigns("size"), code="b = 1"),
        ),
        (InsertAfter(CACHE, "Cache", anchor=Assigns("size"), code="size = 1"),),
    ],
    ids=["overlap", "same place", "spoils its own anchor"],
)
def test_a_patch_that_cannot_be_undone_is_an_error(tree, make_patch, edits):
    member = make_patch("p", *edits)
    assert examine(member, tree(), ours=False).verdict is Verdict.PENDING
    with pytest.raises(ValueError):
        changes(member, tree(), State.APPLIED)


def test_digest_is_of_what_the_patch_does(make_patch, new_module):
    """Not of what people read about it, or of its name."""
    one = make_patch("p", WIDTH, modules=(NEW,))
    told = make_patch("q", WIDTH, modules=(NEW,), title="T", why="W", retire="R", upstream="U")
    assert one.digest(BASE) == told.digest(BASE)


@pytest.mark.parametrize(
    "edits",
    [
        (),
        (SIZES,),
        (WIDTH, SIZES),
        (SetKeyword(CACHE, "Cache.__init__", "Pages", "width", old="32", new="65"),),
        (SetKeyword(CACHE, "Cache.__init__", "Pages", "width", old="31", new="64"),),
        (SetKeyword(CACHE, "Cache.__init__", "Pages", "height", old="32", new="64"),),
        (SetKeyword(CACHE, "Cache", "Pages", "width", old="32", new="64"),),
        (SetKeyword(RUN, "Cache.__init__", "Pages", "width", old="32", new="64"),),
    ],
)
def test_digest_changes_with_the_edits(make_patch, edits):
    assert make_patch("p", *edits).digest(BASE) != make_patch("p", WIDTH).digest(BASE)


def test_digest_changes_with_the_anchor(make_patch):
    def digest(anchor):
        return make_patch("p", InsertAfter(CACHE, "", anchor=anchor, code="x")).digest(BASE)

    assert digest(Assigns("a")) != digest(Assigns("b"))


def test_digest_changes_with_any_byte_and_the_path_of_a_module(make_patch, new_module, tmp_path):
    member = make_patch("p", modules=(NEW,))
    before = member.digest(BASE)
    (tmp_path / NEW).write_bytes(b"NEW = 1 \n")
    after = member.digest(BASE)
    (tmp_path / "vllm/worker/other.py").write_bytes(b"NEW = 1 \n")
    moved = make_patch("p", modules=("vllm/worker/other.py",)).digest(BASE)
    assert len({before, after, moved}) == 3


def test_digest_is_of_the_base_variant(make_patch):
    member = make_patch("p", variants=(Variant("<0.33", (WIDTH,)), Variant(">=0.33", (SIZES,))))
    assert member.digest(Version("0.32.0")) == make_patch("p", WIDTH).digest(BASE)
    assert member.digest(BASE) == make_patch("p", SIZES).digest(BASE)


DOC = "Title of it\n\nWhy: because\n    it is so.\nUpstream: none.\nRetire: never.\nTest: pytest\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose only patch module is ``sm120_x`` with the text given."""
    folder = tmp_path / "patches"
    folder.mkdir()

    def with_text(text):
        (folder / "sm120_x.py").write_text(text)
        (folder / "__init__.py").write_text("")
        for name in ("patches", "patches.sm120_x"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(patch, "ROOT", tmp_path)
        monkeypatch.syspath_prepend(tmp_path)

    yield with_text
    for name in ("patches", "patches.sm120_x"):
        sys.modules.pop(name, None)


def test_load_reads_docstring_and_contents(checkout):
    checkout(f'"""{DOC}"""\nMODULES = ("a.py",)\n')
    member = load("sm120_x")
    assert (member.name, member.title) == ("sm120_x", "Title of it")
    assert member.why.split() == ["because", "it", "is", "so."]
    assert (member.upstream, member.retire, member.test) == ("none.", "never.", "pytest")
    assert (member.variants, member.modules, member.accepted) == ((), ("a.py",), ())


@pytest.mark.parametrize("section", ["Why", "Upstream", "Retire", "Test"])
@pytest.mark.parametrize("how", ["missing", "empty"])
def test_load_refuses_a_docstring_that_lacks_a_section(checkout, section, how):
    lines = DOC.replace("\n    it is so.", "").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(section))
    lines[at] = "" if how == "missing" else f"{section}:"
    checkout('"""{}"""\n'.format("\n".join(lines)))
    with pytest.raises(ForkError, match=rf"sm120_x\.py.*lacks {section}$"):
        load("sm120_x")


def test_load_refuses_no_docstring(checkout):
    checkout("X = 1\n")
    with pytest.raises(ForkError, match="lacks Why, Upstream, Retire, Test"):
        load("sm120_x")


@pytest.mark.parametrize("name", ["sm120_nothing", "../fork/pin", "", "A", "os"])
def test_load_refuses_an_unknown_name(name):
    with pytest.raises(ForkError, match="no patch is called"):
        load(name)
