#!/bin/sh
# Three jobs of two GPUs each start together: the first two wait, even where GPUs are free, until there is room for all three.
# Needs level place.
#
# alice@login$ sh gang.sh
# Gang ring-...: 2 of 3 members submitted...
# RUNNING started ...
# RUNNING started ...
# RUNNING started ...
gang=ring-$$
members=3
submit() { sbatch --parsable --gang="$gang:$members" --job-name="$gang" --nodes=1 --gres=gpu:2 --time=5 --output=/dev/null --wrap="sleep 60"; }
running() { squeue --noheader --name="$gang" --states=RUNNING --format="%T started %S"; }
set -e

submit >/dev/null
submit >/dev/null
until squeue --noheader --name="$gang" --format=%r | grep --max-count=1 "2 of 3"; do sleep 1; done
submit >/dev/null
until [ "$(running | wc -l)" = $members ]; do sleep 1; done
running
scancel --name="$gang"
