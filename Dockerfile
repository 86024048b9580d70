# megappo on CUDA 13 and Python 3.12. launch/container.sh builds and runs it.
#
# Not tried: this file was never built, nor was the Apex step run. The versions are those of requirements/constraints-gpu.txt,
# of which torch, vLLM, megatron-core and Transformer Engine ran together on an H200; Transformer Engine's torch extension
# was compiled there with the same settings.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# An index of CUDA 13 wheels of torch, where the one that pip looks at has another CUDA.
ARG TORCH_INDEX=""
# A tag or commit of NVIDIA's Apex to build (fused Adam); empty leaves it out. PyPI's `apex` is another project.
ARG APEX_REF=""
ARG MAX_JOBS=16

RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git ninja-build python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

COPY requirements/constraints-gpu.txt /opt/
ENV PIP_CONSTRAINT=/opt/constraints-gpu.txt
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch \
    && python -c "import torch; v = torch.version.cuda; assert v and v.startswith('13'), f'torch for CUDA {v}: set TORCH_INDEX'"

# Later releases of Transformer Engine need a newer cuBLAS than torch 2.11 brings. Its torch extension is source only, and
# finds cuDNN's and NCCL's headers beside torch's own libraries.
RUN pip install setuptools wheel packaging pybind11 \
    && CPLUS_INCLUDE_PATH="$(ls -d /opt/venv/lib/python3.12/site-packages/nvidia/*/include | tr '\n' ':')" \
       CUDA_HOME=/usr/local/cuda NVTE_FRAMEWORK=pytorch MAX_JOBS="$MAX_JOBS" \
       pip install --no-build-isolation "transformer-engine[core-cu13,pytorch]"

RUN if [ -n "$APEX_REF" ]; then \
        git clone https://github.com/NVIDIA/apex /tmp/apex && git -C /tmp/apex checkout "$APEX_REF" \
        && MAX_JOBS="$MAX_JOBS" pip install --no-build-isolation --config-settings "--build-option=--cpp_ext" \
           --config-settings "--build-option=--cuda_ext" /tmp/apex \
        && rm -rf /tmp/apex; \
    fi

RUN pip install torch vllm megatron-core

COPY setup.py pyproject.toml /opt/megappo/
COPY megappo /opt/megappo/megappo
RUN pip install "/opt/megappo[vllm]"

WORKDIR /project
ENTRYPOINT ["megappo"]
