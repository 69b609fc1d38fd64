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
#define __expf(value) std::exp(value)
#define __fdividef(value, by) ((value) / (by))
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
    parameters, the grid's two sizes and the number of threads.
    """

    def __init__(self, segment, text, run_text, launch, folder, *options, before=""):
        compiler = shutil.which("g++") or shutil.which("clang++")
        assert compiler, "a C++ compiler is missing: it runs the kernel on the CPU (apt install g++)"
        parameters = next(line for line in text.splitlines() if line.startswith("#define PARAMETERS "))
        run = run_text.format(
            parameters=parameters.removeprefix("#define PARAMETERS "),
            names=", ".join(o.name for o in segment.operands),
            kernel=launch.name,
        )
        number = len(list(folder.glob("*.so")))
        source, library = folder / f"kernel{number}.cpp", folder / f"kernel{number}.so"
        source.write_text(BEFORE + before + text + AFTER + run)
        options = (*options, "-w", "-mf16c", "-shared", "-fPIC", "-o")
        subprocess.run([compiler, *options, library, source], check=True)
        self.function = ctypes.CDLL(str(library)).run
        self.segment, self.launch = segment, launch

    def run(self, operands, workspace, out):
        pointers = [operands[o.name].data_ptr() for o in self.segment.inputs] + [out.data_ptr()]
        (blocks, across, _), (threads, *_) = self.launch.grid, self.launch.block
        self.function(*map(ctypes.c_void_p, pointers), blocks, across, threads)
        return out


THREADS_BEFORE = """
#include <barrier>
#include <memory>
#include <thread>
#include <vector>
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
extern "C" { alignas(16) unsigned char shared[232448]; }
static unsigned __cvta_generic_to_shared(void*) { return 0; }
static std::unique_ptr<std::barrier<>> block;
static void __syncthreads() { block->arrive_and_wait(); }
struct Warp {
    std::barrier<> lanes{32};
    unsigned registers[32][6];
};
static std::unique_ptr<Warp[]> warps;
template <int bytes> static void fetch_async(unsigned to, const void* from, bool inside) {
    if (inside) std::memcpy(shared + to, from, bytes);
    else std::memset(shared + to, 0, bytes);
}
static void end_of_fetches() {}
template <int pending> static void wait_for_fetches() {}
static void multiply(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                     unsigned b1);
static unsigned narrowed(float first, float second);
static void take_larger(unsigned& most, unsigned other);
"""
THREADS_RUN = """
static float widened(unsigned both, int which) {{
    Element element;
    element.bits = (unsigned short)(both >> 16 * which);
    return widen(element);
}}
static void multiply(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                     unsigned b1) {{
    const int lane = threadIdx.x % 32;
    Warp& warp = warps[threadIdx.x / 32];
    const unsigned own[6] = {{a0, a1, a2, a3, b0, b1}};
    std::memcpy(warp.registers[lane], own, sizeof own);
    warp.lanes.arrive_and_wait();
    for (int i = 0; i < 4; ++i) {{  // rows lane / 4 and 8 more, columns lane % 4 * 2 and the next
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {{
            const unsigned a = warp.registers[row * 4 + k % 8 / 2][i / 2 + k / 8 * 2];
            const unsigned b = warp.registers[column * 4 + k % 8 / 2][4 + k / 8];
            sum[i] += widened(a, k % 2) * widened(b, k % 2);
        }}
    }}
    warp.lanes.arrive_and_wait();
}}
static unsigned narrowed(float first, float second) {{
    Element low, high;
    narrow(first, low), narrow(second, high);
    return low.bits | (unsigned)high.bits << 16;
}}
static void take_larger(unsigned& most, unsigned other) {{
    for (int which = 0; which < 2; ++which) {{
        const float a = widened(most, which), b = widened(other, which);
        if (!(a != a) && (b != b || b > a))
            most = (most & 0xffffu << 16 * (1 - which)) | (other & 0xffffu << 16 * which);
    }}
}}
extern "C" void run({parameters}, int blocks, int across, int threads) {{
    for (int y_ = 0; y_ < across; ++y_)
        for (int x_ = 0; x_ < blocks; ++x_) {{
            std::memset(shared, 0xff, sizeof shared);
            block = std::make_unique<std::barrier<>>(threads);
            warps.reset(new Warp[threads / 32]);
            std::vector<std::thread> all;
            for (int thread = 0; thread < threads; ++thread)
                all.emplace_back([=] {{
                    blockIdx = {{x_, y_, 0}}, threadIdx = {{thread, 0, 0}}, gridDim = {{blocks, across, 1}};
                    {kernel}({names});
                }});
            for (std::thread& thread : all) thread.join();
        }}
}}
"""
"""Matrices are dealt to a warp's threads as PTX ISA defines mma.m16n8k16."""


class TensorCoreKernel(CpuKernel):
    """A kernel on tensor cores, with a thread for each of a block's."""

    def __init__(self, segment, text, launch, folder):
        options = ("-O1", "-std=c++20", "-pthread")
        super().__init__(segment, text, THREADS_RUN, launch, folder, *options, before=THREADS_BEFORE)
