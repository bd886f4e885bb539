#!/usr/bin/env bash
# Pack SGLang 0.5.17 (torch 2.11, CUDA 13) for a Hopper machine without internet that has Python 3.12, torch, triton and
# the packages that those need:
#
#   benchmarks/engines/pack-sglang.sh CARRY [tvm-ffi.tar.xz]
#
# runs CARRY pack sglang FILE..., which splits the files and brings them there. The archive has what SGLang compiled with
# nvcc in an earlier run: `cd /tmp && tar cJf tvm-ffi.tar.xz $(find tvm-ffi -name '*.so')`; with it engines start sooner.
#
# There, with the files in /tmp/carry/sglang: once `bash /tmp/carry/sglang/install`, then in every shell
#   . /tmp/carry/sglang/env
#
# Left out: kernels of other GPUs and of attention backends other than Triton's, grammars (xgrammar), and what the image,
# speech and server parts import. sitecustomize.py stands for two packages that SGLang imports and that nothing here calls.
set -eu
[ $# -eq 1 ] || [ $# -eq 2 ] || { sed -n 2,15p "$0"; exit 2; }
carry=$1
kernels=${2:+$(realpath "$2")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/wheels" "$work/site" "$work/out"

platforms=$(for v in 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do echo "--platform manylinux_${v}_x86_64"; done)
# shellcheck disable=SC2086  # several words
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$work/wheels" \
    sglang==0.5.17 sglang-kernel==0.4.5 sgl-deep-gemm==0.1.5.post1 flashinfer-python==0.6.15.post1 apache-tvm-ffi==0.1.11 \
    transformers==5.12.1 tokenizers==0.22.2 compressed-tensors==0.20.0 gguf==0.19.0 llguidance==1.9.1 openai==2.6.1 \
    pydantic==2.12.5 pydantic_core==2.41.5 typing-inspection annotated-types fastapi==0.136.3 starlette uvicorn python-multipart \
    pyzmq msgspec orjson pybase64 cachetools dill distro interegular jiter loguru partial-json-parser setproctitle sniffio \
    watchfiles
cd "$work/site"
for wheel in ../wheels/*.whl; do unzip -q -o "$wheel" -x '*/sm100/*' '*/flash*_ops*' '*/infllm_ops*' '*.a'; done
rm -rf sglang/multimodal_gen sglang/test sglang/srt/*/_core.*.so
cat >sitecustomize.py <<'END_OF_FILE'
"""Packages that SGLang imports and that are not here: each name in them is typing.Any, which cannot be called."""

import importlib.abc
import importlib.machinery
import sys
import types
import typing


class AbsentModule(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return typing.Any


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        absent = name.split(".")[0] in ("IPython", "xgrammar")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec):
        return AbsentModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
END_OF_FILE
tar cf - . | xz -T0 -6 >../out/site.tar.xz
cat >../out/install <<'END_OF_FILE'
set -eu
mkdir -p /tmp/sglang-site
xz -dc -T0 /tmp/carry/sglang/site.tar.xz | tar xf - -C /tmp/sglang-site
[ ! -e /tmp/carry/sglang/tvm-ffi.tar.xz ] || tar xJf /tmp/carry/sglang/tvm-ffi.tar.xz -C /tmp
python3 -m compileall -q -j 0 /tmp/sglang-site/sglang || true  # several engines would do so at once
. /tmp/carry/sglang/env
# SGLang imports DeepGEMM wherever it is installed, and does not start if that fails.
python3 -c 'import deep_gemm' || { echo "without DeepGEMM"; rm -rf /tmp/sglang-site/deep_gemm; }
python3 -c 'import sgl_kernel, sglang; print("SGLang", sglang.__version__, "in /tmp/sglang-site")'
END_OF_FILE
cat >../out/env <<'END_OF_FILE'
export PYTHONPATH=/tmp/sglang-site${PYTHONPATH:+:$PYTHONPATH}
export SGLANG_IS_FLASHINFER_AVAILABLE=false SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1 HF_HUB_OFFLINE=1 NCCL_NVLS_ENABLE=0
export TVM_FFI_CACHE_DIR=/tmp/tvm-ffi SGLANG_DG_CACHE_DIR=/tmp/deep-gemm SGLANG_JIT_DEEPGEMM_PRECOMPILE=false
# CUDA's libraries that torch was installed with: sgl_kernel and deep_gemm name libnvrtc, libcublas and libcudart.
export LD_LIBRARY_PATH=$(python3 -c '
import glob, sysconfig
print(":".join(sorted(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/lib"))))'):${LD_LIBRARY_PATH:-}
END_OF_FILE
cd - >/dev/null
[ -z "$kernels" ] || cp "$kernels" "$work/out/tvm-ffi.tar.xz"
"$carry" pack sglang "$work"/out/*
