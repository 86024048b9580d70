# Environment of a rank. Source it: `. launch/env.sh`. torchrun.sh and slurm.sbatch do.

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false
# Megatron overlaps tensor-parallel communication with computation only if kernels start in the order of calls.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# vLLM's sleep mode needs a memory pool of its own, which expandable segments do not allow.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:False}"
# A hung collective ends the process, and with it the job, instead of holding the GPUs.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"

# Prints how many tasks node $2 has, the first is 0, of the list $1 in Slurm's form: "8(x2),4" is 8, 8 and 4.
tasks_of_node() {
    printf %s "$1" | awk -v RS=, -F '[(x)]+' -v node="$2" '
        node >= 0 { node -= NF > 1 ? $2 : 1; if (node < 0) print $1 }'
}

# In a task of srun: Slurm's numbers under the names that torch.distributed reads.
join_slurm() {
    export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
    LOCAL_WORLD_SIZE="$(tasks_of_node "${SLURM_STEP_TASKS_PER_NODE:-$SLURM_TASKS_PER_NODE}" "$SLURM_NODEID")"
    export LOCAL_WORLD_SIZE
    # Of all tasks on this node together: where Slurm binds a task to cores, it sees no more than its own.
    [ -z "${SLURM_CPUS_ON_NODE:-}" ] || export MEGAPPO_NODE_CORES="$SLURM_CPUS_ON_NODE"
    export MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
    export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
}
