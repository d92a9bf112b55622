# syntax=docker/dockerfile:1
# kvferry with its embedded engine, in an image that runs unprivileged and on a read-only root. Build arguments:
# BASE, which has Python 3.11 to 3.13: a tag is for trying it; README.md has the command that pins it by digest.
# TORCH_INDEX, where PyTorch comes from: by default its builds for the CPU, and with an empty one the usual index, whose
# builds are for CUDA.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python3 -m venv /opt/kvferry
# Requirements before sources: a change of sources does not install them again. PyTorch comes from its index alone, since
# of two indexes, one that does not answer would leave the builds for CUDA, which are four times as large.
COPY pyproject.toml constraints.txt deploy/image/requirements.py ./
RUN /opt/kvferry/bin/pip install --no-cache-dir ${TORCH_INDEX:+--no-deps --index-url "$TORCH_INDEX"} \
    -c constraints.txt torch
RUN python3 requirements.py embedded object otel postgresql redis > requirements.txt && \
    /opt/kvferry/bin/pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY README.md LICENSE __init__.py ./
COPY app ./app
COPY core ./core
COPY cuda_ops ./cuda_ops
COPY migrations ./migrations
RUN /opt/kvferry/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM ${BASE}
ARG BASE
LABEL org.opencontainers.image.title="kvferry" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.description="KV-cache offloading for LLM engines, with an HTTP API and a dashboard" \
      org.opencontainers.image.licenses="Apache-2.0"

# The health check is curl's: it runs every ten seconds, for which a Python interpreter is too much. Its version is the
# distribution's latest, with its security fixes.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends curl && rm -rf /var/lib/apt/lists/* && \
    useradd --system --uid 10001 --create-home --home-dir /var/lib/kvferry kvferry
COPY --from=build /opt/kvferry /opt/kvferry
COPY deploy/image/healthy.sh /opt/kvferry/bin/healthy

# Compiled functions are stored in the volume too, as the root may be read-only.
ENV PATH=/opt/kvferry/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/var/lib/kvferry/numba \
    KVFERRY_HOST=0.0.0.0 \
    KVFERRY_STATE_DIR=/var/lib/kvferry

WORKDIR /var/lib/kvferry
USER 10001
VOLUME /var/lib/kvferry
EXPOSE 8787
STOPSIGNAL SIGTERM

HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 CMD ["healthy"]

ENTRYPOINT ["kvferry"]
CMD ["serve"]
