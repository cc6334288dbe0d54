#!/usr/bin/env bash
# Talk to a running server with curl:   examples/curl.sh [base URL]
set -euo pipefail
URL="${1:-http://127.0.0.1:8000/v1}"

echo "== one answer"
curl --silent --show-error --fail-with-body "$URL/chat/completions" \
  --header "Content-Type: application/json" \
  --data '{"model": "embedded", "messages": [{"role": "user", "content": "What is a KV cache?"}]}'

echo
echo "== the same as a stream"
curl --silent --show-error --fail-with-body --no-buffer "$URL/chat/completions" \
  --header "Content-Type: application/json" \
  --data '{"model": "embedded", "stream": true, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}'
