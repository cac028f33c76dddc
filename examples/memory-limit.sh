#!/bin/sh
# A job is held to the GPU memory that it requested: an allocation beyond it fails as on a full GPU. For NVIDIA GPUs.
#
# alice@login$ sbatch --wait memory-limit.sh
# Submitted batch job ...
# alice@login$ cat memory-limit.out
# 8 GiB: allocated
# 4 GiB: out of memory
# 1 GiB: allocated
#SBATCH --gpu-mem=10G
#SBATCH --time=5
#SBATCH --output=memory-limit.out
python3 - <<'END'
import ctypes

ANSWERS = {0: "allocated", 2: "out of memory"}

cuda = ctypes.CDLL("libcuda.so.1")
context, address = ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
for gib in 8, 4, 1:
    answer = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(gib << 30))
    print(f"{gib} GiB:", ANSWERS.get(answer, f"CUDA error {answer}"))
END
