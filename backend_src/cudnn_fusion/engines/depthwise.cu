// A depthwise convolution and the operations behind it, channels-last. Sizes, strides and types are macros:
// `cudnn_fusion.engines.depthwise` sets them, and compiles this at a plan's sizes.
//
// A thread computes TILE_P x TILE_Q neighbouring outputs of VECTOR channels, and threads that follow each other
// take channels that follow each other, so that loads are wide and lie together. A row of the image is read
// once for all outputs of the tile that it reaches. Weights and sums are in float32.

#define ROWS ((TILE_P - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1)
#define COLUMNS ((TILE_Q - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1)
#define TILES_P ((P + TILE_P - 1) / TILE_P)
#define TILES_Q ((Q + TILE_Q - 1) / TILE_Q)
#define THREADS ((long long)N * O * TILES_P * TILES_Q * (C / VECTOR))

template <typename T>
struct alignas(VECTOR * sizeof(T)) Vector {
    T at[VECTOR];
};

extern "C" __global__ void __launch_bounds__(BLOCK) depthwise(PARAMETERS) {
    const long long thread = (long long)blockIdx.x * BLOCK + threadIdx.x;
    if (thread >= THREADS) return;
    const int c = (int)(thread % (C / VECTOR)) * VECTOR;
    long long tile = thread / (C / VECTOR);
    const int q0 = (int)(tile % TILES_Q) * TILE_Q;
    tile /= TILES_Q;
    const int p0 = (int)(tile % TILES_P) * TILE_P;
    tile /= TILES_P;
    const int o = (int)(tile % O);
    const long long n = tile / O;

    float sum[TILE_P][TILE_Q][VECTOR] = {};
#pragma unroll
    for (int slice = 0; slice < KERNEL_D; ++slice) {
        const int d = o * STRIDE_D - BEFORE_D + slice * DILATION_D;
        if (d < 0 || d >= D) continue;
        const Element* image = x + (n * D + d) * H * W * C + c;
        const float* weights = w + slice * KERNEL_H * KERNEL_W * C + c;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int h = p0 * STRIDE_H - BEFORE_H + row;
            if (h < 0 || h >= H) continue;
            float value[COLUMNS][VECTOR];
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column) {
                const int at = q0 * STRIDE_W - BEFORE_W + column;
                Vector<Element> read = {};
                if (at >= 0 && at < W)
                    read = *(const Vector<Element>*)(image + ((long long)h * W + at) * C);
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) value[column][v] = widen(read.at[v]);
            }
#pragma unroll
            for (int p = 0; p < TILE_P; ++p) {
                const int reach = row - p * STRIDE_H;
                if (reach < 0 || reach % DILATION_H || reach / DILATION_H >= KERNEL_H) continue;
#pragma unroll
                for (int s = 0; s < KERNEL_W; ++s) {
                    const float* place = weights + (reach / DILATION_H * KERNEL_W + s) * C;
                    const auto weight = *(const Vector<float>*)place;
#pragma unroll
                    for (int q = 0; q < TILE_Q; ++q)
#pragma unroll
                        for (int v = 0; v < VECTOR; ++v)
                            sum[p][q][v] += value[q * STRIDE_W + s * DILATION_W][v] * weight.at[v];
                }
            }
        }
    }
#pragma unroll
    for (int p = 0; p < TILE_P; ++p)
#pragma unroll
        for (int q = 0; q < TILE_Q; ++q) {
            if (p0 + p >= P || q0 + q >= Q) continue;
            const long long at = (((n * O + o) * P + p0 + p) * Q + q0 + q) * C + c;
            Vector<Element> result;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                float value = sum[p][q][v];
                EPILOGUE(value, c + v, at + v)
                narrow(value, result.at[v]);
            }
            *(Vector<Element>*)(y + at) = result;
        }
}
