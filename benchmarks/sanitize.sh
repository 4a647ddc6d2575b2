#!/bin/bash
# Builds the native kernels with the address and undefined-behaviour sanitizers and runs their tests on every
# instruction set that this processor has. Any finding ends a run with an error.
#
#   benchmarks/sanitize.sh [PYTEST_ARGUMENT ...]
#
# PYTHON: the Python of the environment to use, .venv/bin/python by default. ISAS: the instruction sets, by default the
# best of this processor, avx2 and portable. Needs GCC with libasan and libubsan; nothing of the environment is changed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
tests=(
  tests/ops/test_native.py tests/models/test_native_decoder.py tests/models/test_paged_cache.py
  tests/engine/test_native_exactness.py)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake -S "$root" -B "$work/build" -DFOREDRAFT_SANITIZE=ON -DCMAKE_CXX_COMPILER=g++ -DPython_EXECUTABLE="$python" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >"$work/log" || { cat "$work/log"; exit 1; }
cmake --build "$work/build" >>"$work/log" || { tail -50 "$work/log"; exit 1; }

# A package of its own: the sources as links, the sanitized library beside them. Python's -S leaves out the environment's
# .pth files, one of which would put the installed package first.
mkdir "$work/package"
cp -rs "$root/src/foredraft" "$work/package/foredraft"
cp "$work"/build/_native*.so "$work/package/foredraft"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')

status=0
for isa in ${ISAS:-"" avx2 portable}; do
  echo "sanitize: ${isa:-best instruction set}"
  (
    cd "$root"
    # Python and torch never free some of their memory, so leaks are not looked for.
    env ${isa:+FOREDRAFT_ISA="$isa"} \
      PYTHONPATH="$work/package:$packages" \
      LD_PRELOAD="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so)" \
      ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
      OMP_NUM_THREADS=1 \
      "$python" -S -m pytest -p no:cacheprovider --capture=no -m "not slow" "${tests[@]}" "$@"
  ) || status=1
done
exit $status
