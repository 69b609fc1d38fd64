"""Kernels of this package compiled as C++ and run on the CPU."""

import ctypes
import shutil
import subprocess

BEFORE = """
#include <cmath>
#include <cstring>
#include <immintrin.h>
#define __global__
#define __device__
#define __shared__
#define __align__(bytes)
#define __restrict__
#define __launch_bounds__(...)
struct Index { int x, y, z; };
static thread_local Index blockIdx, threadIdx, gridDim;
struct Half;
struct Bfloat;
static float widen(float value) { return value; }
static float widen(Half value);
static float widen(Bfloat value);
static void narrow(float value, float& result) { result = value; }
static void narrow(float value, Half& result);
static void narrow(float value, Bfloat& result);
static float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
"""
"""What CUDA C++ has and C++ has not."""

AFTER = """
static float widen(Half value) { return _cvtsh_ss(value.bits); }
static void narrow(float value, Half& result) { result.bits = _cvtss_sh(value, 0); }
static float widen(Bfloat value) { return __uint_as_float((unsigned)value.bits << 16); }
static void narrow(float value, Bfloat& result) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    result.bits = value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
"""


class CpuKernel:
    """A kernel's text in the place of `KernelsPlan`.

    ``run_text`` is C++ with fields ``parameters`` and ``names``: a function ``run`` of the kernel's
    parameters, the number of blocks and that of threads.
    """

    def __init__(self, segment, text, run_text, launch, folder, *options, before=""):
        compiler = shutil.which("g++") or shutil.which("clang++")
        assert compiler, "a C++ compiler is missing: it runs the kernel on the CPU (apt install g++)"
        parameters = next(line for line in text.splitlines() if line.startswith("#define PARAMETERS "))
        run = run_text.format(
            parameters=parameters.removeprefix("#define PARAMETERS "),
            names=", ".join(o.name for o in segment.operands),
        )
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        source.write_text(BEFORE + before + text + AFTER + run)
        options = (*options, "-w", "-mf16c", "-shared", "-fPIC", "-o")
        subprocess.run([compiler, *options, library, source], check=True)
        self.function = ctypes.CDLL(str(library)).run
        self.segment, self.launch = segment, launch

    def run(self, operands, workspace, out):
        pointers = [operands[o.name].data_ptr() for o in self.segment.inputs] + [out.data_ptr()]
        (blocks, *_), (threads, *_) = self.launch.grid, self.launch.block
        self.function(*map(ctypes.c_void_p, pointers), blocks, threads)
        return out
