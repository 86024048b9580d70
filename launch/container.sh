#!/usr/bin/env bash
# Builds the image of the Dockerfile, or runs a megappo command in it:
#
#   launch/container.sh build [--build-arg NAME=VALUE ...]
#   launch/container.sh train FILE [a.b=c ...]
#
#   CONTAINER   docker (default) or podman
#   IMAGE       name of the image (default megappo)
#
# The working folder is /project inside, so paths below it are the same on both sides. All GPUs of the machine are used.
# Signals and exit codes pass through. Not tried: no machine with a container engine and a GPU was at hand.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
engine="${CONTAINER:-docker}"
image="${IMAGE:-megappo}"

if [ "${1:-}" = build ]; then
    shift
    exec "$engine" build --tag "$image" "$@" "$here/.."
fi

# NCCL's shared-memory transport needs more than a container's default 64 MB.
exec "$engine" run --rm --init --gpus all --ipc host --ulimit memlock=-1 --ulimit stack=67108864 \
    --user "$(id -u):$(id -g)" --env HOME=/tmp --volume "$PWD:/project" "$image" "$@"
