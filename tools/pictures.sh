#!/usr/bin/env bash
# Makes docs/pictures from three runs of the simulated arm, in runs/pictures, and from the study of Hi-ORS. overview.svg
# is drawn by hand. It needs libegl1 or libosmesa6, and chromium. The same command goes on where it was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
. ./examples/install.sh --extra learner --extra sim --group dev
pictures=docs/pictures runs=runs/pictures python=.venv/bin/python
hiors=(plan=hiors task.env.demonstrated=corner plan.sources.success.start_steps=intervened)

./start.sh run_dir=$runs/first
cp $runs/first/learning_curve.png $pictures

./start.sh "${hiors[@]}" run_dir=$runs/hiors
$python tools/picture.py $runs/hiors --out $pictures/before_after.gif

seen=(task.cameras=true unread_images=true plan.phases.practise.until=[operator])
./start.sh "${hiors[@]}" "${seen[@]}" run_dir=$runs/practice &
trap "kill $!" EXIT # its practice goes on until then
until (($(grep -s '"phase": "practise", "task"' $runs/practice/metrics.jsonl | wc -l) >= 100)); do
    kill -0 $! # the run has not failed
    sleep 1
done
$python tools/screenshots.py $runs/practice --report $runs/hiors --out $pictures

$python tools/study.py hiors --finished --out $runs/study
cp $runs/study/curves.png $pictures/hiors.png
