#!/bin/sh
# Usage of the last seven days by account and by user, and in waste.csv what was requested and not used.
# As root or SlurmUser on a controller: of everybody, as measured on the nodes; as a user: what Slurm's PrivateData shows.
#
# alice@login$ srun --quiet --gpu-mem=10G sleep 2
# root@ctl1$ sh report.sh
# Account Jobs GPUHours GPUMemHours(GiB)  WaitP95 Utilisation
# ------- ---- -------- ---------------- -------- -----------
# physics ...
# ... to ...
# User  Account Jobs GPUHours GPUMemHours(GiB)
# ----- ------- ---- -------- ----------------
# ...alice physics ...
# ... to ...
# root@ctl1$ cut -d, -f1-3 waste.csv
# User,Account,Jobs
# ...alice,physics,...
since=${SINCE:-now-7days}
set -e

sluice report tenants --starttime="$since" --format=Account,Jobs,GPUHours,GPUMemHours,WaitP95,Utilisation
sluice report users --starttime="$since" --format=User,Account,Jobs,GPUHours,GPUMemHours
sluice report waste --starttime="$since" --csv >waste.csv
