#!/usr/bin/env bash
# Makes .venv from lock/dev.txt on a machine that has nothing but this checkout: finds a Python, installs what Debian
# lacks, then lets uv (itself from the lock) install the rest; pip does it where uv cannot reach an index.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
start=$SECONDS

find_python() {
  local candidate
  for candidate in python3.13 python3.12 python3.11 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
      && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$candidate"; return
    fi
  done
  return 1
}

if ! python=$(find_python); then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing python3-venv with apt-get"
    apt-get -qq update && apt-get -qq install -y python3 python3-venv >/dev/null
    python=$(find_python) || { echo "This distribution's Python is none of 3.11 to 3.13. Install one of them, then run make again." >&2; exit 2; }
  else
    echo "Python 3.11 to 3.13 with the venv module is needed. On Debian: sudo apt-get install python3-venv" >&2
    exit 2
  fi
fi

mkdir -p build
[ -x .venv/bin/python ] || "$python" -m venv .venv
say "installing $(grep -c '^[a-z].*==' lock/dev.txt) Python packages into .venv (1 to 3 minutes the first time)"
( trap 'kill $! 2>/dev/null; exit' TERM; while sleep 20 & wait $!; do say "installing Python packages … $((SECONDS - start)) s"; done ) &
teller=$!
trap 'kill "$teller"' EXIT
if ! .venv/bin/python -m uv --version >/dev/null 2>&1; then
  uv_lock=$(mktemp)
  awk '/^[a-z]/{take=/^uv==/} take' lock/dev.txt >"$uv_lock"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r "$uv_lock"
  rm -f "$uv_lock"
fi
if ! UV_LINK_MODE=copy .venv/bin/python -m uv pip sync --quiet --compile-bytecode --python .venv/bin/python lock/dev.txt; then
  say "uv could not, trying pip"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r lock/dev.txt
fi
.venv/bin/python -m uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation -e . 2>/dev/null \
  || .venv/bin/python -m uv pip install --quiet --python .venv/bin/python --no-deps -e . \
  || .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
rm -f .venv/.locked-*
trap - EXIT
kill "$teller"; wait "$teller" || true # so that the last word is the last
say "installed in $((SECONDS - start)) s"
