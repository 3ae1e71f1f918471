#!/usr/bin/env bash
# The main job: makes .venv, builds the patched wheel from the pinned upstream wheel,
# installs it with its dependencies (9 GB), and prints the page geometry, stock and patched.
#
#   ./build.sh              all of it
#   ./build.sh --tests      also what the tests need; no geometry (used by ./test.sh)
#   ./build.sh --tools      the tools and what the tests need; no vLLM
set -euo pipefail
cd "$(dirname "$0")"

say() { printf '\n== %s\n' "$*" >&2; }

apt_install() {
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: $* is missing; install it (Debian: apt-get install $*), then run again" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

command -v git >/dev/null || apt_install git
if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
  uv=uv
else
  # A private copy of uv: a virtual environment costs a second, and touches nothing else.
  [ -x .uv/bin/pip ] || python3 -m venv .uv 2>/dev/null || {
    rm -rf .uv
    apt_install python3-venv
    python3 -m venv .uv
  }
  .uv/bin/pip install --quiet --disable-pip-version-check uv
  uv=$PWD/.uv/bin/uv
fi

group=fork
case ${1:-} in --tests | --tools) group=test ;; esac

[ -x .venv/bin/python ] || "$uv" venv --quiet --python "$(command -v python3)" .venv
python=.venv/bin/python
say "tools"
"$uv" pip install --quiet --python "$python" --group "$group"
[ "${1:-}" != --tools ] || exit 0

# Tests compile the CUDA kernel for the CPU; without a compiler they are skipped.
if [ "${1:-}" = --tests ] && ! command -v g++ >/dev/null && ! command -v c++ >/dev/null; then
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    say "C++ compiler"
    apt_install g++ || echo "no g++: tests that need it are skipped" >&2
  fi
fi

say "wheel"
wheel=$("$python" -m fork wheel --out dist | tail -n 1)
echo "$wheel"
"$python" -m fork verify "$wheel"

say "install"
# The same version may be another build: the wheel's bytes decide.
digest=$(sha256sum "$wheel" | cut -c1-64)
if [ "$(cat .venv/fork-wheel 2>/dev/null)" != "$digest" ]; then
  "$uv" pip install --quiet --python "$python" --constraint constraints.txt \
    --reinstall-package vllm "$wheel"
  echo "$digest" >.venv/fork-wheel
fi
"$python" -m fork verify .venv

if [ "${1:-}" != --tests ]; then
  say "geometry"
  "$python" -m fork geometry
fi
