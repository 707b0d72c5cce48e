// Vectors of floats of the instruction set that is compiled for, and e^x.
#pragma once
#include <immintrin.h>
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {
#define UNROLLED _Pragma("GCC unroll 24") for
#if defined(__AVX512F__)
#define OP(name) _mm512_##name
#else
#define OP(name) _mm256_##name
#endif
typedef decltype(OP(setzero_ps)()) Vec;
constexpr int W = sizeof(Vec) / 4;
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef int32_t Pair __attribute__((may_alias, aligned(2)));
typedef Ints LooseInts __attribute__((may_alias, aligned(4)));
inline Vec load(const float* p) { return OP(loadu_ps)(p); }
inline void store(float* p, Vec v) { OP(storeu_ps)(p, v); }
inline Vec set1(float x) { return OP(set1_ps)(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return OP(fmadd_ps)(a, b, c); }
inline Vec vmax(Vec a, Vec b) { return OP(max_ps)(a, b); }  // b if either is NaN
#if defined(__AVX512F__)
inline bool any(Ints mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask); }
#else
inline bool any(Ints mask) { return !_mm256_testz_si256((__m256i)mask, (__m256i)mask); }
#endif
inline Ints inside(int at, int low, int high) {  // lanes i with low <= at + i < high
  Ints i;
  for (int n = 0; n < W; n++) i[n] = n;
  return ((i + at) >= low) & ((i + at) < high);
}
inline float hsum(Vec v) {
  for (int n = W / 2, i; n; n /= 2) for (i = 0; i < n; i++) v[i] += v[i + n];
  return v[0];
}
inline float hmax(Vec v) { return *std::max_element((float*)&v, (float*)&v + W); }
// e^x as 2^n times a polynomial (Cephes' coefficients, |r| <= ln 2 / 2). e^0 is 1, NaN stays NaN.
inline Vec vexp(Vec x) {
  const Vec magic = set1(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
  x = OP(min_ps)(set1(88.f), vmax(set1(-87.f), x));
  Vec n = fma(x, set1(1.44269504f), magic) - magic;
  Vec r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x)), p = set1(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, .5f})
    p = fma(p, r, set1(c));
  p = fma(p, r * r, r + set1(1.f));
  return p * (Vec)((__builtin_convertvector(n, Ints) + 127) << 23);
}
}  // namespace
