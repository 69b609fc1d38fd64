// A convolution of an image of up to four channels on tensor cores, the operations behind it and, where POOL is
// set, the maximum over windows that follows; channels-last. Sizes and types are macros:
// `cudnn_fusion.engines.stem` sets them, and compiles this at a plan's sizes.
//
// A block computes TILE_P x TILE_Q outputs of BLOCK_K channels, then takes the next ones. The part of the image
// that they need lies in shared memory with four channels a pixel; the next part is fetched meanwhile, with one
// of two BUFFERS while the block multiplies, with a single one while it takes maxima. Four
// positions of the kernel are one step of a matrix product: a thread's share of the left matrix is then one
// pixel for each of two outputs, and of the right one its four weights for a channel. `prepare` of the plan
// deals channels so that a thread ends with VECTOR of them that follow each other. The weights lie in shared
// memory for all warps or, where they are HELD, in the registers of warps that each have a group of channels.

#ifdef __CUDACC_RTC__  // Without it whoever compiles this brings what moves and multiplies.
template <int bytes>
__device__ inline void fetch_async(unsigned to, const void* from, bool inside) {
    if (bytes == 16)  // past the first cache: what comes in sixteens is read once
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(inside ? 8 : 0));
}
__device__ inline void end_of_fetches() { asm volatile("cp.async.commit_group;"); }
template <int pending>
__device__ inline void wait_for_fetches() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
__device__ inline void multiply(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline unsigned narrowed(float first, float second) {  // two elements, the first one lowest
    unsigned both;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
__device__ inline void take_larger(unsigned& most, unsigned other) {  // of two elements each; a NaN wins
    asm("max.NaN." TYPE "x2 %0, %0, %1;" : "+r"(most) : "r"(other));
}
#endif

__device__ inline void store(Element* to, const float (&from)[2]) {
    *(unsigned*)to = narrowed(from[0], from[1]);
}
__device__ inline void store(Element* to, const float (&from)[4]) {
    *(uint2*)to = make_uint2(narrowed(from[0], from[1]), narrowed(from[2], from[3]));
}
__device__ inline void store(Element* to, const float (&from)[8]) {
    *(uint4*)to = make_uint4(narrowed(from[0], from[1]), narrowed(from[2], from[3]), narrowed(from[4], from[5]),
                             narrowed(from[6], from[7]));
}

// The convolution's outputs that a block needs, and the image's rows and columns for those.
#define CONV_P ((TILE_P - 1) * POOL_STRIDE_H + POOL_KERNEL_H)
#define CONV_Q ((TILE_Q - 1) * POOL_STRIDE_W + POOL_KERNEL_W)
#define ROWS ((CONV_P - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1)
#define COLUMNS ((CONV_Q - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1)
#define PIXELS (ROWS * COLUMNS)
#define TAPS (KERNEL_H * KERNEL_W)
#define STEPS ((TAPS + 3) / 4)
#define GROUP (VECTOR / 2)
#define WARP_GROUPS (HELD ? 1 : BLOCK_K / (8 * GROUP))
#define ACROSS (BLOCK_K / (8 * GROUP) / WARP_GROUPS)  // warps that share their outputs and differ in channels
#define PAIR (GROUP > 1 ? 2 : 1)
#define TILES ((CONV_P * CONV_Q + 15) / 16)
#define THREADS (WARPS * ACROSS * 32)
#define TILES_P ((OUT_P + TILE_P - 1) / TILE_P)
#define TILES_Q ((OUT_Q + TILE_Q - 1) / TILE_Q)
#define WEIGHT_BYTES (HELD ? 0 : STEPS * BLOCK_K * 32)
#define IMAGE_BYTES ((PIXELS + 1) * 8)  // behind the pixels one of zeros
#define PITCH (BLOCK_K + 8)             // of the convolution's outputs that wait for their maximum

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) stem(PARAMETERS) {
    extern __shared__ __align__(16) unsigned char shared[];
    unsigned char* const images = shared + WEIGHT_BYTES;
    Element* const waiting = (Element*)(shared + WEIGHT_BYTES + (BUFFERS * IMAGE_BYTES + 15) / 16 * 16);
    const unsigned base = (unsigned)__cvta_generic_to_shared(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 / ACROSS, row = lane / 4, part = lane % 4;
    const int k0 = blockIdx.y * BLOCK_K + threadIdx.x / 32 % ACROSS * 8 * GROUP;  // the warp's first channel

    auto fetch = [&](int tile, int buffer) {
        const int h0 = (tile / TILES_Q % TILES_P * TILE_P * POOL_STRIDE_H - POOL_BEFORE_H) * STRIDE_H - BEFORE_H;
        const int w0 = (tile % TILES_Q * TILE_Q * POOL_STRIDE_W - POOL_BEFORE_W) * STRIDE_W - BEFORE_W;
        const Element* image = x + (long long)(tile / (TILES_P * TILES_Q)) * H * W * PIXEL;
        for (int pixel = threadIdx.x; pixel < PIXELS; pixel += THREADS) {
            const int h = h0 + pixel / COLUMNS, w = w0 + pixel % COLUMNS;
            const bool inside = h >= 0 && h < H && w >= 0 && w < W;
            const Element* from = image + (inside ? ((long long)h * W + w) * PIXEL : 0);
            const int at = buffer * IMAGE_BYTES + pixel * 8;
            if (PIXEL == 4) {
                fetch_async<8>(base + WEIGHT_BYTES + at, from, inside);
            } else {
                unsigned read[4] = {};
#pragma unroll
                for (int c = 0; c < C; ++c)
                    if (inside) read[c] = from[c].bits;
                *(uint2*)(images + at) = {read[0] | read[1] << 16, read[2] | read[3] << 16};
            }
        }
    };

    const unsigned char* const weights = (const unsigned char*)(w + (long long)k0 * STEPS * 16);
    for (int at = threadIdx.x * 16; at < WEIGHT_BYTES; at += THREADS * 16)
        fetch_async<16>(base + at, weights + at, true);
    uint2 held[HELD ? STEPS : 1][HELD ? GROUP : 1];
#if HELD
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int j = 0; j < GROUP; ++j)
            held[step][j] = ((const uint2*)weights)[((step * GROUP + j / PAIR * PAIR) * 32 + lane * PAIR) + j % PAIR];
#endif
    if (threadIdx.x < BUFFERS) *(uint2*)(images + threadIdx.x * IMAGE_BYTES + PIXELS * 8) = {};
    int tile = blockIdx.x, buffer = 0;
    fetch(tile, buffer);
    end_of_fetches();

    for (; tile < N * TILES_P * TILES_Q; tile += gridDim.x, buffer ^= BUFFERS - 1) {
        const int next = tile + gridDim.x;
        if (BUFFERS == 2) {
            if (next < N * TILES_P * TILES_Q) fetch(next, buffer ^ 1);
            end_of_fetches();
        }
        wait_for_fetches<BUFFERS - 1>();
        __syncthreads();
        const unsigned char* const image = images + buffer * IMAGE_BYTES;
        const int out_p = tile / TILES_Q % TILES_P * TILE_P, out_q = tile % TILES_Q * TILE_Q;
        const long long n = tile / (TILES_P * TILES_Q);

        for (int first = warp * TILES_M; first < TILES; first += WARPS * TILES_M) {
            int place[TILES_M][2];  // where the kernel begins for the thread's outputs
#pragma unroll
            for (int i = 0; i < TILES_M * 2; ++i) {
                const int m = (first + i / 2) * 16 + i % 2 * 8 + row, known = m < CONV_P * CONV_Q ? m : 0;
                place[i / 2][i % 2] = known / CONV_Q * STRIDE_H * COLUMNS + known % CONV_Q * STRIDE_W;
            }
            float sum[TILES_M][WARP_GROUPS][GROUP][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int tap = step * 4 + part;
                const int reach = tap / KERNEL_W * DILATION_H * COLUMNS + tap % KERNEL_W * DILATION_W;
                uint2 pixels[TILES_M][2];
#pragma unroll
                for (int i = 0; i < TILES_M * 2; ++i) {
                    const int at = tap < TAPS ? place[i / 2][i % 2] + reach : PIXELS;
                    pixels[i / 2][i % 2] = *(const uint2*)(image + at * 8);
                }
#pragma unroll
                for (int j = 0; j < WARP_GROUPS * GROUP; j += PAIR) {
                    uint2 dealt[PAIR];
                    const int block = (j / GROUP * STEPS + step) * (GROUP / PAIR) + j % GROUP / PAIR;
                    if (HELD) {
                        dealt[0] = held[HELD ? step : 0][HELD ? j : 0];
                        dealt[PAIR - 1] = held[HELD ? step : 0][HELD ? j + PAIR - 1 : 0];
                    } else if (PAIR == 2) {
                        const uint4 both = *(const uint4*)(shared + (block * 32 + lane) * 16);
                        dealt[0] = make_uint2(both.x, both.y);
                        dealt[PAIR - 1] = make_uint2(both.z, both.w);
                    } else {
                        dealt[0] = *(const uint2*)(shared + (block * 32 + lane) * 8);
                    }
#pragma unroll
                    for (int jj = 0; jj < PAIR; ++jj)
#pragma unroll
                        for (int i = 0; i < TILES_M; ++i)
                            multiply(sum[i][j / GROUP][j % GROUP + jj], pixels[i][0].x, pixels[i][1].x,
                                     pixels[i][0].y, pixels[i][1].y, dealt[jj].x, dealt[jj].y);
                }
            }
#pragma unroll
            for (int group = 0; group < WARP_GROUPS; ++group) {
                const int k = k0 + (group * 4 + part) * VECTOR;
                bool inside[TILES_M * 2];
                long long at[TILES_M * 2];
                float results[TILES_M * 2][VECTOR];
#pragma unroll
                for (int i = 0; i < TILES_M * 2; ++i) {
                    const int m = (first + i / 2) * 16 + i % 2 * 8 + row;
                    const int p = out_p * POOL_STRIDE_H - POOL_BEFORE_H + m / CONV_Q;
                    const int q = out_q * POOL_STRIDE_W - POOL_BEFORE_W + m % CONV_Q;
                    inside[i] = m < CONV_P * CONV_Q && p >= 0 && p < P && q >= 0 && q < Q;
                    at[i] = (inside[i] ? (n * P + p) * Q + q : 0) * K + k;
                }
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
#pragma unroll
                    for (int i = 0; i < TILES_M * 2; ++i) {
                        float value = sum[i / 2][group][e / 2][i % 2 * 2 + e % 2];
                        EPILOGUE(value, k + e, at[i] + e)
                        results[i][e] = inside[i] ? value : __uint_as_float(0xff800000);
                    }
#pragma unroll
                for (int i = 0; i < TILES_M * 2; ++i) {
                    const int m = (first + i / 2) * 16 + i % 2 * 8 + row;
                    if (POOL && m < CONV_P * CONV_Q)
                        store(waiting + m * PITCH + k - (int)blockIdx.y * BLOCK_K, results[i]);
                    else if (!POOL && inside[i])
                        store(y + at[i], results[i]);
                }
            }
        }
        __syncthreads();
        if (BUFFERS == 1) {
            if (next < N * TILES_P * TILES_Q) fetch(next, 0);
            end_of_fetches();
        }
#if POOL
        for (int item = threadIdx.x; item < TILE_P * TILE_Q * (BLOCK_K / 8); item += THREADS) {
            const int k = item % (BLOCK_K / 8) * 8, p = item / (BLOCK_K / 8) / TILE_Q;
            const int q = item / (BLOCK_K / 8) % TILE_Q;
            if (out_p + p >= OUT_P || out_q + q >= OUT_Q) continue;
            const Element* from = waiting + (p * POOL_STRIDE_H * CONV_Q + q * POOL_STRIDE_W) * PITCH + k;
            uint4 most = *(const uint4*)from;
#pragma unroll
            for (int other = 1; other < POOL_KERNEL_H * POOL_KERNEL_W; ++other) {
                const int at = other / POOL_KERNEL_W * CONV_Q + other % POOL_KERNEL_W;
                const uint4 read = *(const uint4*)(from + at * PITCH);
                take_larger(most.x, read.x);
                take_larger(most.y, read.y);
                take_larger(most.z, read.z);
                take_larger(most.w, read.w);
            }
            *(uint4*)(y + ((n * OUT_P + out_p + p) * OUT_Q + out_q + q) * K + blockIdx.y * BLOCK_K + k) = most;
        }
#endif
    }
}
