# SPDX-License-Identifier: Apache-2.0
"""Pins profiles: what they come to, and that a fault names file, key and remedy."""

import json
import re
import shlex

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from fork import ROOT, recipe
from sm120_launch import LaunchError, images, keys, planning, profile, runtime
from sm120_launch.cli import app
from sm120_launch.plan import LaunchPlan

RECIPE = {"schema": 1, "base": {"version": "0.33.0"}, "members": []}
KEY = recipe.runtime_key(RECIPE)
DIGEST = "sha256:" + "7" * 64

HEAD = """\
schema = 1
name = "sparks"
recipe = "recipe.json"
model = "/models/V4.1"

[[requests]]
kind = "modality"
modality = "text-only"

[[requests]]
kind = "parallel"
tensor = 4
nnodes = 4
master_address = "10.0.0.1"

[defaults]
runtime = "podman"
devices = [0]
env = { VLLM_USE_A = "1", B = "2" }
nccl = { SOCKET_IFNAME = "eth0" }
"""
RANKS = "".join(
    f'\n[[ranks]]\ntransport = {{ kind = "ssh", address = "10.0.0.{n}" }}\n' for n in range(1, 5)
)
SPARKS = HEAD + RANKS
ONE = """\
schema = 1
name = "one"
recipe = "recipe.json"
model = "/models/V4.1"
[[requests]]
kind = "parallel"
tensor = 2
[[ranks]]
transport = { kind = "local" }
runtime = "podman"
devices = [0, 1]
"""


@pytest.fixture
def row():
    return images.Row(
        runtime_key=KEY,
        platform="linux/amd64",
        engine="podman",
        name="localhost/vllm-sm120",
        digest=DIGEST,
        made="2026-11-30T12:00:00Z",
        command="x",
        env={"VLLM_USE_FROM_IMAGE": "1"},
    )


@pytest.fixture
def write(tmp_path, row):
    """Writes a profile beside a recipe and an images file with one row."""

    def write(text, row=row):
        (tmp_path / "recipe.json").write_bytes(recipe.document(RECIPE))
        if row is not None:
            images.append(tmp_path / "images.toml", row)
        path = tmp_path / "profile.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def plan(write):
    return lambda text, **more: planning.plan(profile.load(write(text, **more)))


def test_four_hosts(plan):
    made = plan(SPARKS)
    assert (made.profile, made.base, made.runtime_key) == ("sparks", "0.33.0", KEY)
    assert [r.rank for r in made.ranks] == [0, 1, 2, 3]
    assert [r.transport.address for r in made.ranks] == [f"10.0.0.{n}" for n in range(1, 5)]
    for number, rank in enumerate(made.ranks):
        argv = (
            "/models/V4.1 --language-model-only --tensor-parallel-size 4 --nnodes 4 "
            f"--node-rank {number} --master-addr 10.0.0.1" + (" --headless" if number else "")
        )
        assert rank.argv == tuple(argv.split())
        assert rank.argv_sha256 == keys.argv_sha256(argv.split())
        assert rank.env == {
            "B": "2",
            "HOME": "/cache",
            "NCCL_SOCKET_IFNAME": "eth0",
            "VLLM_USE_A": "1",
        }
        # what the image itself sets counts too: the self-test sees it
        assert rank.env_sha256 == keys.env_sha256({"VLLM_USE_FROM_IMAGE": "1", "VLLM_USE_A": "1"})
        assert rank.image.reference == f"localhost/vllm-sm120@{DIGEST}"
        assert rank.cache_volume == "sm120-cache-" + "7" * 16
        assert rank.starts_engine
        assert rank.checkpoint == rank.model == "/models/V4.1"
    assert [r.ready_port for r in made.ranks] == [8000, None, None, None]


def test_profile_key_is_the_requests_alone(plan, write):
    one = plan(SPARKS)
    other = plan(SPARKS.replace("10.0.0.2", "10.0.0.9").replace('"sparks"', '"other"'))
    assert one.profile_key == other.profile_key
    asked = {
        "modality": {"modality": "text-only"},
        "parallel": {"tensor": 4, "nnodes": 4, "master_address": "10.0.0.1"},
    }
    assert one.profile_key == keys.profile_key("/models/V4.1", asked)
    assert plan(SPARKS.replace("text-only", "multimodal")).profile_key != one.profile_key


def test_a_rank_s_own_settings_are_over_the_defaults(plan):
    text = SPARKS.replace(
        'address = "10.0.0.2" }\n',
        'address = "10.0.0.2" }\ncheckpoint = "/disk/V4.1"\nenv = { B = "3", C = "4" }\n',
    )
    ranks = plan(text).ranks
    assert ranks[1].checkpoint == "/disk/V4.1" and ranks[1].model == "/models/V4.1"
    assert {k: ranks[1].env[k] for k in ("VLLM_USE_A", "B", "C")} == {
        "VLLM_USE_A": "1",
        "B": "3",
        "C": "4",
    }
    assert ranks[0].env["B"] == "2"


def test_numbers_may_be_given(plan):
    ranks = iter((2, 0, 3, 1))
    text = re.sub(r"\[\[ranks\]\]\n", lambda _: f"[[ranks]]\nrank = {next(ranks)}\n", SPARKS)
    made = plan(text)
    assert [r.transport.address[-1] for r in made.ranks] == ["2", "4", "1", "3"]
    assert [r.rank for r in made.ranks] == [0, 1, 2, 3]


RAY = """\
schema = 1
name = "ray"
recipe = "recipe.json"
model = "/models/V4.1"
[[requests]]
kind = "parallel"
tensor = 4
executor = "ray"
[defaults]
runtime = "venv"
venv = "/opt/vllm"
devices = [0]
""" + "".join(
    f'[[ranks]]\ntransport = {{ kind = "ray", address = "auto", node = "10.0.0.{n}" }}\n'
    for n in range(1, 5)
)


def test_ray_has_one_argv_and_one_driver(plan):
    made = plan(RAY, row=None)
    assert len({r.argv for r in made.ranks}) == 1
    assert [r.starts_engine for r in made.ranks] == [True, False, False, False]
    assert [r.image for r in made.ranks] == [None] * 4
    assert "HOME" not in made.ranks[0].env


def test_base_of_the_recipe_decides_the_rendering(write, tmp_path):
    path = write(SPARKS, row=None)
    older = {**RECIPE, "base": {"version": "0.30.0"}}
    (tmp_path / "recipe.json").write_bytes(recipe.document(older))
    text = path.read_text().replace('runtime = "podman"', 'runtime = "venv"\nvenv = "/opt/v"')
    path.write_text(text)
    for rank in planning.plan(profile.load(path)).ranks:
        assert "--hf-overrides.vision_max_n_token" in rank.argv


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schema = 1", "schema = 2", ["schema", "1"]),
        ("schema = 1\n", "", ["schema: missing"]),
        ('name = "sparks"', 'name = "../x"', ["name"]),
        ('model = "/models/V4.1"', 'model = "models"', ["model"]),
        ('model = "/models/V4.1"', 'modle = "/models/V4.1"', ["modle", "'model'"]),
        ('model = "/models/V4.1"', 'model = "/a,b"', ["model"]),
        ('kind = "modality"', 'kind = "modalities"', ["requests.0", "'modalities'", "modality"]),
        ('kind = "modality"', "", ["requests.0", "kind"]),
        ("tensor = 4", 'tensor = "four"', ["requests.1", "tensor", "'four'"]),
        ("tensor = 4", "tenser = 4", ["requests.1", "tenser", "tensor"]),
        ("nnodes = 4", "nnodes = 2", ["4 ranks", "nnodes: 2"]),
        ("devices = [0]", "devices = [0, 1]", ["ranks.0.devices: 2 GPUs", "1, the rank's share"]),
        ("devices = [0]", "devices = [0, 0]", ["twice"]),
        ("devices = [0]", 'devices = ["gpu0"]', ["ranks.0.devices"]),
        ("devices = [0]", "", ["ranks.0.devices: missing"]),
        ('runtime = "podman"', 'runtime = "runc"', ["ranks.0.runtime", "podman"]),
        ('runtime = "podman"', 'runtime = "venv"', ["ranks.0", "'venv'"]),
        ('kind = "ssh", address = "10.0.0.2"', 'kind = "telnet"', ["ranks.1.transport", "ssh"]),
        ('address = "10.0.0.2"', 'address = "-oProxyCommand=x"', ["ranks.1", "address"]),
        ('address = "10.0.0.2"', 'address = "10.0.0.2", port = 0', ["ranks.1", "port"]),
        ('address = "10.0.0.2"', 'address = "10.0.0.1"', ["0 of 10.0.0.1 is rank 0's"]),
        ('B = "2"', 'HF_TOKEN = "x"', ["ranks.0.env", "HF_TOKEN", "pass_env"]),
        ('B = "2"', 'VLLM_API_KEY = "x"', ["VLLM_API_KEY", "pass_env"]),
        ('B = "2"', 'SSH_KEY_PASSPHRASE = "x"', ["SSH_KEY_PASSPHRASE", "pass_env"]),
        ('B = "2"', 'TLS_PRIVATE_KEY = "x"', ["TLS_PRIVATE_KEY", "pass_env"]),
        ('B = "2"', 'HTTPS_PROXY = "http://u:pw9@p:1"', ["HTTPS_PROXY", "login", "pass_env"]),
        ('B = "2"', 'HTTPS_PROXY = "http://pw9@p:1"', ["HTTPS_PROXY", "login", "pass_env"]),
        ('recipe = "recipe.json"', 'recipe = "~nosuchuser-/x"', ["~nosuchuser-/x", "home"]),
        ("schema = 1\n", 'schema = 1\npath = "x"\n', ["path: no such key"]),
        ("schema = 1\n", f"schema = 1\nx = {'[' * 9999}\n", ["nested"]),
        ('B = "2"', 'HOME = "/x"', ["HOME", "cache"]),
        ('B = "2"', 'CUDA_VISIBLE_DEVICES = "1"', ["CUDA_VISIBLE_DEVICES", "devices"]),
        ('B = "2"', 'B = "a\\nb"', ["ranks.0.env.B"]),
        ('B = "2" }', 'B = "2" }\npass_env = ["VLLM_USE_X"]', ["VLLM_USE_X", "'env'"]),
        ('B = "2" }', 'B = "2" }\nshm_size = "16g"\nipc = "host"', ["shm_size", "private"]),
        ('B = "2" }', 'B = "2" }\nstaging = [[]]', ["staging"]),
        ('B = "2" }', 'B = "2" }\nplatform = "linux/riscv"', ["platform"]),
        ('B = "2" }', 'B = "2" }\ngate_timeout_s = 0', ["gate_timeout_s"]),
        ('B = "2" }', 'B = "2" }\nrank = 1', ["defaults: rank"]),
        ("[[requests]]", '[[requests]]\nkind="image_limit"\nimages=1\n[[requests]]', ["text-only"]),
        ("[defaults]", "[[defaults]]", ["defaults"]),
        ("[defaults]", "[defaults", ["not TOML"]),
    ],
)
def test_a_fault_names_file_key_and_remedy(write, old, new, words):
    assert old in SPARKS
    path = write(SPARKS.replace(old, new, 1))
    with pytest.raises(LaunchError) as refusal:
        planning.plan(profile.load(path))
    for word in [*words, str(path)]:
        assert word in str(refusal.value)
    assert "pw9" not in str(refusal.value)


@pytest.mark.parametrize(
    ("server", "where"),
    [
        ("", ("127.0.0.1", 8000)),
        ("port = 9000", ("127.0.0.1", 9000)),
        ('host = "0.0.0.0"', ("127.0.0.1", 8000)),
        ('host = "::"', ("127.0.0.1", 8000)),
        ('host = "10.0.0.5"', ("10.0.0.5", 8000)),
        ('host = "::1"\nport = 9000', ("::1", 9000)),
    ],
)
def test_where_the_engine_answers(plan, server, where):
    asked = f'[[requests]]\nkind = "server"\n{server}\n' if server else ""
    (rank,) = plan(ONE.replace("[[ranks]]", f"{asked}[[ranks]]")).ranks
    assert (rank.ready_host, rank.ready_port) == where


@pytest.mark.parametrize(
    "change",
    [
        {"image": None},
        {"venv": "/opt/v"},
        {"runtime": "venv"},
        {"starts_engine": False},
        {"model": "/models/V4.1,readonly=false"},
        {"checkpoint": "data"},
        {"devices": ["0,1"]},
        {"devices": ["/dev/x --privileged"]},
        {"mounts": [{"source": "/a,target=/b", "target": "/c"}]},
        {"mounts": [{"source": "/a", "target": "c"}]},
        {"env": {"A=B": "1"}},
        {"env": {"A": "1\n2"}},
        {"pass_env": ["A=1"]},
        {"cache_volume": "/etc,target=/x"},
        {"shm_size": "1 --x"},
        {"gate_timeout_s": 0},
        {"ready_host": "-x"},
        {"ready_port": 0},
        {"staging": [[]]},
    ],
)
def test_an_edited_plan_is_read_as_strictly(plan, change):
    """What a profile cannot say, a plan's JSON cannot either."""
    made = json.loads(plan(ONE).model_dump_json())
    assert LaunchPlan.model_validate(made)
    made["ranks"][0] |= change
    with pytest.raises(ValidationError):
        LaunchPlan.model_validate_json(json.dumps(made))


def test_numbers_once_and_without_a_gap(write):
    for second, words in ((0, "ranks.0's"), (5, "no rank 1")):
        text = SPARKS.replace(
            'address = "10.0.0.2" }\n', f'address = "10.0.0.2" }}\nrank = {second}\n'
        )
        with pytest.raises(LaunchError, match=words):
            planning.plan(profile.load(write(text)))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('executor = "ray"', "", "executor"),
        ('{ kind = "ray", address = "auto", node = "10.0.0.2" }', '{ kind = "local" }', "3 of 4"),
        ("tensor = 4", "tensor = 8", "ranks name 4 GPUs"),
        ("devices = [0]", 'devices = [0]\ncheckpoint = "/x"', "Drop 'checkpoint'"),
        ("devices = [0]", "devices = [0]\nmemlock = -1", "memlock is for containers"),
        ("devices = [0]", 'devices = ["/dev/x"]', "GPU numbers alone"),
    ],
)
def test_ray_and_venv_faults(write, old, new, words):
    with pytest.raises(LaunchError, match=words):
        planning.plan(profile.load(write(RAY.replace(old, new, 1), row=None)))


def test_no_image_for_the_platform(plan, tmp_path):
    with pytest.raises(LaunchError) as refusal:
        plan(SPARKS.replace("devices", 'platform = "linux/arm64"\ndevices', 1))
    said = str(refusal.value)
    assert "linux/arm64" in said and KEY[:16] in said and str(tmp_path / "images.toml") in said
    assert "sm120-launch image build --engine podman" in said


def test_no_images_file(plan):
    with pytest.raises(LaunchError, match="image build"):
        plan(SPARKS, row=None)


def test_no_recipe(write, tmp_path):
    path = write(SPARKS)
    (tmp_path / "recipe.json").unlink()
    with pytest.raises(LaunchError, match="fork recipe --json"):
        planning.plan(profile.load(path))


def test_what_is_warned_of(plan):
    assert plan(SPARKS).warnings == ()
    assert "no modality" in plan(ONE).warnings[0]
    none = plan(SPARKS.replace("devices = [0]", "devices = []"))
    assert "NOT RUN" in none.warnings[0]
    text = RAY.replace('"venv"\nvenv = "/opt/vllm"', '"podman"')
    assert any("raylets" in w for w in plan(text).warnings)


def test_ssh_files_are_beside_the_profile(plan, tmp_path):
    text = SPARKS.replace('address = "10.0.0.1" }\n', 'address = "10.0.0.1", known_hosts = "k" }\n')
    assert plan(text).ranks[0].transport.known_hosts == str(tmp_path / "k")


RUNNER = CliRunner()


def test_plan_as_json_is_whole(write):
    done = RUNNER.invoke(app, ["plan", str(write(SPARKS)), "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    commands = [rank.pop("commands") for rank in found["ranks"]]
    again = LaunchPlan.model_validate_json(json.dumps(found))
    for rank, command in zip(again.ranks, commands, strict=True):
        assert command["gate"] == runtime.gate_command(rank, "plan")
        assert command["engine"] == runtime.engine_command(rank, "plan")


def test_plan_prints_commands_that_can_be_pasted(write):
    path = write(ONE)
    (rank,) = planning.plan(profile.load(path)).ranks
    done = RUNNER.invoke(app, ["plan", str(path)])
    assert done.exit_code == 0
    rest = done.stdout
    for head, command in (
        ("rank 0: vllm serve", list(rank.argv)),
        ("gate", runtime.gate_command(rank, "plan")),
        ("engine", runtime.engine_command(rank, "plan")),
    ):
        _, _, rest = rest.partition(f"\n{head}\n")
        assert shlex.split(rest.split("\ngate\n")[0].split("\nengine\n")[0]) == command


def blocks(text):
    return re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_worked_profiles(tmp_path, row):
    """The profiles of docs/launching.md are whole: each comes to a plan."""
    text = (ROOT / "docs/launching.md").read_text()
    profiles = [b for b in blocks(text) if b.startswith("schema = 1\nname")]
    assert len(profiles) == 3
    (tmp_path / "sm120_recipe.json").write_bytes(recipe.document(RECIPE))
    for platform in ("linux/amd64", "linux/arm64"):
        images.append(tmp_path / "images.toml", row.model_copy(update={"platform": platform}))
    kinds = []
    for text in profiles:
        path = tmp_path / "p.toml"
        path.write_text(text)
        made = planning.plan(profile.load(path))
        kinds.append((len(made.ranks), made.ranks[0].transport.kind, made.warnings))
    assert kinds == [(1, "local", ()), (4, "ssh", ()), (4, "ray", ())]
