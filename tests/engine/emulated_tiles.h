// AMX's tiles in C, for machines without AMX: put before step.cpp with -include. The sums run in the
// order of Intel's description of TDPBF16PS: even and odd terms apart, added to the tile at the end.
#pragma once
#include <immintrin.h>

#include <cstring>
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define __AMX_BF16__ 1
#define _tile_zero(t) std::memset(emulated[t], 0, 1024)
#define _tile_loadd(t, from, stride) emulated_load(t, (const char*)(from), stride)
#define _tile_stored(t, to, stride) emulated_store(t, (char*)(to), stride)
#define _tile_dpbf16ps(c, a, b) emulated_dot(emulated[c], emulated[a], emulated[b])
#define _tile_loadconfig(config) (void)(config)
#define _tile_release() (void)0

static thread_local float emulated[8][16][16];
static inline void emulated_load(int t, const char* from, long stride) {
  for (int i = 0; i < 16; i++) std::memcpy(emulated[t][i], from + i * stride, 64);
}
static inline void emulated_store(int t, char* to, long stride) {
  for (int i = 0; i < 16; i++) std::memcpy(to + i * stride, emulated[t][i], 64);
}
static inline void emulated_dot(float (*c)[16], float (*a)[16], float (*b)[16]) {
  auto wide = [](unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  for (int m = 0; m < 16; m++) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < 16; k++) {
      unsigned x, y[16];
      std::memcpy(&x, &a[m][k], 4);
      std::memcpy(y, b[k], 64);
      for (int n = 0; n < 16; n++) even[n] += wide(x << 16) * wide(y[n] << 16);
      for (int n = 0; n < 16; n++) odd[n] += wide(x & 0xffff0000) * wide(y[n] & 0xffff0000);
    }
    for (int n = 0; n < 16; n++) c[m][n] += even[n] + odd[n];
  }
}
