# SPDX-License-Identifier: Apache-2.0
"""Pins digests, against vectors made by hand and against the self-test's own code.

The literals are SHA-256 sums (sha256sum) of canonical texts that were typed: a change
here changes keys that were published.
"""

import importlib.util
import json
import sys
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fork import ROOT, recipe
from sm120_launch import LaunchError, keys, requests
from sm120_launch.requests import Engram, HfOverrides, KvCache, Modality, Parallel

REPORT = ROOT / "vllm/models/deepseek_v41/nvidia/sm120_selftest_report.py"

MODEL = "/models/DeepSeek-V4.1"
# printf '%s' TEXT | sha256sum
VECTORS = {
    # {"model":"/models/DeepSeek-V4.1","requests":{},"schema":1}
    (): "52191db67a60be36dc985c21c8195c43010e68c135c1b9a638285375b599865c",
    # {"model":"/models/DeepSeek-V4.1","requests":{"modality":{"modality":"text-only"}},
    # "schema":1}
    (
        Modality(modality="text-only"),
    ): "9211c181de55091b1324684aca14c878c550991f38f73097ba28df838b1a8f70",
    # {"model":"/models/DeepSeek-V4.1","requests":{"engram":{"cpu_offload":true},
    # "kv_cache":{"dtype":"fp8"},"modality":{"modality":"text-only"},
    # "parallel":{"master_address":"10.0.0.1","nnodes":4,"tensor":4}},"schema":1}
    (
        Modality(modality="text-only"),
        Engram(cpu_offload=True),
        KvCache(dtype="fp8"),
        Parallel(tensor=4, nnodes=4, master_address="10.0.0.1"),
    ): "397b3b0a68dcc3287f334c7c63f6638906b87b9e4d54276137fa22392b26fd97",
}


def key(made, model=MODEL):
    return keys.profile_key(model, requests.contents(made))


@pytest.mark.parametrize("made", VECTORS, ids=len)
def test_profile_key(made):
    assert key(made) == VECTORS[made]


def test_profile_key_of_overrides():
    # {"model":"/m","requests":{"hf_overrides":{"values":{"a":null,"b":"ü"}}},"schema":1}
    made = [HfOverrides(values={"b": "ü", "a": None})]
    assert key(made, "/m") == "33faa4e955d94fd534f3d714148da639479117a73af5c95cef1df13cd5137f8d"


@pytest.fixture
def new_kind(monkeypatch):
    """A kind of request that this version does not have, and a new field of an old one."""

    class Quick(requests.Request):
        kind: str = "quick"
        level: int

        def render(self, context):
            return ["--quick", str(self.level)]

    class WiderKv(KvCache):
        salt: str | None = None

    kinds = [WiderKv if kind is KvCache else kind for kind in requests.KINDS]
    monkeypatch.setattr(requests, "KINDS", (Quick, *kinds))
    return Quick, WiderKv


def test_a_new_kind_or_field_changes_no_key_that_exists(new_kind):
    quick, wider = new_kind
    for made, old in VECTORS.items():
        made = [wider(**r.model_dump()) if isinstance(r, KvCache) else r for r in made]
        assert key(made) == old
        assert key([*made, quick(level=1)]) != old


def test_argv_and_environment():
    # ["/models/größe","--a","x y"]
    assert (
        keys.argv_sha256(["/models/größe", "--a", "x y"])
        == "ebbf20c22f381e918552c2d559f0408b253b81384f9a10a47b31acdbdc014875"
    )
    # {"DG_JIT_DEBUG":"0","VLLM_USE_X":"1"}
    given_ = {"VLLM_USE_X": "1", "HF_TOKEN": "secret", "PATH": "/bin", "DG_JIT_DEBUG": "0"}
    assert (
        keys.env_sha256(given_)
        == "271154a821b23ede40bf17b297857659e98515fe47ed8d8271bc3576db7543eb"
    )
    # {}
    assert (
        keys.env_sha256({"NCCL_DEBUG": "INFO"})
        == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    )


@pytest.fixture(scope="module")
def report():
    """The self-test's report module: it imports the standard library alone."""
    spec = importlib.util.spec_from_file_location("report_of_the_selftest", REPORT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


WORDS = st.text(max_size=8)  # lone surrogates too: what argv of undecodable bytes holds
NAMES = st.one_of(WORDS, st.builds("".join, st.tuples(st.sampled_from(keys.ENVIRONMENT), WORDS)))


@given(argv=st.lists(WORDS), env=st.dictionaries(NAMES, WORDS))
def test_as_the_selftest_writes_them(report, argv, env):
    assert keys.argv_sha256(argv) == report.digest(list(argv))
    assert keys.environment(env) == report.environment(env)
    assert keys.env_sha256(env) == report.digest(report.environment(env))


def test_the_selftest_s_prefixes(report):
    assert keys.ENVIRONMENT == report._ENVIRONMENT


MADE = st.fixed_dictionaries(
    {},
    optional={
        "modality": st.sampled_from(["text-only", "multimodal"]).map(
            lambda m: Modality(modality=m)
        ),
        "engram": st.booleans().map(lambda b: Engram(cpu_offload=b)),
        "kv": st.integers(1, 9).map(lambda n: KvCache(block_size=64 * n)),
        "limits": st.integers(1, 9).map(lambda n: requests.Limits(max_num_seqs=n)),
        "hf": st.integers(0, 9).map(lambda n: HfOverrides(values={"a": n})),
        "extra": st.lists(st.sampled_from(["--x", "--y"]), min_size=1).map(
            lambda a: requests.Extra(arguments=tuple(a))
        ),
    },
)


@given(MADE, MADE)
def test_a_key_is_what_was_asked(one, other):
    """Equal requests, equal keys; any other request, field or value, another key. The
    order in which a profile says them is nothing."""
    same = one == other
    assert (key(one.values()) == key(other.values())) == same
    assert key(reversed(one.values())) == key(one.values())
    assert key(one.values(), "/other") != key(one.values())


@pytest.fixture
def document(tmp_path):
    """A recipe as the fork publishes it."""
    built = {
        "schema": 1,
        "base": {"version": "0.33.0"},
        "members": [{"name": "engram_a", "sha256": "a" * 64}, {"name": "ours", "sha256": "b" * 64}],
    }
    path = tmp_path / "recipe.json"
    path.write_bytes(recipe.document(built))
    return path


def test_recipe_from_file_and_wheel(document, tmp_path):
    found = keys.load_recipe(document)
    assert (found.base, found.members) == ("0.33.0", ("engram_a", "ours"))
    assert found.runtime_key == recipe.runtime_key(json.loads(document.read_text())["recipe"])
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("vllm/sm120_recipe.json", document.read_bytes())
    assert keys.load_recipe(wheel) == found


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: "", "no recipe in it"),
        (lambda text: text[:-9], "no recipe in it"),
        (lambda text: "[]", "no recipe in it"),
        (lambda text: text.replace("engram_a", "engram_b"), "edited or damaged"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "schema 2"),
        (lambda text: text.replace("0.33.0", "main"), "'main'"),
    ],
    ids=["empty", "cut", "list", "member", "schema", "base"],
)
def test_recipe_that_is_not_right(document, damage, words):
    document.write_text(damage(document.read_text()))
    with pytest.raises(LaunchError, match=words) as refusal:
        keys.load_recipe(document)
    assert str(document) in str(refusal.value)


def test_recipe_that_is_not_there(tmp_path):
    with pytest.raises(LaunchError, match="fork recipe --json"):
        keys.load_recipe(tmp_path / "nowhere.json")
    with zipfile.ZipFile(tmp_path / "stock.whl", "w") as file:
        file.writestr("vllm/__init__.py", "")
    with pytest.raises(LaunchError, match="no recipe in it"):
        keys.load_recipe(tmp_path / "stock.whl")
