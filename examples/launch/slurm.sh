#!/bin/bash
# Train on four hosts of eight GPUs each:   sbatch examples/launch/slurm.sh train.py --its --options
# One torchrun per host starts the processes; they meet on the first host of the job. A process that dies is started again with
# all others, up to three times, and the script goes on from its checkpoint: trainer.resume(missing_ok=True).
# Slurm sends SIGTERM two minutes before the time is up; the trainer then writes a checkpoint and ends.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue

set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100  # seconds for that checkpoint, where torch knows it; torchrun else kills after 30

# srun does not take --cpus-per-task over from sbatch: without it a host's processes may share one core.
exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-8}" \
    --max-restarts=3 \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$first:29500" \
    "$@"
