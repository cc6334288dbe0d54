#!/usr/bin/env bash
# Talk to a running server with curl:   examples/curl.sh [base URL]
set -euo pipefail
URL="${1:-http://127.0.0.1:8000/v1}"

ask() { curl --silent --show-error --fail-with-body --no-buffer --header "Content-Type: application/json" "$@"; }

echo "== the model"
MODELS="$(ask "$URL/models")"
MODEL="$(sed -E 's/^[^[]*\[\{"id":"([^"]*)".*/\1/' <<<"$MODELS")"
echo "$MODEL"

echo "== one answer"
ask "$URL/chat/completions" --data @- <<END
{"model": "$MODEL", "messages": [{"role": "user", "content": "What is a KV cache?"}]}
END

echo
echo "== the same as a stream; where one model is served, its name may be left out"
ask "$URL/chat/completions" \
  --data '{"stream": true, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}'
