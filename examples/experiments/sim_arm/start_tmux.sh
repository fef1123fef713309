#!/usr/bin/env bash
# Learner and actor on this machine, in two panes of tmux; in this terminal where there is no tmux or no screen.
# Ends when the run ends, with the learner's exit status.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"

if ! command -v tmux >/dev/null || [ ! -t 0 ] || [ ! -t 1 ] || [ -n "${TMUX:-}" ]; then
    "$here/run_actor.sh" "$@" </dev/null &
    actor=$!
    trap 'kill $actor 2>/dev/null' EXIT
    "$here/run_learner.sh" "$@"
    status=$?
    [ $status -ne 0 ] && kill $actor 2>/dev/null
    wait $actor || [ $status -ne 0 ] || status=$?
    exit $status
fi

session="retake-$$"
ended="$(mktemp -d)"
trap 'tmux kill-session -t "$session" 2>/dev/null; rm -rf "$ended"' EXIT
arguments="$(printf '%q ' "$@")"
tmux new-session -d -s "$session" -x "$(tput cols)" -y "$(tput lines)" \
    "$here/run_learner.sh $arguments; echo \$? >$ended/status
     tmux capture-pane -p -S -20 -t \$TMUX_PANE >$ended/screen; tmux wait-for -S $session"
tmux split-window -v -t "$session" "$here/run_actor.sh $arguments; sleep 5"
{ tmux wait-for "$session"; tmux kill-session -t "$session"; } &
tmux attach -t "$session"
[ -e "$ended/status" ] || echo "The run goes on in the background; come back with: tmux attach -t $session"
wait
grep -v '^$' "$ended/screen" | tail -12
exit "$(cat "$ended/status")"
