# slime on a machine with NVIDIA GPUs, from stock packages: nothing is patched, nothing is built from a fork.
#
#   docker build -t slime .
#   docker run --rm -it --gpus all --ipc=host --shm-size=16g --ulimit memlock=-1 --ulimit stack=67108864 \
#       -v /data/models:/models -v "$PWD/outputs:/root/slime/outputs" slime bash
#
# The CUDA version of the base must be the one that SGLang's wheels on PyPI are built for.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

# Packages of the base's own release: their versions are those of the image tag above.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates git ibverbs-providers libibverbs1 librdmacm1 libnuma1 ninja-build openssh-client \
        python3 python3-dev python3-venv rsync \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/slime-venv
ENV PATH=${VIRTUAL_ENV}/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    CUDA_DEVICE_MAX_CONNECTIONS=1
WORKDIR /root/slime

# Dependencies first: a change of the sources alone builds in seconds. requirements.txt pins what must be pinned.
COPY pyproject.toml requirements.txt LICENSE README.md ./
# hadolint ignore=DL3013
RUN mkdir slime && touch slime/__init__.py \
    && python3 -m venv "${VIRTUAL_ENV}" \
    && pip install --no-cache-dir '.[wandb,parquet]' \
    && pip uninstall --yes slime \
    && rm -rf slime build slime.egg-info

# Kernels that training uses when they are installed and never requires: --build-arg TRAINING_KERNELS="..." adds them.
ARG TRAINING_KERNELS=""
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN if [[ -n "${TRAINING_KERNELS}" ]]; then \
        xargs -n 1 pip install --no-cache-dir --no-build-isolation <<< "${TRAINING_KERNELS}"; \
    fi

COPY . .
RUN pip install --no-cache-dir --no-deps --editable . && slime --help > /dev/null

# Any user may run it: `docker run --user "$(id -u):$(id -g)" ...` writes outputs that belong to you. /root is open to
# all users, as /tmp is: commands of slime's guides put models and data there.
RUN useradd --create-home --uid 10001 slime \
    && mkdir -p outputs \
    && chmod 0777 outputs \
    && chmod 1777 /root
ENV HOME=/root
USER 10001

CMD ["slime", "doctor"]
