#!/bin/sh
# Wheels that a GPU host without a network cannot get by `pip download`, for docs/gpu.md:
#
#     experiments/gpu/kit.sh DIR      # python3.12, and CUDA 13 in CUDA_HOME (/usr/local/cuda); no GPU; ten minutes on two cores
#
# This project, and LMCache built against the host's torch: TORCH (2.11.0), LMCACHE (0.5.6), ARCH (9.0: H100, H200).
# LMCache 0.5.6 lacks one symbol under torch 2.11. On the host:
#
# - This project's wheel (`make dist` makes it too) by `pip install --no-deps --no-index --target plugin *.whl`, with
#   `plugin` on PYTHONPATH. It needs pyyaml, prometheus_client, typer, rich and httpx. `gpu_check` needs the clone, numpy,
#   scipy, matplotlib, transformers, tokenizers, aiohttp, psutil and tqdm too.
# - vLLM 0.32.0 is made for torch 2.13, and ran with torch 2.11 and Triton 3.6. Without flashinfer set
#   VLLM_USE_FLASHINFER_SAMPLER=0.
set -eu
clone=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1" && cd "$1"
python3.12 -m venv build
PATH=$PWD/build/bin:$PATH
pip install --quiet "torch==${TORCH:-2.11.0}" numpy ninja setuptools setuptools_scm wheel packaging grpcio-tools
pip download --quiet --no-deps --no-build-isolation --no-binary=lmcache "lmcache==${LMCACHE:-0.5.6}"
CPATH=$(python -c 'import glob, site; print(":".join(glob.glob(site.getsitepackages()[0] + "/nvidia/*/include")))')
export CPATH CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}" TORCH_CUDA_ARCH_LIST="${ARCH:-9.0}"
export MAX_JOBS="${MAX_JOBS:-$(nproc)}" LDFLAGS=-Wl,--strip-all
pip wheel --quiet --no-deps --no-build-isolation --wheel-dir wheels lmcache-*.tar.gz
pip wheel --quiet --no-deps --wheel-dir wheels "$clone"
ls wheels
