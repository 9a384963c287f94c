#!/usr/bin/env bash
# sbatch multi_node/slurm.sh --config cli/sft.yaml --config cli/gpu.yaml
# Lightning reads ranks, node and address from SLURM; the sizes below and the Trainer's must agree, so it is told them.
# Whole copies of the model in each node, shards within it: --trainer.strategy=liger_hsdp.
#SBATCH --job-name=lightning-liger
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --signal=SIGUSR1@120
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTHONFAULTHANDLER=1
exec srun --kill-on-bad-exit=1 lightning-liger fit "$@" \
    --trainer.num_nodes="$SLURM_NNODES" \
    --trainer.devices="$SLURM_NTASKS_PER_NODE"
