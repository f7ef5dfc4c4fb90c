#!/bin/bash
# One node of eight GPUs, prompts and answers. Start it with: MODEL=DIR sbatch deploy/slurm/single_node.sh
# With sbatch --ntasks-per-node=8 each GPU has a process of its own.
#SBATCH --job-name=dsv3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@240

: "${MODEL:?the directory of the checkpoint}"
exec srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m launch.serve \
  --model "$MODEL" --host 0.0.0.0 --port "${PORT:-8000}" --api_key_file "${API_KEYS:-$HOME/api.keys}" \
  --cluster_key_file "${CLUSTER_KEY:-$HOME/cluster.key}" --cluster_start_timeout 900 \
  --data_parallel_size 8 --enable_expert_parallel --max_num_seqs 48 --max_num_batched_tokens 4096 \
  --shutdown_grace 10 --shutdown_timeout 180
