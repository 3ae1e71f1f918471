#!/usr/bin/env bash
# Passes the tests: sets up what they need, then lint and the whole suite, real wheels of
# every base included.
#
#   ./test.sh               everything that can run on this machine
#   ./test.sh --everyday    without the tests marked bases or slow
#   ./test.sh --lint        no test and no vLLM: ruff alone
#   ./test.sh -k NAME …     other arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")"
python=.venv/bin/python
lint() {
  printf '\n== lint\n' >&2
  "$python" -m ruff check .
  "$python" -m ruff format --check .
}
if [ "${1:-}" = --lint ]; then
  ./build.sh --tools
  lint
  exit
fi
./build.sh --tests

# Tests of the installed wheel use uv too: the private copy, where there is no other.
PATH="$PATH:$PWD/.uv/bin"
lint
printf '\n== tests\n' >&2
if [ "${1:-}" = --everyday ]; then
  shift
  set -- -m "not bases and not slow" "$@"
fi
exec "$python" -m pytest -n "${PYTEST_WORKERS:-2}" --dist loadfile "$@"
