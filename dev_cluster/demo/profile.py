"""Chapter: what a job's GPUs do."""

from __future__ import annotations

import shlex

from dev_cluster.demo.enforce import PYTHON
from dev_cluster.demo.stage import Stage

# Steps of a training: kernels, of which the simulated GPU computes nothing, and a copy.
TRAIN = """
import ctypes as c
cuda = c.CDLL("libcuda.so.1")
context, module, gemm, norm, memory = (c.c_void_p() for _ in range(5))
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0 and cuda.cuModuleLoadData(c.byref(module), b"code") == 0
cuda.cuModuleGetFunction(c.byref(gemm), module, b"gemm")
cuda.cuModuleGetFunction(c.byref(norm), module, b"layer_norm")
cuda.cuMemAlloc_v2(c.byref(memory), c.c_size_t(1 << 24))
batch, one = bytes(1 << 24), c.c_uint(1)
while True:
    for kernel in (gemm, norm) * 4:
        cuda.cuLaunchKernel(kernel, one, one, one, one, one, one, 0, None, None, None)
    cuda.cuMemcpyHtoD_v2(memory, batch, c.c_size_t(1 << 24))
    cuda.cuCtxSynchronize()
"""


def profile(stage: Stage) -> None:
    """A job that runs is profiled, and summed up."""
    stage.step(
        "What a job's GPUs do",
        "A job that runs is profiled for two seconds, without a change to it: CUDA's driver has loaded a library that "
        "sleeps until it is asked. The collector is a step of the job. The same as a file opens in Perfetto.",
    )
    train = f"SLUICE_SIM_KERNEL_US=gemm=4000,1000 exec {PYTHON} -c {shlex.quote(TRAIN)}"
    job = stage.run(
        ["sbatch", "--parsable", "-w", "h100-1", "--gpu-mem=10G", "-o/dev/null", "--wrap", train],
        user="alice",
        shown="sbatch --parsable --gpu-mem=10G train.sh",
    ).strip()
    stage.wait("the job runs", lambda: stage.state(job) == "RUNNING")
    words = ["profile", "summary", job, "--seconds", "2"]
    summary = stage.run(["sluice", *words], user="alice")
    stage.cluster.run(["scancel", job])
    stage.expect("gemm" in summary and "layer_norm" in summary, "the kernels of the job are in its profile")
