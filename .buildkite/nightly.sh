#!/usr/bin/env bash
# The series on the newest release, and what that changed since the last run.
#
#   nightly/rebase.txt     the table
#   nightly/rebase.json    the same, for programs
#   nightly/changes.md     what differs from the last run's rebase.json
#
# The last run's result is taken from the build that SM120_NIGHTLY_PREVIOUS names (its id), else
# from SM120_NIGHTLY_STATE, a folder of the agent that outlives a build. Exit status: rebase's own.
set -euo pipefail
cd "$(dirname "$0")/.."
./build.sh --tests
python=.venv/bin/python
state=${SM120_NIGHTLY_STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/vllm-sm120}
rm -rf nightly
mkdir -p nightly "$state"

status=0
COLUMNS=140 "$python" -m fork rebase --latest --json nightly/rebase.json \
  >nightly/rebase.txt 2>nightly/rebase.log || status=$?
cat nightly/rebase.txt
cat nightly/rebase.log >&2

previous=$state/rebase.json
if [ -n "${SM120_NIGHTLY_PREVIOUS:-}" ]; then
  buildkite-agent artifact download nightly/rebase.json "$state" \
    --build "$SM120_NIGHTLY_PREVIOUS" --step rebase
  previous=$state/nightly/rebase.json
fi
if [ -s nightly/rebase.json ]; then
  "$python" .buildkite/changes.py "$previous" nightly/rebase.json >nightly/changes.md ||
    echo "The last run's result cannot be read; the next run compares with this one." \
      >nightly/changes.md
  cp nightly/rebase.json "$state/rebase.json"
else
  # It died before it had a result: what it said is what there is.
  echo "No result: exit $status. The last result stays the one to compare with." >nightly/changes.md
  [ "$status" -ne 0 ] || status=1
fi
cat nightly/changes.md

if command -v buildkite-agent >/dev/null; then
  style=success
  [ "$status" -eq 0 ] || style=error
  {
    cat nightly/changes.md
    printf '\n```term\n'
    cat nightly/rebase.txt
    tail -n 20 nightly/rebase.log
    printf '```\n'
  } | buildkite-agent annotate --style "$style" --context rebase
fi
exit "$status"
