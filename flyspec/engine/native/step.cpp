// A step of a Llama-like decoder on a CPU, without dependencies; `library.py` loads it.
//
// Compiled once per instruction set, according to the compiler's predefined macros: AMX (with
// AVX512-BF16), AVX512-BF16, AVX512F, AVX2 with FMA. Weights and the cache are bf16, sums and the
// residual stream fp32; operands of products are rounded to bf16.
//
// Invariant: a row's bits depend only on its own sequence, not on other rows, their number, or the
// number of threads. So each sum adds its terms in one order, with one instruction, in kernels of
// every shape, and nothing here may be compiled with -ffast-math or floating-point contraction.
//
// Matrices [N, K] are packed in zero-padded panels of 64 outputs, [N/64][K/2][64][2]. Cached keys
// are such panels, of 64 positions; values are pairs of positions, [L/2][D][2].
#include <sys/syscall.h>
#include <unistd.h>
#include <bit>
#include <cfloat>
#include <cstring>
#include <memory>
#include "sampling.h"
#include "team.h"

namespace {
typedef uint16_t bf16;
constexpr int PANEL = 64, MAX_ROWS = 256, MAX_DIM = 512, MR = 6;  // MR: rows per kernel
constexpr int MAX_DEPTH = 256;      // of a tree
constexpr int K_BLOCK = 1024;       // of a panel at a time: it and the next stay in the CPU's cache
constexpr int UNIT_ROWS = 64;       // maximum rows in a unit that a helper may do
constexpr double SHARED_NS = 5000;  // minimum work in a job that is worth sharing
// --- products -----------------------------------------------------------------------------------
// `Act` is an operand rounded to bf16, stored as bf16, or as fp32 where no instruction multiplies
// bf16; the halves of a pair are then added one after the other.

#if defined(__AVX512BF16__)
typedef bf16 Act;
typedef __m512bh Weights;  // one pair each
constexpr int HALVES = 1;
inline void put(Act* p, Vec v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
inline bf16 stored(Act a) { return a; }
inline Weights half_of(Ints w, int) { return (Weights)w; }
inline Weights spread(const Act* a, int) { return (Weights)_mm512_set1_epi32(*(const Pair*)a); }
inline Vec add_product(Vec sum, Weights a, Weights b) { return _mm512_dpbf16_ps(sum, a, b); }
#else
typedef float Act;
typedef Vec Weights;
constexpr int HALVES = 2;
inline void put(Act* p, Vec v) {  // rounds to nearest even
  Ints u = (Ints)v, to = (u + 0x7fff + ((u >> 16) & 1)) & (int)0xffff0000;
  store(p, v == v ? (Vec)to : v);
}
inline bf16 stored(Act a) { return std::bit_cast<uint32_t>(a) >> 16; }
inline Weights half_of(Ints w, int h) { return (Weights)(h ? w & (int)0xffff0000 : w << 16); }
inline Weights spread(const Act* a, int h) { return set1(a[h]); }
inline Vec add_product(Vec sum, Weights a, Weights b) { return fma(a, b, sum); }
#endif
// c [rows, n] = (begin ? 0 : c) + a [rows, 2 count] times b [count][n][2]; n is a multiple of 16.
// Meanwhile the CPU's cache reads what is needed next, from `ahead` on, as much as b has.
struct Product {
  const Act* a; int lda; const bf16* b; int ldb, count; float* c; int ldc, n;
  const char* ahead = nullptr;
  int step = 0;  // bytes of it for each line of b, which is read once for each group of rows
};
template <int R, int N> inline void tile(Product& p, int at, bool begin) {
  auto place = [&](int r, int j) { return p.c + r * p.ldc + at + j * W; };
  Vec sum[R][N];
  UNROLLED (int i = 0; i < R * N; i++)
    sum[i / N][i % N] = begin ? set1(0) : load(place(i / N, i % N));
  const Act* a = p.a;
  const bf16* b = p.b + 2 * at;
  for (int k = 0; k < p.count; k++, a += 2, b += p.ldb) {
    if (R > 1)  // one row alone reads as fast as the memory is
      UNROLLED (int j = 0; j < N * W / 16; j++, p.ahead += p.step)
        _mm_prefetch(p.ahead, _MM_HINT_T1);
    UNROLLED (int h = 0; h < HALVES; h++) {
      Weights w[N];
      UNROLLED (int j = 0; j < N; j++) w[j] = half_of(((const LooseInts*)b)[j], h);
      UNROLLED (int r = 0; r < R; r++) {
        const Weights x = spread(a + r * p.lda, h);
        UNROLLED (int j = 0; j < N; j++) sum[r][j] = add_product(sum[r][j], x, w[j]);
      }
    }
  }
  UNROLLED (int i = 0; i < R * N; i++) store(place(i / N, i % N), sum[i / N][i % N]);
}
template <int R> void columns(Product& p, bool begin) {
  constexpr int WIDE = W == 16 ? 4 : R == 1 ? 8 : R == 2 ? 4 : 2;
  int at = 0;
  for (; at + WIDE * W <= p.n; at += WIDE * W) tile<R, WIDE>(p, at, begin);
  for (; at < p.n; at += 16) tile<R, 16 / W>(p, at, begin);
}
void multiply(int rows, Product p, bool begin) {
  static void (*const kernels[])(Product&, bool) = {
      columns<1>, columns<2>, columns<3>, columns<4>, columns<5>, columns<MR>};
  int groups = (rows + MR - 1) / MR;
  if (p.ahead) p.step = 64 / groups;
  else p.ahead = (const char*)p.b;
  for (; groups > 0; groups--) {
    int r = (rows + groups - 1) / groups;
    kernels[r - 1](p, begin);
    rows -= r, p.a += r * p.lda, p.c += r * p.ldc;
  }
}
// Sums [rows, 64] over a panel [K/2][64][2], or over a block of its K; `ahead` is the next block.
// Tiles multiply faster than memory can be read, and the processor reads ahead for them by itself.
#if defined(__AMX_BF16__)
#define LOAD(t, from) _tile_loadd(t, from, 4 * PANEL)
#define STORE(t, to) _tile_stored(t, to, 4 * PANEL)
#define DOT(t, b, from) LOAD(b, from); _tile_dpbf16ps(t, 4, b)
void begin_tiles() {
  struct { uint8_t palette = 1, start, no[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {};
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
}
void end_tiles() { _tile_release(); }
// ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
int prepare_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) != 0; }
// Also computes rows up to the next multiple of 16: a tile's rows are independent.
void panel_product(int rows, const Act* a, int lda, const bf16* w, int n, float* c, bool begin,
                   const char*) {
  for (int r = 0; r < rows; r += 16, a += 16 * lda, c += 16 * PANEL) {
    if (begin) { _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); }
    else { LOAD(0, c); LOAD(1, c + 16); LOAD(2, c + 32); LOAD(3, c + 48); }
    const bf16* b = w;
    for (int k = 0; k < n; k += 16, b += 32 * PANEL) {
      _tile_loadd(4, a + 2 * k, 2 * lda);
      DOT(0, 5, b); DOT(1, 6, b + 32); DOT(2, 5, b + 64); DOT(3, 6, b + 96);
    }
    STORE(0, c); STORE(1, c + 16); STORE(2, c + 32); STORE(3, c + 48);
  }
}
#else
#define begin_tiles()
#define end_tiles()
#define prepare_tiles() 0
void panel_product(int rows, const Act* a, int lda, const bf16* w, int n, float* c, bool begin,
                   const char* ahead) {
  multiply(rows, {a, lda, w, 2 * PANEL, n, c, PANEL, PANEL, ahead}, begin);
}
#endif

// --- the model ----------------------------------------------------------------------------------
struct Layer {  // gate_up: alternately 32 outputs of each. fp32 is padded; q/k_norm may be null
  const bf16 *qkv, *out, *gate_up, *down;
  const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias, *norm, *mlp_norm, *q_norm, *k_norm;
  int64_t window;  // positions that a row sees, including its own; 0: all up to it
};
struct Shape {
  int64_t hidden, heads, kv_heads, dim, intermediate, vocabulary, layers, slots, length, threads;
  double epsilon, scale;
  const Layer* layer;
  const bf16 *head, *embedding;  // embedding [vocabulary][hidden]; null: shared with the head
  const float *norm, *cosines, *sines;  // [length][dim / 2]
  bf16* cache;  // zeroed: [layers][slots][kv_heads] of keys and then values
  // Of an EAGLE-3 head, else null and 0. Its first layer reads [token's embedding, normalized by
  // `token_norm` ; feature]. Row i of `head` is token drafts[i].
  const float* token_norm;
  const int32_t* drafts;
  int64_t num_drafts, normed_residual, normed_features;  // features are those after the last norm
};
size_t padded(size_t n) { return (n + PANEL - 1) / PANEL * PANEL; }
// Input from Python: rows, which of them are wanted, where to write logits [wanted][vocabulary], or
// if null, tokens drawn from them and their probabilities; and hidden [layers][kept][hidden] of the
// rows that are kept.
// A head's rows have features [rows][hidden], and it writes those of its next rows to `own` [wanted].
struct Batch {
  int64_t rows, num_wanted, num_kept, num_hidden, stride;  // stride: of a hidden layer
  const int32_t *ids, *positions, *slots, *wanted, *kept, *hidden_layers;
  float *logits, *hidden, *chances;
  int32_t* tokens;
  const Sampler* samplers;  // [wanted]; null if all are greedy
  const float* features;
  float* own;
  // With trees, else null: where each row's key and value are stored, elsewhere its position; and
  // how many rows before a row of a tree the one is that it follows, 0 for the other rows. A row of
  // a tree sees what leads to it, with the bits that it has as part of a chain.
  const int32_t *places, *up;
};
struct Room {  // a thread's own working memory
  Block<float> sums;
  Block<Act> shares;
  Block<bf16> tail;  // values of the end of a path through a tree
  explicit Room(size_t length)
      : sums(MR * (length + PANEL)), shares(MR * (length + PANEL)), tail((MAX_DEPTH + 2) * MAX_DIM) {}
  void enter() { begin_tiles(); }
};
// Queries of a sequence's rows, per KV head; `depth`: of the only row, in a tree.
struct Item { int row, slot, start, first, count, depth; };
struct Model : Shape {
  const size_t C, A, F, Q, L, group;  // padded: hidden, heads * dim, intermediate, qkv, length
  const int V;                        // vocabulary
  const double bytes;                 // of all weights
  std::vector<Layer> stack;
  Block<float> x, qkv, embedded;
  Block<Act> normed, query, attended, gated;
  const std::unique_ptr<float[]> logits;  // of rows whose tokens are picked
  bool alone = true, not_finite = false;
  Batch b;  // the current one
  int num_items = 0;
  Block<Item> items;
  Block<int32_t> paths;  // [MAX_ROWS][MAX_DEPTH]: where what leads to a row of a tree is stored
  Block<Sampler> samplers;
  Team<Room> team;
  explicit Model(const Shape& s)
      : Shape(s), C(padded(hidden)), A(padded(heads * dim)), F(padded(intermediate)),
        Q(padded((heads + 2 * kv_heads) * dim)), L(padded(length)), group(heads / kv_heads),
        V(vocabulary), bytes(2. * layers * (C * (Q + A) + 3. * C * F) + 2. * C * vocabulary),
        stack(s.layer, s.layer + layers), x(MAX_ROWS * C), qkv(std::max(Q, C) * MAX_ROWS),
        embedded(token_norm ? MAX_ROWS * C : 0), normed(MAX_ROWS * C * (token_norm ? 2 : 1)), query(MAX_ROWS * heads * dim), attended(MAX_ROWS * A),
        gated(MAX_ROWS * F), logits(new float[MAX_ROWS * V + W]),
        items(MAX_ROWS * (group / MR + 1)), paths(MAX_ROWS * MAX_DEPTH), samplers(MAX_ROWS),
        team(threads - 1, MAX_ROWS * PANEL, UNIT_ROWS * PANEL, L) {
    if (drafts) std::fill_n(logits.get(), MAX_ROWS * V, -INFINITY);
  }
  bf16* keys(int l, int slot, int kv) const {
    return cache + ((l * slots + slot) * kv_heads + kv) * 2 * L * dim;
  }
  bf16* values(int l, int slot, int kv) const { return keys(l, slot, kv) + L * dim; }
  float* row_of(int i) const { return x.p + i * C; }
  int depth(int row) const {  // in a tree, else 0; reads only rows up to this one
    int count = 0;
    for (; b.up && b.up[row] && count < MAX_DEPTH; row -= b.up[row]) count++;
    return count;
  }
  bool follows(int i) const {  // whether row i continues the sequence of row i - 1
    return i < b.rows && !(b.up && b.up[i]) && b.slots[i] == b.slots[i - 1] && b.positions[i] == b.positions[i - 1] + 1;
  }
  // Calls `take` with the vectors of the RMS-normalized row of `count` numbers, padded to n.
  template <class Take>
  void normalize(const float* row, const float* weight, int n, float count, Take take) const {
    Vec sum[2] = {set1(0), set1(0)}, v;
    for (int i = 0; i < n; i += W) v = load(row + i), sum[i / W % 2] = fma(v, v, sum[i / W % 2]);
    Vec by = set1(1 / std::sqrt(hsum(sum[0] + sum[1]) / count + (float)epsilon));
    for (int i = 0; i < n; i += W) take(i, load(row + i) * by * load(weight + i));
  }
  // Normalizes `count` rows of x, those listed in `at` if it is given.
  void normalize_all(const float* weight, int count, const int32_t* at = nullptr) {
    for (int r = 0; r < count; r++) {
      Act* to = normed.p + r * C;
      normalize(row_of(at ? at[r] : r), weight, C, hidden, [&](int i, Vec v) { put(to + i, v); });
    }
  }
  // Normalizes what a head's first layer reads: of each row the token's embedding and the feature.
  void normalize_both(const float* weight, int count) {
    for (int r = 0; r < count; r++) {
      Act* to = normed.p + r * 2 * C;
      float* own = row_of(r);
      normalize(embedded.p + r * C, token_norm, C, hidden, [&](int i, Vec v) { put(to + i, v); });
      normalize(own, weight, C, hidden, [&](int i, Vec v) {
        put(to + C + i, v);
        if (normed_residual) store(qkv.p + i, v);
      });
      if (normed_residual) memcpy(own, qkv.p, 4 * C);
    }
  }
  // Multiplies `count` rows [count][K], and calls done(row, panel, its 64 sums).
  template <class Done>
  void linear(const Act* a, int K, int count, const bf16* b, int panels, Done done) {
    const int piece = alone ? MAX_ROWS : UNIT_ROWS, pieces = (count + piece - 1) / piece;
    const int blocks = (K + K_BLOCK - 1) / K_BLOCK, block = (K / blocks + 31) / 32 * 32;
    const int in_turn = alone ? 1 : threads;
    auto work = [=](Room&, int unit, float* to) {
      int panel = unit / pieces, first = unit % pieces * piece, n = std::min(piece, count - first);
      for (int k = 0; k < K; k += block) {
        const size_t at = (size_t)panel * K + k;
        const size_t ahead = k + block < K ? at + block : (size_t)(panel + in_turn) * K;
        panel_product(n, a + (size_t)first * K + k, K, b + at * PANEL,
                      std::min(block, K - k) / 2, to, k == 0, (const char*)(b + ahead * PANEL));
      }
    };
    team.share(alone, panels * pieces, work, [&](int unit, const float* sums) {
      const int first = unit % pieces * piece, n = std::min(piece, count - first);
      for (int r = 0; r < n; r++) done(first + r, unit / pieces, sums + r * PANEL);
    });
  }
  // Returns a `done` that stores a row's sums plus bias in `to` [rows][n], or adds them to it.
  static auto into(float* to, size_t n, const float* bias, bool add) {
    return [=](int row, int panel, const float* sums) {
      for (int i = 0, at = panel * PANEL; i < PANEL; i += W, at += W) {
        Vec v = load(sums + i) + load(bias + at);
        store(to + row * n + at, add ? load(to + row * n + at) + v : v);
      }
    };
  }
  // Normalizes and rotates a row's queries and key for a KV head, and caches key and value.
  void prepare(int l, int row, int kv) {
    const int D = dim, half = D / 2, p = b.positions[row];
    const float *c = cosines + (size_t)p * half, *s = sines + (size_t)p * half;
    const float* from = qkv.p + row * Q;
    float t[MAX_DIM];
    Act own[MAX_DIM], *q = query.p + (kv * MAX_ROWS + row) * group * D;
    auto turn = [&](int head, const float* norm, Act* to) {
      memcpy(t, from + head * D, 4 * D);
      if (norm) normalize(t, norm, D, D, [&](int i, Vec v) { store(t + i, v); });
      for (int i = 0; i < half; i++) {
        float u = t[i], v = t[i + half];
        t[i] = u * c[i] - v * s[i];
        t[i + half] = v * c[i] + u * s[i];
      }
      for (int i = 0; i < D; i += W) put(to + i, load(t + i));
    };
    for (size_t g = 0; g < group; g++, q += D) turn(kv * group + g, stack[l].q_norm, q);
    turn(heads + kv, stack[l].k_norm, own);
    const int at = b.places ? b.places[row] : p;
    bf16* key = keys(l, b.slots[row], kv) + (size_t)(at / PANEL) * PANEL * D + at % PANEL * 2;
    for (int i = 0; i < D; i++) key[i / 2 * 2 * PANEL + i % 2] = stored(own[i]);
    for (int i = 0; i < D; i += W) put(own + i, load(from + (heads + kv_heads + kv) * D + i));
    bf16* value = values(l, b.slots[row], kv) + (size_t)(at / 2) * 2 * D;
    for (int i = 0; i < D; i++) value[2 * i + at % 2] = stored(own[i]);
    // Leave nothing stale, perhaps NaN, beside the last one.
    for (int i = 0; at % 2 == 0 && !follows(row + 1) && i < D; i++) value[2 * i + 1] = 0;
  }
  // Attention of up to MR queries of a segment and KV head, over all keys that any of them sees.
  void attend(Room& w, int l, const Item& item, int kv, float* to) const {
    const int D = dim, n = item.count, window = stack[l].window;
    // After its job is over, an item may be half overwritten by the next one.
    auto position = [&](int i) {
      return std::min<int>(length - 1, item.start + (item.first + i) / (int)group);
    };
    // A row of a tree reads `depth` keys of the tree, which are not stored at its own positions.
    const int depth = std::clamp(item.depth, 0, std::min(MAX_DEPTH, position(0)));
    const int before = position(0) + 1 - depth;  // of such a row: positions before the tree
    const int32_t* path = paths.p + (size_t)item.row * MAX_DEPTH;
    const int seen = window ? std::max(0, position(0) - window + 1) : 0;
    const int first = (depth ? std::min(seen, before) : seen) / PANEL * PANEL;
    const int count = std::max(1, position(n - 1) + 1 - first);
    const int held = depth ? std::max(count, path[depth - 1] + 1 - first) : count;
    const int ld = padded(std::min<int>(held, L - first));
    const Act* q = query.p + ((kv * MAX_ROWS + item.row) * group + item.first) * D;
    const bf16* k = keys(l, item.slot, kv) + (size_t)first * D;
    for (int b = 0; b < ld; b += PANEL, k += PANEL * D)
      multiply(n, {q, D, k, 2 * PANEL, D / 2, w.sums.p + b, ld, PANEL}, true);
    for (int i = 0; i < n && depth; i++)  // put the scores in the path's order
      for (int j = 0; j < depth; j++)
        w.sums.p[(size_t)i * ld + before - first + j] =
            w.sums.p[(size_t)i * ld + std::clamp(path[j] - first, 0, ld - 1)];
    float by[MR];
    for (int i = 0; i < n; i++) {
      const int high = position(i) + 1 - first, low = window ? std::max(0, high - window) : 0;
      const float* s = w.sums.p + (size_t)i * ld;
      Vec top = set1(-INFINITY), sum = set1(0);
      for (int j = 0; j < count; j += W) top = vmax(top, inside(j, low, high) ? load(s + j) : top);
      top = set1(hmax(top));
      for (int j = 0; j < count; j += W) {
        Vec e = vexp((load(s + j) - top) * set1(scale));
        sum += e = inside(j, low, high) ? e : set1(0);
        put(w.shares.p + (size_t)i * ld + j, e);
      }
      by[i] = 1 / hsum(sum);
    }
    const bf16* v = values(l, item.slot, kv) + (size_t)first * D;
    const int pairs = depth ? (before - first) / 2 : (count + 1) / 2;
    multiply(n, {w.shares.p, ld, v, 2 * D, pairs, to, D, D}, true);
    if (depth) {  // the rest, in the path's order, too
      const int begin = 2 * pairs, rest = (count - begin + 1) / 2;
      for (int i = 0, at = first + begin; i < 2 * rest; i++, at++) {
        const int from = at < before ? at : std::clamp<int>(path[at - before], 0, length - 1);
        const bf16* value = values(l, item.slot, kv) + (size_t)(from / 2) * 2 * D + from % 2;
        bf16* tail = w.tail.p + (size_t)(i / 2) * 2 * D + i % 2;
        for (int d = 0; d < 2 * D; d += 2) tail[d] = begin + i < count ? value[d] : 0;
      }
      multiply(n, {w.shares.p + begin, ld, w.tail.p, 2 * D, rest, to, D, D}, false);
    }
    for (int i = 0; i < n * D; i += W) store(to + i, load(to + i) * set1(by[i / D]));
  }
  void take_attended(const Item& item, int kv, const float* from) {
    const int D = dim;
    for (int i = 0, at; i < item.count; i++, from += D) {
      at = item.first + i;
      Act* to = attended.p + (item.row + at / group) * A + (kv * group + at % group) * D;
      for (int d = 0; d < D; d += W) put(to + d, load(from + d));
    }
  }
  void keep_hidden(int l) {
    for (int h = 0; h < b.num_hidden; h++)
      for (int i = 0; b.hidden_layers[h] == l && i < b.num_kept; i++) {
        const float *row = row_of(b.kept[i]), *from = l < layers ? row : qkv.p;
        auto take = [&](int j, Vec v) { store(qkv.p + j, v); };
        if (l == layers) normalize(row, norm, C, hidden, take);
        memcpy(b.hidden + h * b.stride + i * hidden, from, 4 * hidden);
      }
  }
  // Runs the whole step.
  void run() {
    const int n = b.rows, count = b.num_wanted, kvs = kv_heads, parts = num_items;
    // Helpers read what tokens are drawn from, even when that is over: they need it to stay.
    float* const to = b.tokens ? logits.get() : b.logits;
    const bool sampled = b.tokens && b.samplers;
    if (sampled) std::copy_n(b.samplers, count, samplers.p);
    begin_tiles();
    for (int l = 0; l < layers; l++) {
      const Layer& layer = stack[l];
      keep_hidden(l);
      const bool both = token_norm && !l;
      both ? normalize_both(layer.norm, n) : normalize_all(layer.norm, n);
      linear(normed.p, both ? 2 * C : C, n, layer.qkv, Q / PANEL, into(qkv.p, Q, layer.qkv_bias, false));
      for (int i = 0; i < n * kvs; i++) prepare(l, i / kvs, i % kvs);
      // One KV head after the other, so that its keys stay in the CPU's cache. Long items first.
      auto item = [=, this](int u) -> const Item& { return items.p[parts - 1 - u % parts]; };
      auto work = [=, this](Room& w, int u, float* to) { attend(w, l, Item(item(u)), u / parts, to); };
      team.share(alone, kvs * parts, work, [&](int u, const float* from) {
        take_attended(item(u), u / parts, from);
      });
      linear(attended.p, A, n, layer.out, C / PANEL, into(x.p, C, layer.out_bias, true));
      normalize_all(layer.mlp_norm, n);
      linear(normed.p, C, n, layer.gate_up, 2 * F / PANEL, [&](int r, int p, const float* s) {
        const float* bias = layer.gate_up_bias + p * PANEL;
        for (int i = 0, j = PANEL / 2; j < PANEL; i += W, j += W) {
          Vec gate = load(s + i) + load(bias + i), up = load(s + j) + load(bias + j);
          gate = gate / (set1(1) + vexp(set1(0) - gate));
          put(gated.p + r * F + p * PANEL / 2 + i, gate * up);
        }
      });
      linear(gated.p, F, n, layer.down, C / PANEL, into(x.p, C, layer.down_bias, true));
    }
    keep_hidden(layers);
    for (int i = 0; b.own && i < count; i++) {
      float *row = row_of(b.wanted[i]), *from = normed_features ? qkv.p : row;
      auto take = [&](int j, Vec v) { store(qkv.p + j, v); };
      if (normed_features) normalize(row, norm, C, hidden, take);
      memcpy(b.own + i * hidden, from, 4 * hidden);
    }
    normalize_all(norm, count, b.wanted);
    const int known = drafts ? num_drafts : V;
    if (drafts && b.logits == to && to) std::fill_n(to, (size_t)count * V, -INFINITY);
    linear(normed.p, C, count, head, padded(known) / PANEL, [&](int r, int p, const float* s) {
      const int some = std::min(PANEL, known - p * PANEL);
      float* own = to + (size_t)r * V;
      if (!drafts) memcpy(own + p * PANEL, s, 4 * some);
      for (int i = 0; drafts && i < some; i++) own[drafts[p * PANEL + i]] = s[i];
      Ints bad = {};  // NaN or +infinity
      for (int i = 0; i < PANEL; i += W) bad |= ~(Ints)(load(s + i) <= set1(FLT_MAX));
      for (int i = 0; i < W; i++) if (bad[i]) not_finite = true;
    });
    end_tiles();
    if (!b.tokens) return;
    if (b.logits) memcpy(b.logits, to, 4 * (size_t)count * V);
    auto work = [=, this](Room&, int i, float* o) {
      const float* row = to + (size_t)i * V;
      if (sampled && samplers.p[i].temperature > 0) o[0] = drawn(row, V, samplers.p[i], o + 1);
      else pick(row, o);
    };
    team.share(alone, count, work, [&](int i, const float* found) {
      b.tokens[i] = found[0], b.chances[i] = found[1];
      if (!(found[0] >= 0 && found[1] <= 1)) not_finite = true;  // or all logits are -infinity
    });
  }
  // Writes the first of a row's most likely tokens, and its probability.
  void pick(const float* row, float* to) const {
    Vec top = set1(-INFINITY), sum = set1(0);
    for (int j = 0; j < V; j += W) top = vmax(top, inside(j, 0, V) ? load(row + j) : top);
    const float best = hmax(top);
    for (int j = 0; j < V; j += W)
      sum += inside(j, 0, V) ? vexp(load(row + j) - set1(best)) : set1(0);
    to[0] = std::min<int>(std::find(row, row + V, best) - row, V - 1);  // exact below 2^24
    to[1] = 1 / hsum(sum);
  }
  // Runs the batch `b` of up to MAX_ROWS rows.
  void batch() {
    double seen = 0;
    num_items = 0;
    for (int first = 0, end; first < b.rows; first = end) {
      for (end = first; end == first || follows(end); end++) {
        const int64_t id = b.ids[end], in_panel = id / PANEL * PANEL * C + id % PANEL * 2;
        const bf16* from = embedding ? embedding + id * hidden : head + in_panel;
        for (int64_t i = 0; i < (int64_t)C; i++) {  // zero-pads the row
          uint32_t u = i < hidden ? from[embedding ? i : i / 2 * 2 * PANEL + i % 2] << 16 : 0;
          (token_norm ? embedded.p + end * C : row_of(end))[i] = std::bit_cast<float>(u);
        }
        if (!token_norm) continue;
        std::fill_n(row_of(end), C, 0.f);
        memcpy(row_of(end), b.features + end * hidden, 4 * hidden);
      }
      const int all = (end - first) * group, parts = (all + MR - 1) / MR;
      for (int i = 0, at = 0, to; i < parts; i++, at = to) {
        to = all * (i + 1) / parts;
        items.p[num_items++] = {first, b.slots[first], b.positions[first], at, to - at, depth(first)};
      }
      for (int i = depth(first), row = first; i > 0; row -= b.up[row])
        paths.p[(size_t)first * MAX_DEPTH + --i] = b.places[row];
      seen += b.positions[first];
    }
    // Assumes 24 bytes loaded, or 192 products computed, per nanosecond by one thread.
    double ns = std::max((bytes + 4. * layers * kv_heads * dim * seen) / 24, b.rows * bytes / 384);
    alone = threads == 1 || ns / (8 * layers + 2) < SHARED_NS;
    run();
  }
};
}  // namespace

extern "C" {
// Requests AMX state from the kernel; returns 0 if this library may run.
int flyspec_prepare() { return prepare_tiles(); }
void* flyspec_open(const Shape* shape) { return new Model(*shape); }
void flyspec_close(void* model) { delete (Model*)model; }
// Runs a batch of any size; `wanted` and `kept` must be ascending. Returns 1 if logits are not finite: one is
// NaN or +infinity, or, where tokens are picked, all of a row are -infinity.
int flyspec_forward(void* model, const Batch* all) {
  Model& m = *(Model*)model;
  std::vector<int32_t> here, kept;
  m.not_finite = false;
  for (int first = 0, done = 0, had = 0; first < all->rows;
       first += MAX_ROWS, done += here.size(), had += kept.size()) {
    Batch& b = m.b = *all;
    b.rows = std::min<int64_t>(MAX_ROWS, b.rows - first);
    b.ids += first, b.positions += first, b.slots += first;
    if (b.up) b.places += first, b.up += first;
    if (b.features) b.features += first * m.hidden;
    if (b.own) b.own += done * m.hidden;
    here.clear(), kept.clear();
    for (int i = done; i < all->num_wanted && all->wanted[i] < first + b.rows; i++)
      here.push_back(all->wanted[i] - first);
    for (int i = had; i < all->num_kept && all->kept[i] < first + b.rows; i++)
      kept.push_back(all->kept[i] - first);
    b.wanted = here.data(), b.num_wanted = here.size();
    b.kept = kept.data(), b.num_kept = kept.size();
    b.hidden += had * m.hidden;
    if (b.tokens) b.tokens += done, b.chances += done;
    if (b.samplers) b.samplers += done;
    if (b.logits) b.logits += done * m.vocabulary;
    m.batch();
  }
  return m.not_finite;
}
// Copies cached keys and values of a slot from each of `from` to each of `to` [count], in order.
void flyspec_copy(void* model, int slot, int count, const int32_t* from, const int32_t* to) {
  Model& m = *(Model*)model;
  const int D = m.dim;
  for (int l = 0; l < m.layers; l++)
    for (int kv = 0; kv < m.kv_heads; kv++)
      for (int i = 0; i < count; i++) {
        auto key = [&](int p) { return m.keys(l, slot, kv) + (size_t)(p / PANEL) * PANEL * D + p % PANEL * 2; };
        auto value = [&](int p) { return m.values(l, slot, kv) + (size_t)(p / 2) * 2 * D + p % 2; };
        bf16 *key_to = key(to[i]), *value_to = value(to[i]);
        const bf16 *key_from = key(from[i]), *value_from = value(from[i]);
        for (int d = 0; d < D; d++) {
          key_to[d / 2 * 2 * PANEL + d % 2] = key_from[d / 2 * 2 * PANEL + d % 2];
          value_to[2 * d] = value_from[2 * d];
        }
      }
}
// Draws a token from each row of logits [count][vocabulary] by its key; -1 as `drawn` says.
void flyspec_sample(const float* logits, int count, int vocabulary, const uint64_t* keys,
                    int64_t* tokens) {
  for (int i = 0; i < count; i++)
    tokens[i] = drawn(logits + (size_t)i * vocabulary, vocabulary, {0, keys[i], 1, 1, 0, 0}, nullptr);
}
// Draws tokens [count][width] of sequences, and their probabilities: first for the rows wanted, one
// of each sequence, then one per step; by `samplers` [count], greedily if null. A sequence ends at
// `most` tokens, at one of its stops (up to `ends` [count]), or when `left`, divided by the
// probabilities, exceeds 1; all end after a step with non-zero `*interrupt`. `found` [count]: number
// of tokens. `rows`, if not null, gets the logits that they were drawn by [count][width][vocabulary].
// A head's row stands `offset` before its token, for which it is keyed. Returns 1 as above.
int flyspec_draw(void* model, const Batch* begin, const int32_t* most, const int32_t* ends,
                 const int32_t* stops, double* left, const volatile int32_t* interrupt, int width,
                 int32_t* tokens, float* chances, float* rows, int32_t* found,
                 const Sampler* samplers, const int32_t* offsets) {
  const int count = begin->num_wanted, V = ((Model*)model)->vocabulary;
  std::vector<int32_t> ids(count), positions(count), slots(count), drawn(count), all, running;
  std::vector<float> sure(count), step(rows ? (size_t)count * V : 0);
  for (int i = 0; i < count; i++) all.push_back(i), running.push_back(i), found[i] = 0;
  std::vector<Sampler> how(samplers ? count : 0);
  const size_t H = begin->features ? ((Model*)model)->hidden : 0;
  std::vector<float> own(count * H), features(count * H);
  Batch b = *begin;
  if (H) b.own = own.data();
  b.logits = rows ? step.data() : nullptr, b.tokens = drawn.data(), b.chances = sure.data();
  if (samplers) b.samplers = how.data();
  auto next = [&](int k, int64_t position) {  // sets how row k's token, at a position, is drawn
    const int i = running[k];
    if (samplers) (how[k] = samplers[i]).at(position + (offsets ? offsets[i] : 0));
  };
  for (int k = 0; k < count; k++) next(k, begin->positions[begin->wanted[k]] + 1);
  while (b.rows && !flyspec_forward(model, &b)) {
    int going = 0;
    for (int k = 0; k < b.num_wanted; k++) {
      const int i = running[k], token = drawn[k], n = ++found[i], last = begin->wanted[i];
      tokens[i * width + n - 1] = token, chances[i * width + n - 1] = sure[k];
      if (rows)
        memcpy(rows + ((size_t)i * width + n - 1) * V, step.data() + (size_t)k * V, 4 * (size_t)V);
      const int32_t *stop = stops + (i ? ends[i - 1] : 0), *end = stops + ends[i];
      left[i] /= sure[k];
      const bool done = n >= most[i] || left[i] > 1 || std::find(stop, end, token) != end;
      ids[going] = token, positions[going] = begin->positions[last] + n;
      slots[going] = begin->slots[last], running[going] = i;
      std::copy_n(own.data() + k * H, H, features.data() + going * H);
      if (!done) next(going++, begin->positions[last] + n + 1);
    }
    if (!going || *interrupt) return 0;
    b.rows = b.num_wanted = going, b.wanted = all.data();
    b.ids = ids.data(), b.positions = positions.data(), b.slots = slots.data();
    if (H) b.features = features.data();
  }
  return 1;
}
}
