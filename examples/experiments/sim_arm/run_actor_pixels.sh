#!/usr/bin/env bash
exec "$(dirname "$0")/run_actor.sh" task=sim_arm_pixels "$@"
