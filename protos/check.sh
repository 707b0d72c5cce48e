#!/bin/sh
# Lints the protos with buf, and compares them with the last commit that landed before this one.
# buf comes from npm; where it cannot be installed this says so loudly and the step is not counted.
set -u
cd "$(dirname "$0")/.."

skip() {
    echo "***********************************************************************"
    echo "*** SKIPPED: buf lint and buf breaking: $1"
    echo "***********************************************************************"
    exit 0
}

if [ ! -x node_modules/.bin/buf ]; then
    command -v npm >/dev/null 2>&1 || skip "npm is not installed"
    npm install --ignore-scripts --no-audit --no-fund --no-package-lock >/dev/null 2>&1 \
        || skip "npm could not install @bufbuild/buf"
fi
buf=node_modules/.bin/buf
"$buf" lint || exit 1
echo "buf lint: clean"

against="${FLYSPEC_PROTO_BASE:-HEAD~1}"
if git cat-file -e "$against:protos/flyspec/v1/common.proto" 2>/dev/null; then
    "$buf" breaking --against ".git#ref=$(git rev-parse "$against")" || exit 1
    echo "buf breaking: compatible with $against"
else
    echo "buf breaking: nothing to compare with ($against has no protos)"
fi
