// Draws a token from a row of logits with randomness keyed by position, as `engine/sampling.py` says:
// the largest of logit + noise, where noise is -log(-log(u)), and u in (0, 1) is a hash of the key and
// the token. Few tokens can win, so few logarithms are needed: noise is at least g only if
// 1 - u <= -log(u) <= e^-g.
#pragma once
#include <functional>
#include <vector>
#include "vectors.h"

namespace {
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
template <class T> inline T mixed(T z) {  // splitmix64's finalizer, of an integer or a vector
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}
// How a row's token is drawn; greedily at temperature 0.
struct Sampler {
  uint64_t seed, key;  // the key is that of the row's position
  float temperature, top_p, min_p;
  int32_t top_k, stream;
  void at(int64_t position) {
    const uint64_t h = mixed((mixed(seed + GOLDEN) ^ position) + GOLDEN);
    key = mixed((h ^ stream) + GOLDEN);
  }
  bool truncates() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};
inline float noise(uint64_t key, int token) {
  const uint64_t bits = mixed(key + (token + 1) * GOLDEN) >> 12;
  return -std::log(-std::log((bits + .5) * 0x1p-52));
}
constexpr float MOST_NOISE = 37;  // -log(-log(1 - 2^-53)) is 36.7
// A row of logits, divided by the temperature.
struct Row {
  const float* logits;
  int count;
  float temperature;
  float operator[](int i) const { return logits[i] / temperature; }
  Vec from(int i) const {  // -infinity beyond the end
    if (i + W <= count) return load(logits + i) / set1(temperature);
    Vec v = set1(-INFINITY);
    for (int n = 0; i + n < count; n++) v[n] = (*this)[i + n];
    return v;
  }
};
// Returns the largest logit; NaN if any is.
inline float largest(const Row& row) {
  Vec top = set1(-INFINITY), sum = set1(0);
  for (int i = 0; i < row.count; i += W) {
    const Vec v = row.from(i);
    top = vmax(top, v), sum = v == v ? sum : v;
  }
  for (int n = 0; n < W; n++) if (sum[n] != sum[n]) return NAN;
  return hmax(top);
}
// Returns the least logit that top_k, top_p and min_p leave, in transformers' order. Of equal ones at
// the edge it leaves all.
inline float least_left(const Row& row, float top, const Sampler& s) {
  static thread_local std::vector<float> left;
  left.clear();
  for (int i = 0; i < row.count; i++) if (row[i] == row[i]) left.push_back(row[i]);
  float least = -INFINITY;
  auto drop = [&] { std::erase_if(left, [&](float x) { return !(x >= least); }); };
  if (s.top_k > 0 && s.top_k < (int)left.size()) {
    std::nth_element(left.begin(), left.begin() + s.top_k - 1, left.end(), std::greater<>());
    least = left[s.top_k - 1];
    drop();
  }
  if (s.top_p < 1) {
    double sum = 0, before = 0;
    for (float x : left) sum += std::exp(x - top);
    // Below, all tokens together have less than 1 - top_p.
    least = std::max(least, top + (float)std::log((1. - s.top_p) * sum / left.size()));
    least = std::min(least, top);
    drop();
    std::sort(left.begin(), left.end(), std::greater<>());
    for (float x : left) {
      if (before >= s.top_p * sum) break;
      least = x, before += std::exp(x - top);
    }
  }
  return s.min_p > 0 ? std::max(least, top + std::log(s.min_p)) : least;
}
// Returns the token drawn with a key among logits of at least `least`, `top` being the largest.
inline int drawn_token(const Row& row, uint64_t key, float top, float least) {
  typedef uint64_t Hashes __attribute__((vector_size(8 * W)));
  int best = 0;
  while (best < row.count - 1 && row[best] != top) best++;
  float most = top + noise(key, best);
  Hashes ids;
  for (int n = 0; n < W; n++) ids[n] = n + 1;
  for (int i = 0; i < row.count; i += W) {
    const Vec x = row.from(i);
    if (!any(x >= set1(std::max(least, most - MOST_NOISE)))) continue;
    const Hashes z = mixed(key + (ids + i) * GOLDEN);
    // 31 bits of 1 - u, rounded down; there is room for e^x to be rounded.
    const Vec rest = __builtin_convertvector(__builtin_convertvector(~z >> 33, Ints), Vec);
    const Ints may = (rest * set1(0x1p-31 * .999) <= vexp(x - set1(most))) & (x >= set1(least));
    for (int n = 0; any(may) && n < W; n++)
      if (may[n]) {
        const float sum = x[n] + noise(key, i + n);
        if (sum > most || (sum == most && i + n < best)) most = sum, best = i + n;
      }
  }
  return best;
}
// Draws a token and writes the probability of the likeliest one; -1 if the largest logit is NaN or
// infinite.
inline int drawn(const float* logits, int count, const Sampler& s, float* chance) {
  const Row row{logits, count, s.temperature};
  const float top = largest(row);
  if (!(std::abs(top) < INFINITY)) return -1;
  const float least = s.truncates() ? least_left(row, top, s) : -INFINITY;
  const int token = drawn_token(row, s.key, top, least);
  if (chance) {
    Vec sum = set1(0);
    for (int i = 0; i < count; i += W) {
      const Vec x = row.from(i);
      sum += x >= set1(least) ? vexp(x - set1(top)) : set1(0);
    }
    *chance = 1 / hsum(sum);
  }
  return token;
}
}  // namespace
