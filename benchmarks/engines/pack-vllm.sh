#!/usr/bin/env bash
# Pack vLLM 0.33.0 for a Hopper machine without internet that has Python 3.12, CUDA 13 with nvcc, torch 2.11, triton and
# the packages that those need:
#
#   benchmarks/engines/pack-vllm.sh CARRY
#
# runs CARRY pack vllm FILE..., which splits the files and brings them there. There, with the files in /tmp/carry/vllm:
# once `bash /tmp/carry/vllm/install`, then in every shell
#   . /tmp/carry/vllm/env
#
# vLLM asks for torch 2.14, but its libraries use torch's stable ABI and run on 2.11. With Humming and DeepGEMM, which
# compile kernels there. Left out: kernels of other GPUs, FlashAttention 2, FlashMLA, FlashInfer, and the Rust server.
set -eu
[ $# -eq 1 ] || { sed -n 2,13p "$0"; exit 2; }
carry=$(realpath "$1")
here=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/site" "$work/out"

platforms=$(for v in 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do echo "--platform manylinux_${v}_x86_64"; done)
download() { # folder, requirements
    folder=$1
    shift
    # shellcheck disable=SC2086  # several words
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$folder" "$@"
}
download "$work" vllm==0.33.0
download "$work/out" humming-kernels==0.1.19 apache-tvm-ffi==0.1.11 compressed-tensors==0.17.0 xgrammar==0.2.8 \
    llguidance==1.7.6 lark==1.2.2 oss-harmony openai fastapi==0.136.3 starlette uvicorn pydantic==2.12.5 pydantic-core==2.41.5 \
    typing-inspection annotated-types orjson jiter distro sniffio partial-json-parser pyzmq msgspec pybase64 cachetools loguru \
    watchfiles model-hosting-container-standards jmespath blake3 prometheus-fastapi-instrumentator python-multipart \
    email-validator dnspython ijson setproctitle diskcache cbor2 mcp pydantic-settings python-dotenv sse-starlette httpx-sse \
    jsonschema jsonschema-specifications referencing rpds-py python-json-logger httpx2 httpcore2 truststore google-re2
unzip -q "$work"/vllm-*.whl -d "$work/site"
cd "$work/site/vllm"
rm -rf vllm-rs third_party/fmha_sm100 third_party/flashmla third_party/tml_fa4 vllm_flash_attn/cute \
    vllm_flash_attn/_vllm_fa2_C.abi3.so _flashkda_C.abi3.so _deepselect_C.abi3.so _flashmla_C.abi3.so _qutlass_C.abi3.so
cd "$work/site"
tar cf - . | xz -T0 -6 >"$work/out/site.tar.xz"
cat >"$work/out/install" <<'END_OF_FILE'
set -eu
mkdir -p /tmp/vllm-site
xz -dc -T0 /tmp/carry/vllm/site.tar.xz | tar xf - -C /tmp/vllm-site
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/vllm-site \
    /tmp/carry/vllm/*.whl 2>&1 | grep -v WARN || true
python3 -m compileall -q -j 0 /tmp/vllm-site/vllm || true  # several processes would do so at once
. /tmp/carry/vllm/env
python3 -c 'import vllm; print("vLLM", vllm.__version__, "in /tmp/vllm-site")'
END_OF_FILE
cat >"$work/out/env" <<'END_OF_FILE'
export PYTHONPATH=/tmp/vllm-site:/tmp/vllm-site/vllm/third_party${PYTHONPATH:+:$PYTHONPATH}
export VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_ALLREDUCE_USE_SYMM_MEM=0 VLLM_USE_FLASHINFER_SAMPLER=0 NCCL_NVLS_ENABLE=0
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
END_OF_FILE
cd "$here"
"$carry" pack vllm "$work"/out/*
