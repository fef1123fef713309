#!/usr/bin/env bash
# Learner and actor on this machine, in two panes of tmux; in this terminal where there is no tmux or no screen.
# Ends when the run ends, with the learner's exit status.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"

if ! command -v tmux >/dev/null || [ ! -t 1 ] || [ -n "${TMUX:-}" ]; then
    "$here/run_actor.sh" "$@" &
    actor=$!
    trap 'kill $actor 2>/dev/null' EXIT
    "$here/run_learner.sh" "$@"
    status=$?
    [ $status -ne 0 ] && kill $actor 2>/dev/null
    wait $actor || status=$?
    exit $status
fi

session="retake-$$"
status_file="$(mktemp)"
trap 'tmux kill-session -t "$session" 2>/dev/null; rm -f "$status_file"' EXIT
arguments="$(printf '%q ' "$@")"
tmux new-session -d -s "$session" "$here/run_learner.sh $arguments; echo \$? >$status_file; tmux wait-for -S $session"
tmux split-window -v -t "$session" "$here/run_actor.sh $arguments; sleep 1"
tmux attach -t "$session" &
tmux wait-for "$session"
tmux kill-session -t "$session" 2>/dev/null
wait
cat runs/*/summary.txt 2>/dev/null | tail -20
exit "$(cat "$status_file")"
