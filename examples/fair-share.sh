#!/bin/sh
# Of two accounts, the jobs of the one that has had less of its share of the GPU time go first.
# Run it as a user of both; policy.yaml makes two, with shares of 1 and 3. It shows the order in which their waiting jobs start.
# Needs level place.
#
# carol@login$ sh fair-share.sh
# physics uses two GPUs for 5 seconds
# ACCOUNT PRIORITY
# biology ...
# biology ...
# physics ...
# physics ...
uses=${USES:-physics}
waits=${WAITS:-biology}
set -e

echo "$uses uses two GPUs for 5 seconds"
srun --quiet --account="$uses" --gres=gpu:2 sleep 5
for account in "$uses" "$waits" "$uses" "$waits"; do
    # --begin: they wait although GPUs are free, and have a priority all the same
    sbatch --account="$account" --job-name=fair-share --begin=now+1hour --gres=gpu:1 --time=5 --output=/dev/null --wrap=true >/dev/null
done
sleep 5
squeue --me --name=fair-share --sort=-p --format="%a %Q"
scancel --me --name=fair-share
