# SPDX-License-Identifier: Apache-2.0
"""A rank's commands on its host, as argument lists. Pure: nothing is run or read.

Names derive from profile, launch, rank and purpose, and containers carry labels (venv:
processes carry variables), so that a later run finds and removes what an earlier left.

The gate's standard output is framed, so that nothing the self-test prints can pass for
its report or its end, and a cut connection cannot pass for an end::

    <the self-test's own output; its last line is the verdict>
    SM120-REPORT <launch id>
    <the report, one JSON object; nothing where none was written>
    SM120-END <launch id> <the self-test's exit status>

The launch id must be fresh for every launch and match ``LAUNCH_ID``.
"""

import json
import re
from collections.abc import Sequence
from typing import Literal

from sm120_launch.plan import Image, RankPlan

Purpose = Literal["gate", "engine"]

SELFTEST = "vllm.models.deepseek_v41.nvidia.sm120_decode_shape_selftest"
SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")
"""``vllm serve``, by the same Python as the gate: a console script names its own."""
REPORT_MARK = "SM120-REPORT"
END_MARK = "SM120-END"
REPORT_LIMIT = 8 << 20
"""Bytes of a report that are passed on; a longer one is cut, and so is no JSON."""
LAUNCH_ID = r"[a-z0-9]+(-[a-z0-9]+)*"

LABEL = "sm120.rank"
CACHE = "/cache"
"""Where the cache volume is mounted, and HOME of gate and engine: vLLM, FlashInfer,
DeepGEMM, Triton and Inductor all keep what they compile under HOME."""

HOST_ENVIRONMENT = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "XDG_CACHE_HOME"),
    *("LD_LIBRARY_PATH", "CUDA_HOME"),
)
"""What a process of runtime venv keeps of the host's environment."""

# $1 launch id, $2 limit in seconds, $3 Python, then the argv. The limit ends the
# self-test from inside, also where the connection to the host is lost. It runs in a
# folder of its own: Python would import a `vllm` from where it stands. In the background:
# a shell that waits for a child in the foreground hears no signal until that ends.
_GATE = f"""\
id=$1 limit=$2 python=$3; shift 3
folder=$(mktemp -d) && mkdir "$folder/cwd" && cd "$folder/cwd" || exit 125
trap 'cd / && rm -rf "$folder"' EXIT
trap 'exit 143' TERM HUP INT
timeout -s KILL "$limit" "$python" -m {SELFTEST} --json ../report -- "$@" </dev/null &
wait $!
status=$?
printf '\\n{REPORT_MARK} %s\\n' "$id"
[ ! -f ../report ] || head -c {REPORT_LIMIT} ../report
printf '\\n{END_MARK} %s %s\\n' "$id" "$status"
exit "$status"
"""

# $1 engine, $2 container
_STATUS = """\
command -v "$1" >/dev/null || exit 127
found=$("$1" container inspect --format '{{.State.Status}} {{.State.ExitCode}}' "$2" 2>/dev/null)
case $found in
  "") echo absent ;;
  running*|paused*|stopping*) echo running ;;
  *) echo "exited ${found#* }" ;;  # created, too: it never started
esac
"""
_STOP = """\
command -v "$1" >/dev/null || exit 127
"$1" rm --force "$2" >/dev/null 2>&1
! "$1" container inspect "$2" >/dev/null 2>&1
"""
# $1 engine, $2 volume
_VOLUME = """\
"$1" volume create "$2" >/dev/null 2>&1 || "$1" volume inspect "$2" >/dev/null
"""
# $1 engine, $2 label
_CLEANUP = """\
found=$("$1" ps --all --quiet --filter "label=$2") || exit
[ -z "$found" ] || "$1" rm --force $found >/dev/null
"""

# $1 engine, $2 label. Names alone: a name's end is its purpose.
_ENGINES = """\
found=$("$1" ps --filter "label=$2" --format '{{.Names}}') || exit
printf '%s\\n' "$found" | grep '\\.engine$' || :
"""

# Asked from inside the container: the host needs no client, the network may be its own.
# Arguments: host, port.
_READY = """\
import sys, urllib.request
host, port = sys.argv[1:]
url = f"http://[{host}]:{port}/health" if ":" in host else f"http://{host}:{port}/health"
proxies = urllib.request.ProxyHandler({})
urllib.request.build_opener(proxies).open(url, timeout=10)
"""
_PORT = """\
import socket, sys
host, port = sys.argv[1:]
try:
    socket.create_connection((host, int(port)), timeout=5).close()
except OSError:
    sys.exit(0)
sys.exit(f"{host} port {port} is in use on this host")
"""
# systemd-logind ends a user's containers with the last login, unless the user lingers.
_LINGER = """\
[ "$(id -u)" != 0 ] || exit 0
case $(loginctl show-user "$(id -un)" -p Linger 2>/dev/null) in
  Linger=yes) ;;
  Linger=no)
    echo "$(id -un) does not linger, so its containers end with the SSH login:" \
      "loginctl enable-linger $(id -un), on that host"
    exit 1 ;;
  *) echo "loginctl does not say whether containers of $(id -un) outlive the SSH login" ;;
esac
"""

# Runtime venv. Processes are found by a variable in their environment, which children
# inherit, so a process that left its group or session is found too.
_FOLDER = "${XDG_STATE_HOME:-$HOME/.local/state}/sm120-launch"
_EXEC = """\
import json, os, sys
keep, more, bin = json.loads(sys.argv[1])
env = {k: v for k, v in os.environ.items() if k in keep}
env["PATH"] = bin + ":" + env.get("PATH", "/usr/local/bin:/usr/bin:/bin")
os.execvpe(sys.argv[2], sys.argv[2:], {**env, **more})
"""
# vLLM titles its processes by setproctitle, which takes the environment's room for the
# title, and so hides the variables, unless this is set.
_VISIBLE = {"SPT_NOENV": "1"}
# $1 name, $2 rank, then the command, in a folder that has no `vllm`. Returns once the
# process can be found by its variable.
_VENV_START = f"""\
folder="{_FOLDER}"; name=$1 rank=$2; shift 2
mkdir -p "$folder" && cd "$folder" || exit 125
SM120_LAUNCH=$name SM120_LAUNCH_RANK=$rank \\
  setsid sh -c 'file=$1; shift; "$@" >"$file.log" 2>&1 </dev/null; echo $? >"$file.exit"' \\
  sh "$folder/$name" "$@" >/dev/null 2>&1 </dev/null &
until grep -qszxF "SM120_LAUNCH=$name" "/proc/$!/environ" || ! kill -0 $! 2>/dev/null; do
  sleep 0.05
done
echo $!
"""
# $1 variable, $2 name
_VENV_STATUS = f"""\
folder="{_FOLDER}"
if grep -qszxF -e "$1" /proc/[0-9]*/environ; then echo running
elif [ -f "$folder/$2.exit" ]; then echo "exited $(cat "$folder/$2.exit")"
else echo absent
fi
"""
# $1 variable
_VENV_ENGINES = """\
for file in $(grep -lszxF -e "$1" /proc/[0-9]*/environ); do
  tr '\\0' '\\n' 2>/dev/null <"$file" | sed -n 's/^SM120_LAUNCH=\\(.*\\.engine\\)$/\\1/p'
done 2>/dev/null | sort -u
"""
# $1 variable, $2 name or pattern of files
_VENV_STOP = f"""\
folder="{_FOLDER}"
signal=TERM
for turn in 1 2 3 4 5 6 7 8 9 10 11 12; do
  found=$(grep -lzxF -e "$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3)
  [ -n "$found" ] || {{ rm -f "$folder"/$2.log "$folder"/$2.exit; exit 0; }}
  kill -s $signal $found 2>/dev/null
  [ $turn -lt 6 ] || signal=KILL
  sleep 0.5
done
exit 1
"""


def name(rank: RankPlan, launch_id: str, purpose: Purpose) -> str:
    """The container's name: ``sm120.<profile>.<launch id>.r<rank>.<purpose>``.

    Raises:
        ValueError: the launch id is not like ``LAUNCH_ID``.
    """
    if not re.fullmatch(LAUNCH_ID, launch_id):
        raise ValueError(f"launch id {launch_id!r}")
    return f"sm120.{rank.profile}.{launch_id}.r{rank.rank}.{purpose}"


def _label(rank: RankPlan) -> str:
    return f"{LABEL}={rank.profile}/{rank.rank}"


def _variables(rank: RankPlan, name: str) -> dict[str, str]:
    return {"SM120_LAUNCH": name, "SM120_LAUNCH_RANK": f"{rank.profile}/{rank.rank}"}


def gate_command(rank: RankPlan, launch_id: str) -> list[str]:
    """Runs the self-test over the rank's argv, in the foreground, for at most
    ``gate_timeout_s``; exits with the self-test's status (137: it ran past the limit).
    Output: see above."""
    container = name(rank, launch_id, "gate")
    arguments = [launch_id, str(rank.gate_timeout_s)]
    if rank.runtime == "venv":
        script = ["/bin/sh", "-c", _GATE, "sh", *arguments, f"{rank.venv}/bin/python"]
        return _in_venv(rank, container, [*script, *rank.argv])
    # PID 1 is a shell, which ignores TERM. No log: a flood must not fill the host's disk.
    options = ["--rm", "--stop-timeout", "2", "--log-driver", "none"]
    if rank.runtime == "podman":  # docker has no such option
        options += ["--timeout", str(rank.gate_timeout_s + 10)]
    script = ["-c", _GATE, "sh", *arguments, "python3"]
    run = _run(rank, container, rank.gate_network, options, "/bin/sh")
    return [*run, *script, *rank.argv]


def engine_command(rank: RankPlan, launch_id: str) -> list[str]:
    """Starts ``vllm serve`` in the background and returns at once; prints an id."""
    container = name(rank, launch_id, "engine")
    if rank.runtime == "venv":
        serve = _in_venv(rank, container, [f"{rank.venv}/bin/python", *SERVE, *rank.argv])
        variables = _variables(rank, container)
        return _shell(_VENV_START, *variables.values(), *serve)
    run = _run(rank, container, rank.network, ["--detach"], "python3")
    return [*run, *SERVE, *rank.argv]


def status_command(rank: RankPlan, launch_id: str, purpose: Purpose) -> list[str]:
    """Prints ``running``, ``exited <status>`` or ``absent`` as its only line."""
    container = name(rank, launch_id, purpose)
    if rank.runtime == "venv":
        return _shell(_VENV_STATUS, f"SM120_LAUNCH={container}", container)
    return _shell(_STATUS, rank.runtime, container)


def ready_command(rank: RankPlan, launch_id: str) -> list[str] | None:
    """Exit 0 once the engine's /health answers; None for a rank without one."""
    if rank.ready_port is None:
        return None
    command = ["-c", _READY, rank.ready_host, str(rank.ready_port)]
    if rank.runtime == "venv":
        return [f"{rank.venv}/bin/python", "-I", *command]
    return [rank.runtime, "exec", name(rank, launch_id, "engine"), "python3", *command]


def port_command(rank: RankPlan, launch_id: str) -> list[str] | None:
    """Before a start: exit 0 where nobody listens where the engine is to answer, 1 and why
    on standard error where somebody does: its /health would pass for the engine's. None
    where nobody can: no API server, or a network of the container's own."""
    if rank.ready_port is None or (rank.runtime != "venv" and rank.network == "none"):
        return None
    command = ["-c", _PORT, rank.ready_host, str(rank.ready_port)]
    if rank.runtime == "venv":
        return [f"{rank.venv}/bin/python", "-I", *command]
    # The gate's container is gone by then; its name is one that cleaning up knows.
    run = [rank.runtime, "run", "--rm", "--name", name(rank, launch_id, "gate")]
    run += ["--label", _label(rank), "--pull", "never", "--network", rank.network]
    run += ["--no-healthcheck", "--read-only"]
    run += ["--entrypoint", "python3", _image(rank).reference]
    return [*run, *command]


def linger_command(rank: RankPlan) -> list[str] | None:
    """Before a gate: exit 1, and why and the remedy on standard output, where the engine
    would end with the SSH login; exit 0 with output: a warning. None where it cannot."""
    if rank.runtime != "podman" or rank.transport.kind != "ssh":
        return None
    return _shell(_LINGER)


def engines_command(rank: RankPlan) -> list[str]:
    """Names of this rank's engines that run, of whatever launch, a line each; nothing where
    none does. Exit 0 where that is known."""
    if rank.runtime == "venv":
        return _shell(_VENV_ENGINES, f"SM120_LAUNCH_RANK={rank.profile}/{rank.rank}")
    return _shell(_ENGINES, rank.runtime, _label(rank))


def logs_command(rank: RankPlan, launch_id: str, purpose: Purpose, lines: int = 200) -> list[str]:
    """Prints the last lines of a background process, both streams."""
    container = name(rank, launch_id, purpose)
    if rank.runtime == "venv":
        return _shell(f'exec tail -n "$2" "{_FOLDER}/$1.log"', container, str(lines))
    return [rank.runtime, "logs", "--tail", str(lines), container]


def stop_command(rank: RankPlan, launch_id: str, purpose: Purpose) -> list[str]:
    """Ends and removes it, whatever state it is in; exit 0 once it is not there."""
    container = name(rank, launch_id, purpose)
    if rank.runtime == "venv":
        return _shell(_VENV_STOP, f"SM120_LAUNCH={container}", container)
    return _shell(_STOP, rank.runtime, container)


def cleanup_command(rank: RankPlan) -> list[str]:
    """Ends and removes everything that any launch of this profile left for this rank."""
    if rank.runtime == "venv":
        variable = f"SM120_LAUNCH_RANK={rank.profile}/{rank.rank}"
        return _shell(_VENV_STOP, variable, f"sm120.{rank.profile}.*.r{rank.rank}.*")
    return _shell(_CLEANUP, rank.runtime, _label(rank))


def inspect_image_command(rank: RankPlan) -> list[str]:
    """Exit 0 where the host's engine has the planned image by digest, and then prints
    ``<digests> <os>/<architecture>``. For venv: exit 0 where its Python runs."""
    if rank.runtime == "venv":
        return [f"{rank.venv}/bin/python", "-c", "import platform; print(platform.machine())"]
    engine, reference = rank.runtime, _image(rank).reference
    digest = "{{.Digest}}" if engine == "podman" else "{{json .RepoDigests}}"
    platform = "{{.Os}}/{{.Architecture}}"
    return [engine, "image", "inspect", "--format", f"{digest} {platform}", reference]


def cache_command(rank: RankPlan) -> list[str] | None:
    """Makes the cache volume where it is not there; None without one. Two ranks of a host
    that start at once would both make it, and podman fails the second."""
    if rank.cache_volume is None or rank.runtime == "venv":
        return None
    return _shell(_VOLUME, rank.runtime, rank.cache_volume)


def _run(
    rank: RankPlan, container: str, network: str, options: Sequence[str], entry: str
) -> list[str]:
    """``podman run … IMAGE``: the same box for gate and engine, but for the network."""
    run = [rank.runtime, "run", "--name", container, *options, "--label", _label(rank)]
    # The image's asks at vLLM's default port; the launch asks at the planned one, itself.
    run += ["--no-healthcheck"]
    run += ["--pull", "never", "--network", network, "--workdir", "/tmp"]
    run += ["--read-only", "--tmpfs", "/tmp:rw,exec,mode=1777"]
    if rank.runtime == "podman":
        run += ["--http-proxy=false"]  # podman passes the host's proxies on unasked
    run += _devices(rank)
    run += ["--ipc", "host"] if rank.ipc == "host" else []
    run += ["--shm-size", rank.shm_size] if rank.shm_size else []
    if rank.memlock is not None:
        run += ["--ulimit", f"memlock={rank.memlock}:{rank.memlock}"]
    if rank.cache_volume:
        run += ["--mount", f"type=volume,source={rank.cache_volume},target={CACHE}"]
    run += ["--mount", f"type=bind,source={rank.checkpoint},target={rank.model},readonly"]
    for mount in rank.mounts:
        bind = f"type=bind,source={mount.source},target={mount.target}"
        run += ["--mount", bind + (",readonly" if mount.read_only else "")]
    for key, value in sorted(rank.env.items()):
        run += ["--env", f"{key}={value}"]
    for key in rank.pass_env:  # by name alone: the value is in no command line
        run += ["--env", key]
    return [*run, "--entrypoint", entry, _image(rank).reference]


def _image(rank: RankPlan) -> Image:
    assert rank.image is not None, "RankPlan gives podman and docker an image"
    return rank.image


def _devices(rank: RankPlan) -> list[str]:
    numbers = [d for d in rank.devices if d.isdecimal()]
    others = [d for d in rank.devices if not d.isdecimal()]
    options = []
    if rank.runtime == "docker" and numbers:
        # The quotes are part of the value: it is read as one line of CSV.
        options += ["--gpus", f'"device={",".join(numbers)}"']
    else:
        # By CDI name: podman's --gpus does nothing, in silence, on a host without a GPU.
        others = [*(f"nvidia.com/gpu={d}" for d in numbers), *others]
    for device in others:
        options += ["--device", device]
    return options


def _in_venv(rank: RankPlan, container: str, command: Sequence[str]) -> list[str]:
    """The command with the planned environment and little of the host's."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(rank.devices)}
    more = {**visible, **rank.env, **_variables(rank, container), **_VISIBLE}
    settings = json.dumps([[*HOST_ENVIRONMENT, *rank.pass_env], more, f"{rank.venv}/bin"])
    return [f"{rank.venv}/bin/python", "-I", "-c", _EXEC, settings, *command]


def _shell(script: str, *arguments: str) -> list[str]:
    return ["/bin/sh", "-c", script, "sh", *arguments]
