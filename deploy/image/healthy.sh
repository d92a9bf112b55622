#!/bin/sh
# Whether the service of this container answers, at the address that it was given. A wildcard means loopback.
case ${KVFERRY_HOST:-127.0.0.1} in
    0.0.0.0) host=127.0.0.1 ;;
    ::) host='[::1]' ;;
    *:*) host="[$KVFERRY_HOST]" ;;
    *) host=${KVFERRY_HOST:-127.0.0.1} ;;
esac
exec curl --fail --silent --show-error --output /dev/null --max-time 2 --noproxy '*' \
    "http://$host:${KVFERRY_PORT:-8787}/healthz"
