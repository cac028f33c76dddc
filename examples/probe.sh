#!/bin/sh
# Finds the GPUs of this node, of all vendors, and writes the gres.conf that describes them to Slurm.
# The files go into a folder of their own; Slurm's configuration stays as it is. Run it as root, outside of jobs.
#
# root@l40s-1$ sh probe.sh
# INDEX  VENDOR  MODEL        MEMORY  DEVICE        HEALTH
#     0  nvidia  NVIDIA L40S   45.0G  /dev/nvidia0  ok
#     1  nvidia  NVIDIA L40S   45.0G  /dev/nvidia1  ok
#     2  nvidia  NVIDIA L40S   45.0G  /dev/nvidia2  ok
#     3  nvidia  NVIDIA L40S   45.0G  /dev/nvidia3  ok
# ...
# NodeName=l40s-1 Name=gpu Type=l40s File=/dev/nvidia[0-1] Cores=0-23 Flags=nvidia_gpu_env
# NodeName=l40s-1 Name=gpu Type=l40s File=/dev/nvidia[2-3] Cores=24-47 Flags=nvidia_gpu_env
# NodeName=l40s-1 Name=shard Count=181532 File=/dev/nvidia[0-3]
node=${SLURMD_NODENAME:-$(hostname -s)}
folder=${FOLDER:-$(mktemp -d)}
shards=${SHARDS:-} # --no-shards or --migrate-shards, where the site has shards already
set -e

sluice probe --format index,vendor,model,memory,device,health
sluice probe --drop "$folder/inventory"
sluice gres write $shards --nodes "$node" --inventory-dir "$folder/inventory" --output-dir "$folder"
cat "$folder/gres.sluice.conf"
