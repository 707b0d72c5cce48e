# The images of flyspec: docker build --target orchestrator|verify|draft -t flyspec-orchestrator .
#
#   BASE_IMAGE       Debian-like, with python3 (3.11 or newer), venv and CA certificates
#   VARIANT          cpu (default) or cuda: which build of torch draft and verify get
#   TORCH_CPU_INDEX  index of CPU builds of torch; empty: use pip's own configuration
#
# Pass a pip.conf with mirrors or credentials as --secret id=pip.conf,src=FILE; it stays out of the image.
# The targets draft-demo and verify-demo contain the bundled models, the others no weights.
# buildah and podman only keep HEALTHCHECK with --format docker.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS builder
# pip is not needed at run time, so it is in a separate virtual environment.
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 PIP_PYTHON=/opt/venv/bin/python

FROM builder AS requirements
COPY pyproject.toml constraints.txt deploy/image_requirements.py /src/
RUN python3 /src/image_requirements.py /src/pyproject.toml /src/constraints.txt /requirements

# Bytecode is compiled here, since the root file system is read-only at run time, and is not checked
# against the source's time, which copying between stages may change.
FROM builder AS core
COPY --from=requirements /requirements/core.txt /requirements/
COPY constraints.txt /requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf,required=false \
    /opt/pip/bin/pip install -r /requirements/core.txt -c /requirements/constraints.txt \
    && /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/venv/lib

FROM core AS http
COPY --from=requirements /requirements/http.txt /requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf,required=false \
    /opt/pip/bin/pip install -r /requirements/http.txt -c /requirements/constraints.txt \
    && /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/venv/lib

FROM core AS models
ARG VARIANT=cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=requirements /requirements/torch.txt /requirements/models.txt /requirements/
# PyPI's torch is a CUDA build, with several GB of CUDA libraries.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf,required=false \
    version="$(cat /requirements/torch.txt)" \
    && case "${VARIANT}" in \
         cpu) set -- "torch==${version}+cpu" ${TORCH_CPU_INDEX:+--extra-index-url "${TORCH_CPU_INDEX}"} ;; \
         cuda) set -- "torch===${version}" ;; \
         *) echo "VARIANT=${VARIANT}: use cpu or cuda" >&2; exit 2 ;; \
       esac \
    && /opt/pip/bin/pip install -c /requirements/constraints.txt "$@" -r /requirements/models.txt \
    && /opt/venv/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash \
         -x 'torch/(testing|include)/' /opt/venv/lib

# flyspec itself, separate from its dependencies, so that a new version is a small layer. The native
# step is compiled here, for every instruction set; at run time only CUDA images need a compiler.
FROM core AS app
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY flyspec /src/flyspec
COPY draft_service /src/draft_service
COPY verify_service /src/verify_service
COPY orchestrator /src/orchestrator
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf,required=false \
    /opt/pip/bin/pip install --no-deps --target /opt/flyspec /src \
    && ls /opt/flyspec/flyspec/engine/native/*.so \
    && /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/flyspec

# Common to the three at run time: a user without a login name, and two writable directories;
# everything else can be read-only.
FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 10001 flyspec \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/flyspec \
         --shell /usr/sbin/nologin flyspec \
    && mkdir -p /var/cache/flyspec /models \
    && chown 10001:10001 /var/cache/flyspec
ENV PATH=/opt/flyspec/bin:/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/flyspec \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/flyspec \
    TMPDIR=/tmp \
    XDG_CACHE_HOME=/var/cache/flyspec \
    HF_HOME=/var/cache/flyspec/huggingface \
    HF_HUB_DISABLE_TELEMETRY=1 \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/flyspec/inductor \
    TRITON_CACHE_DIR=/var/cache/flyspec/triton \
    TQDM_DISABLE=1
VOLUME ["/tmp", "/var/cache/flyspec"]
WORKDIR /var/cache/flyspec
USER 10001:10001

FROM runtime AS runtime-models
ARG VARIANT=cpu
# torch's compiler for GPUs, Triton, builds what starts its kernels; without gcc nothing is compiled.
USER 0
RUN if [ "${VARIANT}" = cuda ]; then apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
USER 10001:10001
COPY --from=models /opt/venv /opt/venv
COPY --from=app /opt/flyspec /opt/flyspec
# For NVIDIA's container toolkit; without it they have no effect.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime-models AS verify
ENV FLYSPEC_VERIFY_HOST=0.0.0.0
EXPOSE 50052 9466
# Loading may take long: failures only count after the first success.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=3 \
    CMD ["flyspec", "healthcheck", "--address", "localhost:50052"]
ENTRYPOINT ["python", "-m", "verify_service"]

FROM runtime-models AS draft
ENV FLYSPEC_DRAFT_HOST=0.0.0.0
EXPOSE 50051 9465
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 \
    CMD ["flyspec", "healthcheck", "--address", "localhost:50051"]
ENTRYPOINT ["python", "-m", "draft_service"]

FROM verify AS verify-demo
COPY demo/models/target /models/target
COPY demo/models/eagle3 /models/eagle3
ENV FLYSPEC_VERIFY_MODEL=/models/target \
    FLYSPEC_VERIFY_HEADS=eagle3=/models/eagle3

FROM draft AS draft-demo
COPY demo/models/draft /models/draft
COPY demo/models/draft-bytes /models/draft-bytes
ENV FLYSPEC_DRAFT_MODEL=/models/draft

FROM runtime AS orchestrator
COPY --from=http /opt/venv /opt/venv
COPY --from=app /opt/flyspec /opt/flyspec
# With a port that is set, a process that cannot listen on it fails instead of taking a free one.
ENV FLYSPEC_ORCHESTRATOR_HOST=0.0.0.0 \
    FLYSPEC_ORCHESTRATOR_HTTP_PORT=8000
EXPOSE 50050 8000 50053 9464
# It listens once the target is ready.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=3 \
    CMD ["flyspec", "healthcheck", "--address", "localhost:50050"]
ENTRYPOINT ["python", "-m", "orchestrator"]
