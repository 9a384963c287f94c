#!/usr/bin/env bash
# One call on every node, with the node's own number:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 multi_node/torchrun.sh --config cli/sft.yaml --config cli/gpu.yaml
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 multi_node/torchrun.sh --config cli/sft.yaml --config cli/gpu.yaml
# More options follow as they would follow `lightning-liger fit`. GPUS is the number of processes of a node.
set -euo pipefail
cd "$(dirname "$0")/.."
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
exec torchrun \
    --nnodes="${NNODES:-1}" \
    --node-rank="${NODE_RANK:-0}" \
    --nproc-per-node="$GPUS" \
    --master-addr="${MASTER_ADDR:-localhost}" \
    --master-port="${MASTER_PORT:-29500}" \
    --module lightning_liger fit "$@" \
    --trainer.num_nodes="${NNODES:-1}" \
    --trainer.devices="$GPUS"
