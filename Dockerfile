# syntax=docker/dockerfile:1
FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 \
    KVFERRY_HOST=0.0.0.0 \
    KVFERRY_STATE_DIR=/var/lib/kvferry

RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/kvferry kvferry

WORKDIR /opt/kvferry
COPY pyproject.toml constraints.txt README.md LICENSE __init__.py ./
COPY app ./app
COPY core ./core
COPY cuda_ops ./cuda_ops
COPY migrations ./migrations
RUN pip install --no-cache-dir -c constraints.txt '.[embedded,object,otel,postgresql,redis]'

# From a folder of its own, so that what runs is the installed package.
WORKDIR /var/lib/kvferry
USER 10001
VOLUME /var/lib/kvferry
EXPOSE 8787

HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('KVFERRY_PORT', 8787)), timeout=2); c.request('GET', '/healthz'); sys.exit(c.getresponse().status != 200)"]

ENTRYPOINT ["kvferry"]
CMD ["serve"]
