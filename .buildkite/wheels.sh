#!/usr/bin/env bash
# Both platforms' wheels and the recipe, into dist/, each verified.
set -euo pipefail
cd "$(dirname "$0")/.."
./build.sh --tools
python=.venv/bin/python
rm -rf dist
"$python" -m fork wheel --platform all --out dist
for wheel in dist/*.whl; do
  "$python" -m fork verify "$wheel"
done
"$python" -m fork recipe --json >dist/recipe.json
