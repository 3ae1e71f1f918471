# SPDX-License-Identifier: Apache-2.0
"""Pins UPSTREAM.toml's refusals, and the check of each figure against the wheel."""

import pytest

from fork import ForkError, pin

HASH = "0123456789abcdef" * 4

TEXT = f"""
release = 3
base = "0.33.0"

[bases."0.33.0"]
flashinfer = "0.7.2.post1"
torch = "2.14.0"
transformers = "<5.21,>=5.16"
deep_gemm = "2.8.1"
wheels.x86_64 = {{ name = "v.whl", sha256 = "{HASH}" }}
flashinfer_wheel = {{ name = "f.whl", sha256 = "{HASH}" }}
"""


def test_parse():
    found = pin.parse(TEXT)
    version, base = found.of()
    assert (found.release, version, found.of("0.33.0")) == (3, "0.33.0", ("0.33.0", base))
    assert (base.flashinfer, base.torch, base.deep_gemm) == ("0.7.2.post1", "2.14.0", "2.8.1")
    assert base.wheels == {"x86_64": pin.WheelPin(name="v.whl", sha256=HASH)}
    assert found.fork_version() == "0.33.0+sm120.3"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("release = 3", "release = = 3", ["not TOML"]),
        ("release = 3", "release = 3\nrelease = 4", ["not TOML"]),
        ("release = 3", "", ["release", "required"]),
        ("release = 3", 'release = "x"', ["release"]),
        ('torch = "2.14.0"', "", ["bases.0.33.0.torch", "required"]),
        ('torch = "2.14.0"', 'torch = "2.14.0"\ncuda = "13"', ["bases.0.33.0.cuda"]),
        ("release = 3", "release = 3\nnote = 1", ["note"]),
        ('name = "f.whl"', 'name = "f.whl", size = 3', ["flashinfer_wheel.size"]),
        (
            f'"f.whl", sha256 = "{HASH}"',
            f'"f.whl", sha256 = "{HASH[1:]}"',
            ["flashinfer_wheel.sha256"],
        ),
        (
            f'"f.whl", sha256 = "{HASH}"',
            f'"f.whl", sha256 = "{HASH}0"',
            ["flashinfer_wheel.sha256"],
        ),
        (
            f'"v.whl", sha256 = "{HASH}"',
            f'"v.whl", sha256 = "{HASH.upper()}"',
            ["wheels.x86_64.sha256"],
        ),
        (
            f'"v.whl", sha256 = "{HASH}"',
            f'"v.whl", sha256 = "{HASH[1:]}\\n"',
            ["wheels.x86_64.sha256"],
        ),
        ('base = "0.33.0"', 'base = "0.32.0"', ["0.32.0 is not served", "0.33.0"]),
    ],
)
def test_parse_refuses(old, new, words):
    assert TEXT.count(old) == 1
    with pytest.raises(ForkError) as caught:
        pin.parse(TEXT.replace(old, new), "UPSTREAM.toml")
    assert all(word in str(caught.value) for word in words), caught.value
    if "served" not in words[0]:
        assert str(caught.value).startswith("UPSTREAM.toml")


def test_base_not_served_says_what_is_and_what_to_do():
    with pytest.raises(ForkError, match=r"base 0\.29\.0 is not served.*0\.33\.0.*UPSTREAM\.toml"):
        pin.parse(TEXT).of("0.29.0")


def test_pin_of_this_checkout():
    found = pin.load()
    assert found.base in found.bases
    for base in found.bases.values():
        assert set(base.wheels) == set(pin.PLATFORMS)
        assert all(w.name.endswith(f"{p}.whl") for p, w in base.wheels.items())
    wheels = [w.sha256 for base in found.bases.values() for w in base.wheels.values()]
    assert len(set(wheels)) == len(wheels)


METADATA = """\
Metadata-Version: 2.4
Name: vllm
Version: 0.33.0
Requires-Dist: torch==2.14.0
Requires-Dist: transformers >= 5.16, < 5.21
Requires-Dist: FlashInfer_Python==0.7.2.post1
Requires-Dist: torch==9.9; extra == "other"
Requires-Dist: numpy

Requires-Dist: torch==1.0 is only text here
"""
DEEP_GEMM = "x = 1\n__version__ = '2.8.1'\n"


def check(metadata=METADATA, deep_gemm=DEEP_GEMM):
    pin.check_against_wheel(pin.parse(TEXT).of()[1], metadata.encode(), deep_gemm.encode())


def test_the_wheel_agrees():
    check()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("torch==2.14.0", "torch==2.13.0", ["torch: ", "==2.14.0", "==2.13.0"]),
        ("torch==2.14.0", "torch>=2.14.0", ["torch: ", ">=2.14.0"]),
        ("< 5.21", "< 5.22", ["transformers: ", "<5.22"]),
        (", < 5.21", "", ["transformers: ", "<5.21"]),
        ("0.7.2.post1", "0.7.2", ["flashinfer: ", "==0.7.2.post1", "==0.7.2"]),
        ("Requires-Dist: FlashInfer_Python==0.7.2.post1\n", "", ["flashinfer: "]),
        ("torch==2.14.0", 'torch==2.14.0; python_version > "3"', ["torch: "]),
    ],
)
def test_the_wheel_disagrees_on_a_requirement(old, new, words):
    assert METADATA.count(old) == 1
    with pytest.raises(ForkError) as caught:
        check(metadata=METADATA.replace(old, new))
    text = str(caught.value)
    assert all(word in text for word in words)
    assert text.count("UPSTREAM.toml says") == 1


@pytest.mark.parametrize(
    "text", ["__version__ = '2.8.0'\n", "x = 1\n", "# __version__ = '2.8.1'\n"]
)
def test_the_wheel_disagrees_on_deep_gemm(text):
    with pytest.raises(ForkError, match=r"deep_gemm: UPSTREAM\.toml says 2\.8\.1, the wheel says"):
        check(deep_gemm=text)


def test_every_disagreement_is_listed():
    with pytest.raises(ForkError) as caught:
        check(metadata="Name: vllm\n", deep_gemm="")
    assert str(caught.value).count("UPSTREAM.toml says") == 4
