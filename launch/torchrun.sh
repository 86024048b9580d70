#!/usr/bin/env bash
# Starts a run with torchrun: launch/torchrun.sh FILE [a.b=c ...]
#
#   PYTHON                               the interpreter (default .venv/bin/python; .venv-gpu/bin/python after make setup-gpu)
#   NPROC                                ranks on this node (default: one for each GPU)
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT   for several nodes: the same command on each, NODE_RANK 0 to NNODES - 1
#   STOP_GRACE_SECONDS                   time to finish the step and save after SIGTERM (default 600; torchrun's own is 30)
#
# torchrun's exit code is 1 whatever its ranks' were: on one machine `megappo train` alone passes them on.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$here/env.sh"

# On one machine torchrun finds a free port itself, so that two runs can go side by side.
meeting=(--standalone)
if [[ "${NNODES:-1}" != 1 || -n "${MASTER_PORT:-}" ]]; then
    meeting=(--nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}")
    meeting+=(--master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}")
fi

exec "${PYTHON:-$here/../.venv/bin/python}" "$here/torchrun.py" "${STOP_GRACE_SECONDS:-600}" \
    --nproc-per-node "${NPROC:-gpu}" \
    "${meeting[@]}" \
    -m megappo train "$@"
