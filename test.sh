#!/usr/bin/env bash
# Tests, without robot, GPU, screen or account; times are those of two idle cores.
#   ./test.sh            5 minutes: the short tests, real programs for each promise, the first commands of the pages
#   ./test.sh all        35 minutes: what CI runs, with what takes longer
#   ./test.sh nightly    hours: what proves long, part by part; goes on where it was stopped (tools/nightly.py --help)
#   ./test.sh -k WORD    or other words for pytest
set -euo pipefail
cd "$(dirname "$0")"
. ./examples/install.sh --extra learner --extra sim --extra data --extra h5py --extra robots --extra hil --extra carracing --extra minigrid --extra atari --extra vla --extra tensorboard --extra page --extra docs --group dev --group bench
python=.venv/bin/python
case "${1:-}" in
    "") what="short tests, and the first commands of the pages: 5 minutes"; marks="not slow and not nightly and not manual" ;;
    all) what="all tests but those of a night, the types, the first commands of the pages: 35 minutes"
         marks="not nightly and not manual" ;;
    nightly) exec $python tools/nightly.py "${@:2}" ;;
    *) exec $python -m pytest -n 2 --dist worksteal "$@" ;; # -n 0 runs them one after the other
esac
echo "$what, on two idle cores"
failed=() said=$(mktemp -d) && trap 'rm -rf "$said"; kill $(jobs -p) 2>/dev/null || :' EXIT
declare -A begun
try() {
    local began=$SECONDS
    "$@" || failed+=("$*")
    echo "-- $((SECONDS - began)) s: $*"
}
beside() { # NAME command: what runs beside the tests, until `ended NAME`
    "${@:2}" >"$said/$1" 2>&1 &
    begun[$1]=$!
}
ended() { local status=0; wait "${begun[$1]}" || status=$?; cat "$said/$1"; return $status; }
beside commands $python tools/readme.py --page README.md --page docs/tutorials/two_machines.md ${CI:+--clean}
[ "${1:-}" != all ] || beside types .venv/bin/basedpyright # pyright with nothing to fetch
try .venv/bin/ruff check --quiet .
try .venv/bin/ruff format --check --quiet .
try $python -m pytest -q -n 4 --dist worksteal -p tests.dearest -m "$marks"
for name in "${!begun[@]}"; do try ended "$name"; done
echo "$SECONDS s; failed: ${failed[*]:-nothing}"
[ ${#failed[@]} = 0 ]
