#!/bin/sh
# Tests and measures everything on a machine with a GPU, torch, and neither network nor virtual
# environment: docs/gpu.md. Results go to a folder: texts of the tests, JSON of the benchmarks, and
# the document written from them.
#
#     bench/gpu/run.sh RESULTS [test|bench]
set -eu
cd "$(dirname "$0")/../.."
results=${1:?usage: bench/gpu/run.sh RESULTS [test|bench]}
parts=${2:-test bench}
python=${GPU_PYTHON:-python3}
mkdir -p "$results"
results=$(cd "$results" && pwd)
site=${GPU_SITE:-$results/site}
if [ -d build/gpu-wheels ] && [ ! -d "$site" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" build/gpu-wheels/*.whl
fi
nvidia-smi || echo "no nvidia-smi"
status=0
for part in $parts; do
    case $part in
        test)
            timeout "${GPU_TEST_SECONDS:-570}" make --no-print-directory gpu-test \
                GPU_PYTHON="$python" GPU_SITE="$site" PYTEST_ARGS="${PYTEST_ARGS:-}" \
                > "$results/gpu-test.txt" 2>&1 || status=$?
            tail -n 40 "$results/gpu-test.txt" ;;
        bench)
            cp docs/measurements/gpu.md "$results/gpu.md"
            make --no-print-directory gpu-bench GPU_PYTHON="$python" GPU_SITE="$site" \
                GPU_RESULTS="$results" GPU_DOCUMENT="$results/gpu.md" \
                > "$results/gpu-bench.txt" 2>&1 || status=$?
            tail -n 200 "$results/gpu-bench.txt" ;;
        *) echo "unknown part $part: test or bench"; exit 2 ;;
    esac
done
[ -n "${GPU_SITE:-}" ] || rm -rf "$results/site"
exit $status
