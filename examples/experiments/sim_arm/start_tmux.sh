#!/usr/bin/env bash
# Learner and actor on this machine, in two panes of tmux; in this terminal where there is no tmux or no screen.
# Ends when the run ends, with the learner's exit status, or with that of an actor that failed or was interrupted. A side
# that fails, or that is stopped, ends the other.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
arguments="$(printf '%q ' "$@")"
# What is said when the actor has ended with the exit status $1, and the learner is stopped.
alone() {
    echo
    case $1 in
    130) echo "Interrupted: both sides are stopped. The same command goes on with the run." ;;
    *) echo "The actor has failed: see its last lines above. The learner is stopped. Mend the cause, then start again." ;;
    esac
}

# Whether "$@" fails within 10 s: an actor ends with its run, and waits where its learner was only stopped.
ends() {
    for _ in {1..20}; do "$@" >/dev/null 2>&1 || return 0; sleep 0.5; done
    return 1
}

if ! command -v tmux >/dev/null || [ ! -t 0 ] || [ ! -t 1 ]; then
    "$here/run_actor.sh" "$@" </dev/null &
    actor=$!
    "$here/run_learner.sh" "$@" </dev/null &
    learner=$!
    trap 'kill $actor $learner 2>/dev/null; wait' EXIT
    trap 'exit 130' INT TERM HUP
    wait -n -p first $actor $learner
    status=$?
    if [ "$first" = $actor ] && [ $status -ne 0 ]; then
        alone $status >&2
        exit $status
    fi
    [ "$first" = $actor ] && { wait $learner; exit $?; }
    [ $status -eq 0 ] && ends kill -0 $actor && { wait $actor; status=$?; }
    exit $status
fi

ended="$(mktemp -d)" # each side's pane writes here how it ended

# What the actor's pane does: where the actor fails or is interrupted, it interrupts the learner in pane $1.
act() {
    echo "$here/run_actor.sh $arguments || { echo \$? >$ended/actor
     tmux capture-pane -p -S -20 -t \$TMUX_PANE >$ended/actor_screen; tmux send-keys -t $1 C-c; }; sleep 5"
}

# End with the learner's status $1; if the actor has failed or was interrupted, with its status, after what its pane has
# shown, and what it means.
finish() {
    [ -e "$ended/actor" ] || exit "$1"
    grep -v '^$' "$ended/actor_screen" | tail -12
    alone "$(cat "$ended/actor")"
    exit "$(cat "$ended/actor")"
}

if [ -n "${TMUX:-}" ]; then # the learner stays in this pane, and the actor gets one below it
    actor="$(tmux split-window -v -t "$TMUX_PANE" -c "$PWD" -P -F '#{pane_id}' "$(act "$TMUX_PANE")")"
    trap ':' INT # the learner's to handle
    trap 'rm -rf "$ended"' EXIT
    "$here/run_learner.sh" "$@"
    status=$?
    { [ $status -eq 0 ] && ends tmux display-message -p -t "$actor"; } || tmux kill-pane -t "$actor" 2>/dev/null
    finish $status
fi

session="retake-$$"
trap 'tmux kill-session -t "$session" 2>/dev/null; rm -rf "$ended"' EXIT
learner="$(tmux new-session -d -s "$session" -x "$(tput cols)" -y "$(tput lines)" -P -F '#{pane_id}' \
    "$here/run_learner.sh $arguments; echo \$? >$ended/status
     tmux capture-pane -p -S -20 -t \$TMUX_PANE >$ended/screen; tmux wait-for -S $session")"
tmux set-option -t "$session" status-left ""
tmux set-option -t "$session" status-right-length 120
tmux set-option -t "$session" status-right \
    "Ctrl-C ends the run; closing this window leaves it going: tmux attach -t $session"
tmux split-window -v -t "$session" "$(act "$learner")"
{ tmux wait-for "$session"; tmux kill-session -t "$session"; } &
tmux attach -t "$session"
if [ ! -e "$ended/status" ]; then
    trap - EXIT # the run goes on in the background, and writes there how it ends
    echo "The run goes on in the background; come back with: tmux attach -t $session"
    exit 0
fi
wait
grep -v '^$' "$ended/screen" | tail -12
finish "$(cat "$ended/status")"
