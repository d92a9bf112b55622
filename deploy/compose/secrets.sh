#!/bin/sh
# Make the secrets of compose.yaml, each readable by the user of its container only. Those that exist stay as they are.
# Run it as root: containers see the files with the owners that they have here.
set -eu
umask 077
folder=$(dirname "$0")/secrets
mkdir -p "$folder"

own() { chown "$2:$2" "$folder/$1" && chmod 600 "$folder/$1"; }
new() { [ -s "$folder/$1" ] || openssl rand -hex 32 > "$folder/$1"; own "$1" "$2"; }

new admin_token 10001
new read_token 10001
# The same token, for Prometheus, which runs as another user.
cp "$folder/read_token" "$folder/prometheus_read_token"
own prometheus_read_token 65534
new grafana_password 472
# Until a real certificate is in its place.
[ -s "$folder/proxy_key" ] || openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=kvferry \
    -keyout "$folder/proxy_key" -out "$folder/proxy_certificate" 2> /dev/null
own proxy_key 101
own proxy_certificate 101
