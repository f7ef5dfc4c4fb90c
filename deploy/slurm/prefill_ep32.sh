#!/bin/bash
# DeepSeek's prefill unit, 32 GPUs with nine routed experts each: `PREFILL_EP32` of configs/deployments.py.
# Start it with: MODEL=DIR sbatch deploy/slurm/prefill_ep32.sh
# Each GPU has a process of its own; with sbatch --ntasks-per-node=1 each host has one.
#SBATCH --job-name=dsv3-prefill
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@240

: "${MODEL:?the directory of the checkpoint, at the same place on every node}"
exec srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m launch.serve \
  --model "$MODEL" --host 0.0.0.0 --port "${PORT:-8000}" --api_key_file "${API_KEYS:-$HOME/api.keys}" \
  --cluster_key_file "${CLUSTER_KEY:-$HOME/cluster.key}" --cluster_start_timeout 900 \
  --enable_expert_parallel --num_redundant_experts 32 --enable_eplb --max_num_batched_tokens 16384 --max_num_seqs 64 \
  --shutdown_grace 10 --shutdown_timeout 180
