// The types of elements that kernels read and write, and their conversions to and from float.

struct Half {
    unsigned short bits;
};
struct Bfloat {
    unsigned short bits;
};

#ifdef __CUDACC_RTC__  // Without it whoever compiles this brings the conversions.
__device__ inline float widen(float value) { return value; }
__device__ inline float widen(Bfloat value) { return __uint_as_float((unsigned)value.bits << 16); }
__device__ inline float widen(Half value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}
__device__ inline void narrow(float value, float& result) { result = value; }
__device__ inline void narrow(float value, Bfloat& result) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
}
__device__ inline void narrow(float value, Half& result) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
}
#endif

