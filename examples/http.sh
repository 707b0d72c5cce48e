#!/bin/sh
# Plain HTTP with curl: models and rules, one text, a stream with the origin of every token.
set -eu
server=http://127.0.0.1:8000

curl --silent --fail "$server/v1/models"
echo

curl --silent --fail "$server/v1/chat/completions" -H 'content-type: application/json' -d '{
    "model": "target:exact",
    "messages": [{"role": "user", "content": "Ana has 20 apples and gives 4 to Ben and 7 to Leo. How many apples does Ana have now?"}]
}'
echo

curl --silent --fail --no-buffer "$server/v1/chat/completions" -H 'content-type: application/json' -d '{
    "model": "target",
    "messages": [{"role": "user", "content": "Rosa collects some stamps: 12 on Monday and 9 on Friday. They are shared equally among 3 friends. How many does each friend get?"}],
    "speculation": {"rule": {"name": "fly"}, "maxLooseCostNats": 1.5},
    "return_origins": true,
    "stream": true
}'
