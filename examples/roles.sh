#!/bin/sh
# A job of two purposes: half of its GPUs for prefill, half for decode, each half of one NUMA node or of GPUs that are linked.
# Each task sees the GPUs of its role alone. Needs level place and the node agent.
#
# alice@login$ sbatch --wait roles.sh
# Submitted batch job ...
# alice@login$ cat roles.out
# prefill=...:0-1 decode=...:2-3
# decode 0 of 2 GPUs 2,3
# decode 1 of 2 GPUs 2,3
# prefill 0 of 2 GPUs 0,1
# prefill 1 of 2 GPUs 0,1
#SBATCH --nodes=1 --ntasks=4 --gpus=4 --gpu-role=prefill:2,decode:2
#SBATCH --time=5
#SBATCH --output=roles.out
echo "$SLUICE_GPU_ROLES"
srun --ntasks=4 sh -c 'echo "$SLUICE_GPU_ROLE $SLUICE_GPU_ROLE_RANK of $SLUICE_GPU_ROLE_SIZE GPUs $CUDA_VISIBLE_DEVICES"' | sort
