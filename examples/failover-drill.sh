#!/bin/sh
# A planned takeover by the backup controller and the way back, with every job counted before and after each.
# Jobs go on running; Slurm's commands wait for some seconds. Run it as root on the primary controller.
#
# root@ctl1$ sh failover-drill.sh
# leader: ctl1, epoch ...
#   ok      ctl1 answers
#   ok      ctl2 answers
# ...
# ctl2: led after ... s; jobs: ...
# ctl1: led after ... s; jobs: ...
# good: every job that waited or ran before did so after, and none was started again
# report: /var/lib/sluice/drills/...
# TIME                 HOST  WHAT            EPOCH  DETAIL
# ...
start=${START-systemctl start slurmctld} # on the primary; empty: you start it when you are asked to
set -e

sluice failover status
sluice failover drill --yes --start-command="$start"
sluice failover history
