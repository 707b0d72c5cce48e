# The images of flyspec: docker build --target orchestrator|verify|draft -t flyspec-orchestrator .
#
#   BASE_IMAGE       Debian-like, with python3 (3.11 or newer), venv and CA certificates
#   VARIANT          cpu (default) or cuda: which build of torch draft and verify get
#   TORCH_CPU_INDEX  where CPU builds of torch are; empty: pip's own configuration knows
#
# A pip.conf with mirrors or credentials: --secret id=pip.conf,src=FILE; it stays out of the image.
# The targets draft-demo and verify-demo also hold the bundled models, the others hold no weights.
# HEALTHCHECK is kept by docker, and by buildah and podman with --format docker.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS builder
# pip is not needed at run time: it has a virtual environment of its own.
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 PIP_PYTHON=/opt/venv/bin/python

FROM builder AS requirements
COPY pyproject.toml constraints.txt deploy/image_requirements.py /src/
RUN python3 /src/image_requirements.py /src/pyproject.toml /src/constraints.txt /requirements

# Bytecode is made here, since the root file system is read-only at run time. It is never compared
# with the source's time, which copying between stages may change.
FROM builder AS core
COPY --from=requirements /requirements/core.txt /requirements/
COPY constraints.txt /requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf,required=false \
    /opt/pip/bin/pip install -r /requirements/core.txt -c /requirements/constraints.txt \
    && /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/venv/lib

FROM core AS models
ARG VARIANT=cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=requirements /requirements/torch.txt /requirements/models.txt /requirements/
# PyPI's own torch is a CUDA build, with the CUDA libraries: several GB.
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

# flyspec itself, small, apart from what it depends on: a new version of it is a small layer. The
# native step is compiled here, for every instruction set; what runs needs no compiler.
FROM core AS app
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md /src/
COPY flyspec /src/flyspec
COPY draft_service /src/draft_service
COPY verify_service /src/verify_service
COPY orchestrator /src/orchestrator
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf,required=false \
    /opt/pip/bin/pip install --no-deps --target /opt/flyspec /src \
    && ls /opt/flyspec/flyspec/engine/native/*.so \
    && /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/flyspec

# What the three have in common at run time: a user without a name to log in with, and two
# directories to write to, everything else can be read-only.
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
COPY --from=models /opt/venv /opt/venv
COPY --from=app /opt/flyspec /opt/flyspec
# For nvidia's container toolkit; without it they mean nothing.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime-models AS verify
ENV FLYSPEC_VERIFY_HOST=0.0.0.0
EXPOSE 50052 9466
# Loading may take long: until the first success failures do not count.
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
ENV FLYSPEC_VERIFY_MODEL=/models/target

FROM draft AS draft-demo
COPY demo/models/draft /models/draft
COPY demo/models/draft-bytes /models/draft-bytes
ENV FLYSPEC_DRAFT_MODEL=/models/draft

FROM runtime AS orchestrator
COPY --from=core /opt/venv /opt/venv
COPY --from=app /opt/flyspec /opt/flyspec
ENV FLYSPEC_ORCHESTRATOR_HOST=0.0.0.0
EXPOSE 50050 50053 9464
# It listens once the target is there.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=3 \
    CMD ["flyspec", "healthcheck", "--address", "localhost:50050"]
ENTRYPOINT ["python", "-m", "orchestrator"]
