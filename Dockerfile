# slime on a machine with NVIDIA GPUs, from stock packages: nothing is patched, nothing is built from a fork.
# docs/docker.md has the commands that build and run it, and the reason of each option.
#
# The CUDA version of the base must be the one that SGLang's wheels on PyPI are built for. CUDA 13 needs a driver from
# 580 on. For some older ones on data-center GPUs, NVIDIA's images contain compatibility libraries.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

# Packages of the base's own release: their versions are those of the image tag above. ibverbs-providers has the drivers
# of InfiniBand, which libibverbs1 only recommends: NCCL uses TCP without them. Triton needs a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        build-essential ca-certificates git ibverbs-providers libibverbs1 librdmacm1 libnuma1 ninja-build openssh-client \
        python3 python3-dev python3-venv rdma-core rsync \
    && rm -rf /var/lib/apt/lists/*

# The launch scripts read models and data in /models and /data, and write to the folder that a user mounts for outputs.
# Kernels that are compiled at the first use are kept in one folder, which a volume keeps for later containers.
ENV VIRTUAL_ENV=/opt/slime-venv \
    BASE_DIR=/root \
    MODEL_DIR=/models \
    DATA_DIR=/data \
    OUTPUT_DIR=/root/slime/outputs \
    TRITON_CACHE_DIR=/root/.cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/root/.cache/inductor
ENV PATH=${VIRTUAL_ENV}/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    CUDA_DEVICE_MAX_CONNECTIONS=1
WORKDIR /root/slime

# Dependencies first: a change of the sources alone builds in seconds. pyproject.toml and requirements.txt pin what must
# be pinned. TransformerEngine compiles its part for torch against the torch that is installed before.
ARG TRANSFORMER_ENGINE=""
COPY pyproject.toml requirements.txt LICENSE README.md ./
# hadolint ignore=DL3013
RUN mkdir slime && touch slime/__init__.py \
    && python3 -m venv "${VIRTUAL_ENV}" \
    && pip install --no-cache-dir '.[gpu,wandb,parquet]' \
    && if [ -n "${TRANSFORMER_ENGINE}" ]; then \
        pip install --no-cache-dir setuptools wheel pybind11 \
        && pip install --no-cache-dir --no-build-isolation '.[te]'; \
    fi \
    && pip uninstall --yes slime \
    && rm -rf slime build slime.egg-info

COPY . .
RUN pip install --no-cache-dir --no-deps --editable . && slime --help > /dev/null

# Any user may run it: `docker run --user "$(id -u):$(id -g)" ...` writes outputs that belong to you. /root is open to
# all users, as /tmp is: commands of slime's guides put models and data there.
RUN useradd --create-home --uid 10001 slime \
    && mkdir -p outputs /root/.cache \
    && chmod 0777 outputs \
    && chmod 1777 /root /root/.cache
ENV HOME=/root
USER 10001

CMD ["slime", "doctor"]
