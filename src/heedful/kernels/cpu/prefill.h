// Attention of many query rows over a paged cache: keys and values are packed once for all rows of a unit, then
// everything is a register-blocked matrix product on packed words.
//
// A unit is a stretch of query tokens of one sequence for one KV head; row = token * group + head of the group. Keys
// are packed a panel at a time, so scratch memory does not grow with the context. For each tile of rows and each span
// of 128 keys: scores of 4 rows x 64 keys in registers, with the exponentials of the previous four rows woven in
// between the multiplications (they use other ports); then weights times values, 4 rows x 64 columns in registers.
//
// The running maximum of a row moves only when it grew by more than 2^8, and then by a whole power of two: sums are
// rescaled without rounding. What a row computes depends on its own position and on absolute key numbers, never on
// which tokens share its unit.
#pragma once
#include "decode.h"

namespace heedful::HEEDFUL_ISA {

constexpr int kBlock = 4;                         // rows of a register block
constexpr int kWide = W >= 16 ? 4 : 2;            // vectors of a register block
constexpr int kGroup = kWide * W;                 // keys of a score step, columns of a value step
constexpr int kSpan = 128;                        // keys between two value steps
constexpr int kPanel = 2048;                      // keys packed at a time
constexpr int kTileRows = 96;                     // rows that pass over a panel together
constexpr float kLag = 8.f;                       // by how much (base 2) a score may exceed the kept maximum

// ---- packing
template <class T>
INLINE void natural(const char* p, int n, vf* w) {
  w[0] = n >= W ? T::read(p) : n > 0 ? T::read_part(p, n) : vf{};
}
#if defined(__AVX512BF16__)
template <class T>
INLINE void natural(const char* p, int n, vi* w) {  // 32 elements as bf16, in order
  if constexpr (T::size == 2) {
    w[0] = n >= 32 ? load<vi>(p) : n > 0 ? load_part<vi>(p, 2 * n) : vi{};
  } else {
    vf half[2];
    natural<T>(p, n, half);
    natural<T>(p + W, n - W, half + 1);
    w[0] = (vi)_mm512_cvtne2ps_pbh(half[1], half[0]);
  }
}
#endif
#if defined(__AVX512F__)
// 16 x 16 words: row i of r becomes column i
INLINE void transpose(vi* r) {
  __m512i t[16], u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32((__m512i)r[2 * i], (__m512i)r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)r[2 * i], (__m512i)r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      u[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
      u[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m512i a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x44), b = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xee), d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xee);
    r[j] = (vi)_mm512_shuffle_i32x4(a, b, 0x88);
    r[4 + j] = (vi)_mm512_shuffle_i32x4(a, b, 0xdd);
    r[8 + j] = (vi)_mm512_shuffle_i32x4(c, d, 0x88);
    r[12 + j] = (vi)_mm512_shuffle_i32x4(c, d, 0xdd);
  }
}
#else
INLINE void transpose(vi* r) {
  int32_t flat[W][W];
  for (int i = 0; i < W; i++)
    for (int j = 0; j < W; j++) flat[j][i] = r[i][j];
  memcpy((void*)r, flat, sizeof flat);
}
#endif

// Words of `per_word` neighbouring keys' values, columns in order: W of them a vector.
INLINE void interleave(const vf* rows, vf* to) { to[0] = rows[0]; }
#if defined(__AVX512BF16__)
INLINE void interleave(const vi* rows, vi* to) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                       36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  to[0] = (vi)_mm512_permutex2var_epi16((__m512i)rows[0], low, (__m512i)rows[1]);
  to[1] = (vi)_mm512_permutex2var_epi16((__m512i)rows[0], _mm512_add_epi16(low, _mm512_set1_epi16(16)), (__m512i)rows[1]);
}
#endif

// Everything but packing: it sees packed words only, whatever the cache stores.
template <class E>
struct Products {
  using Word = typename E::Word;
  using Weight = typename E::Weight;
  static constexpr int kKeys = E::per_word;          // keys of a value word
  static constexpr int kElements = W * E::per_word;  // elements of a key vector

  struct Sight {  // of a block of rows: keys that any of them sees, keys that all of them see
    int low, high, all_low, all_high;
  };

  const heedful_attention& a;
  const PrefillUnit& u;
  const int group, kv_len, q_begin, q_len, rows, q_words, columns;
  int32_t* k;     // [kPanel / kGroup][q_words][kGroup] words
  int32_t* v;     // [columns / kGroup][kPanel / kKeys][kGroup] words
  float* acc;     // [row block][columns / kGroup][kBlock][kGroup]
  float* top;     // [rows]
  vf* sum;        // [rows]
  int32_t* q;     // [kTileRows][q_words] words
  Weight* p;      // [kTileRows][kSpan]
  float* s;       // [2][kBlock][kGroup]
  int *low, *high;  // [kTileRows] visible keys, counted from 0
  Sight* sight;     // [kTileRows / kBlock]

  static int up(int n, int to) { return (n + to - 1) / to * to; }
  static int words_of(int size) { return up(up(size, kElements) / E::per_word, kBlock * kWide); }
  static int64_t scratch(const heedful_attention& a) {
    const int64_t columns = up(a.head_size_v, kGroup), rows = unit_rows(a);
    return kPanel * (int64_t(words_of(a.head_size)) + columns / kKeys) * 4 + rows * (columns * 4 + sizeof(vf) + 4) +
           kTileRows * (words_of(a.head_size) * 4 + kSpan * 4 + 8 + sizeof(Sight)) + 2 * kBlock * kGroup * 4 + 1024;
  }

  Products(const heedful_attention& a, const PrefillUnit& u, char* at)
      : a(a), u(u), group(a.num_heads / a.num_kv_heads), kv_len(a.kv_lens[u.sequence]),
        q_begin(a.query_start[u.sequence]), q_len(a.query_start[u.sequence + 1] - q_begin),
        rows((u.token_end - u.token_begin) * group), q_words(words_of(a.head_size)), columns(up(a.head_size_v, kGroup)) {
    k = take<int32_t>(at, kPanel * int64_t(q_words));
    v = take<int32_t>(at, kPanel / kKeys * int64_t(columns));
    acc = take<float>(at, int64_t(up(rows, kBlock)) * columns);
    top = take<float>(at, up(rows, kBlock));
    sum = take<vf>(at, up(rows, kBlock));
    q = take<int32_t>(at, kTileRows * q_words);
    p = take<Weight>(at, kTileRows * kSpan);
    s = take<float>(at, 2 * kBlock * kGroup);
    low = take<int>(at, kTileRows);
    high = take<int>(at, kTileRows);
    sight = take<Sight>(at, kTileRows / kBlock);
  }
  int token(int r) const { return u.token_begin + r / group; }
  int head_of(int r) const { return u.head * group + r % group; }
  int tile_rows(int first) const { return rows - first < kTileRows ? rows - first : kTileRows; }
  int last_of(int first) const { return first + tile_rows(first) - 1; }
  int high_of(int r) const { return visible(a, kv_len, q_len, token(r)).high; }

  // -- query rows of a tile, in order, and what they see
  template <class Q>
  void read_as(int first, int n) {
    int at = token(first), head = first % group;
    for (int r = 0; r < n; r++) {
      const char* from = (const char*)a.query + ((q_begin + at) * a.q_token + (u.head * group + head) * a.q_head) * Q::size;
      const Visible see = visible(a, kv_len, q_len, at);
      low[r] = see.low;
      high[r] = see.high;
      if (++head == group) head = 0, at++;
      for (int e = 0; e < q_words * E::per_word; e += kElements) {
        Word w;
        natural<Q>(from + e * Q::size, a.head_size - e, &w);
        store(q + r * q_words + e / E::per_word, w);
      }
    }
  }
  void read_tile(int first, int n) {
    if constexpr (E::per_word == 2) read_as<BF16>(first, n);
    else if (a.dtype == HEEDFUL_F32) read_as<F32>(first, n);
    else if (a.dtype == HEEDFUL_BF16) read_as<BF16>(first, n);
    else read_as<F16>(first, n);
    for (int r = n; r < up(n, kBlock); r++) low[r] = high[r] = 0;  // rows that fill the last block see nothing
    for (int b = 0; b < n; b += kBlock) sight[b / kBlock] = sight_of(b);
  }
  Sight sight_of(int b) const {
    Sight see{INT32_MAX, 0, 0, INT32_MAX};
    for (int r = b; r < b + kBlock; r++) {
      if (low[r] > see.all_low) see.all_low = low[r];
      if (high[r] < see.all_high) see.all_high = high[r];
      if (low[r] == high[r]) continue;
      if (low[r] < see.low) see.low = low[r];
      if (high[r] > see.high) see.high = high[r];
    }
    return see;
  }

  // -- scores, with the previous block's exponentials woven in
  struct Pending {  // a block of rows whose scores wait for their exponentials
    const float* s;
    Weight* p;
    vf* sum;
    const float* top;
    int vectors;
  };
  struct Factors {  // raw score to base-2 logit: x * scale, or cap * tanh(x * scale)
    float scale, cap;
  };
  Factors factors() const {
    const float scale = a.scale * a.k_scale;
    if (a.alibi_slopes) return {1.f, 0.f};  // done before the maximum was taken
    if (a.soft_cap) return {scale / a.soft_cap, a.soft_cap * kLog2e};
    return {scale * kLog2e, 0.f};
  }
  template <bool Cap>
  static INLINE vf weight(vf raw, const Factors& f, vf reference) {
    if constexpr (!Cap) return E::weights((E::per_word == 2 ? raw * f.scale : rounded(raw * f.scale)) - reference);
    const vf x = tanhv<E::per_word == 2>(raw * f.scale) * f.cap;
    return E::weights((raw == splat(-INFINITY) ? raw : x) - reference);
  }
  static INLINE vf reference_of(float top) { return splat(top == -INFINITY ? 0.f : top); }
  template <bool Cap>
  void exponentials(const Pending& w, const Factors& f) const {
    for (int r = 0; r < kBlock; r++)
      for (int c = 0; c < w.vectors; c++) {
        const vf y = weight<Cap>(load<vf>(w.s + r * kGroup + c * W), f, reference_of(w.top[r]));
        w.sum[r] = w.sum[r] + y;
        E::put(w.p + r * kSpan + c * W, y);
      }
  }
  template <int C, bool Cap>
  INLINE void products(const int32_t* query, const int32_t* keys, const Pending& w, vf (&x)[kBlock][kWide]) const {
    vf sum[kBlock][C] = {};
    const Factors f = factors();
    const int64_t row = q_words;
    const int steps = q_words / (kBlock * kWide);  // whole: rows are padded to vectors
    const int vectors = w.vectors;
    for (int r = 0; r < kBlock; r++) {
      vf total = w.sum[r];
      const vf reference = reference_of(w.top[r]);
#pragma GCC unroll 4
      for (int c = 0; c < kWide; c++) {
        if (c < vectors) {
          const vf y = weight<Cap>(load<vf>(w.s + r * kGroup + c * W), f, reference);
          total = total + y;
          E::put(w.p + r * kSpan + c * W, y);
        }
        for (int d = 0; d < steps; d++, query++, keys += kGroup) {
          Word key[C];
#pragma GCC unroll 4
          for (int i = 0; i < C; i++) key[i] = load<Word>(keys + i * W);
#pragma GCC unroll 4
          for (int j = 0; j < kBlock; j++) {
            const Word y = E::spread((const Weight*)(query + j * row));
#pragma GCC unroll 4
            for (int i = 0; i < C; i++) sum[j][i] = E::dot(sum[j][i], y, key[i]);
          }
        }
      }
      w.sum[r] = total;
    }
#pragma GCC unroll 4
    for (int r = 0; r < kBlock; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) x[r][c] = sum[r][c];
  }

  struct Step {  // one block of rows against one group of keys
    int first_row, local, key, span;  // row of the unit, row of the tile, absolute key, key the span starts at
    Weight* p;
    float* s;
  };
  template <int C, bool Cap, bool Alibi>
  INLINE Pending step(const Step& t, const int32_t* keys, const Pending& previous) const {
    vf x[kBlock][kWide], most[kBlock];
    products<C, Cap && !Alibi>(q + t.local * q_words, keys, previous, x);
    const Sight& see = sight[t.local / kBlock];
    const bool edge = t.key < see.all_low || t.key + C * W > see.all_high;
    const float scale = Alibi ? 1.f : a.scale * a.k_scale * kLog2e;  // soft-capped scores are below this
    vi above{};
#pragma GCC unroll 4
    for (int r = 0; r < kBlock; r++) {
      most[r] = splat(-INFINITY);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const vi key = iota() + (t.key + c * W);
        if constexpr (Alibi) x[r][c] = biased<Cap>(x[r][c], t.first_row + r, key);
        if (edge) x[r][c] = (key >= low[t.local + r]) & (key < high[t.local + r]) ? x[r][c] : splat(-INFINITY);
        store(t.s + r * kGroup + c * W, x[r][c]);
        most[r] = vmax(most[r], x[r][c]);
      }
      above |= most[r] * scale > top[t.first_row + r] + kLag;
    }
    if (__builtin_expect(any(above), 0)) raise<Cap, Alibi>(t, most);
    return {t.s, t.p, sum + t.first_row, top + t.first_row, C};
  }
  template <bool Cap>
  INLINE vf biased(vf raw, int row, vi key) const {
    if (row >= rows) row = rows - 1;
    RowBlock one;
    one.position = vi{} + (kv_len - q_len + token(row));
    one.slope = splat(a.alibi_slopes[head_of(row)]);
    return logits<Cap, true>(a, raw, one, key);
  }
  template <bool Cap, bool Alibi>
  __attribute__((noinline)) void raise(const Step& t, const vf* most) const {
    const Factors f = factors();
    for (int r = 0; r < kBlock; r++) {
      float now = hmax(most[r]);
      if (now == -INFINITY) continue;
      if constexpr (!Alibi) now = Cap ? (tanhv<E::per_word == 2>(splat(now * f.scale)) * f.cap)[0] : now * f.scale;
      const float kept = top[t.first_row + r];
      if (kept == -INFINITY) top[t.first_row + r] = now;
      else if (now > kept + kLag) rescale(t, r, ceilf(now - kept));
    }
  }
  // A row's maximum is first set to what it is, later moved by a power of two that covers it: nothing is rounded.
  void rescale(const Step& t, int r, float by) const {
    const float factor = exp2f(-by);
    const int row = t.first_row + r;
    top[row] += by;
    sum[row] = sum[row] * factor;
    for (int c = 0; c < columns / kGroup; c++) {
      float* at = acc + ((int64_t(row / kBlock) * (columns / kGroup) + c) * kBlock + row % kBlock) * kGroup;
      for (int i = 0; i < kGroup; i += W) store(at + i, load<vf>(at + i) * factor);
    }
    Weight* weights = p + (t.local + r) * kSpan;  // of this span's earlier groups
    for (int i = 0; i < t.key - t.span; i += W) E::put(weights + i, E::get(weights + i) * factor);
  }

  // -- weights times values: keys [begin, end) of the span, one block of rows, one panel of columns
  static __attribute__((noinline)) void values(const Weight* p, const int32_t* v, int begin, int end, float* acc) {
    vf sum[kBlock][kWide];
#pragma GCC unroll 4
    for (int r = 0; r < kBlock; r++)
#pragma GCC unroll 4
      for (int c = 0; c < kWide; c++) sum[r][c] = load<vf>(acc + r * kGroup + c * W);
#pragma GCC unroll 2
    for (int i = begin / kKeys; i < (end + kKeys - 1) / kKeys; i++) {
      Word z[kWide];
#pragma GCC unroll 4
      for (int c = 0; c < kWide; c++) z[c] = load<Word>(v + i * kGroup + c * W);
#pragma GCC unroll 4
      for (int r = 0; r < kBlock; r++) {
        const Word w = E::spread(p + r * kSpan + i * kKeys);
#pragma GCC unroll 4
        for (int c = 0; c < kWide; c++) sum[r][c] = E::dot(sum[r][c], w, z[c]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kBlock; r++)
#pragma GCC unroll 4
      for (int c = 0; c < kWide; c++) store(acc + r * kGroup + c * W, sum[r][c]);
  }

  // -- one tile of rows over one span of keys
  struct Seen {
    int begin, end;  // of the span, what any of a block's rows sees
  };
  static Seen seen(const Sight& see, int span, int end) {
    const int lo = see.low > span ? see.low - span : 0, hi = (see.high < end ? see.high : end) - span;
    return {lo, hi > lo ? hi : lo};
  }
  template <bool Cap, bool Alibi>
  void span_scores(int first, int n, int span, int end, int panel) {
    for (int g = span; g < end; g += kGroup) {
      Pending waiting{s, p, sum, top, 0};
      int turn = 0;
      for (int b = 0; b < n; b += kBlock) {
        const Seen see = seen(sight[b / kBlock], span, end);
        if (span + see.end <= g || span + see.begin >= g + kGroup || see.begin == see.end) continue;
        const int vectors = span + see.end >= g + kGroup ? kWide : (span + see.end - g + W - 1) / W;
        const Step t{first + b, b, g, span, p + b * kSpan + (g - span), s + turn * kBlock * kGroup};
        const int32_t* keys = k + int64_t(g - panel) / kGroup * kGroup * q_words;
        const Pending next = any_step<Cap, Alibi>(vectors, t, keys, waiting);
        waiting = next;
        turn ^= 1;
      }
      exponentials<Cap && !Alibi>(waiting, factors());
    }
  }
  // Whole groups are the common case and stand in the loop itself; the others are called.
  template <bool Cap, bool Alibi>
  INLINE Pending any_step(int vectors, const Step& t, const int32_t* keys, const Pending& previous) const {
    if (__builtin_expect(vectors == kWide, 1)) return step<kWide, Cap, Alibi>(t, keys, previous);
    return short_step<Cap, Alibi>(vectors, t, keys, previous);
  }
  template <bool Cap, bool Alibi>
  __attribute__((noinline)) Pending short_step(int vectors, const Step& t, const int32_t* keys, const Pending& previous) const {
    if constexpr (kWide == 4) {
      if (vectors == 3) return step<3, Cap, Alibi>(t, keys, previous);
      if (vectors == 2) return step<2, Cap, Alibi>(t, keys, previous);
    }
    return step<1, Cap, Alibi>(t, keys, previous);
  }
  void clear(int first, int n) {
    memset(acc + int64_t(first) * columns, 0, int64_t(up(n, kBlock)) * columns * 4);
    for (int r = first; r < first + up(n, kBlock); r++) top[r] = -INFINITY, sum[r] = vf{};
  }
  void ask_for(int first) const {  // the rows of the next tile: each token's heads are a page away from the next's
    const int size = a.dtype == HEEDFUL_F32 ? 4 : 2;
    for (int t = token(first); t < u.token_end && (t - token(first)) * group < kTileRows; t++) {
      const char* at = (const char*)a.query + ((q_begin + t) * a.q_token + u.head * group * a.q_head) * size;
      for (int i = 0; i < group * a.q_head * size; i += 64) __builtin_prefetch(at + i, 0, 2);
    }
  }
  __attribute__((noinline)) void tile_over_panel(int first, int n, int panel, int panel_end) {
    read_tile(first, n);
    if (first + n < rows) ask_for(first + n);
    for (int span = panel; span < panel_end; span += kSpan) {
      const int end = span + kSpan < panel_end ? span + kSpan : panel_end;
      if (a.soft_cap) a.alibi_slopes ? span_scores<true, true>(first, n, span, end, panel) : span_scores<true, false>(first, n, span, end, panel);
      else a.alibi_slopes ? span_scores<false, true>(first, n, span, end, panel) : span_scores<false, false>(first, n, span, end, panel);
      span_values(first, n, span, end, panel);
    }
  }
  // What the loops need is copied out of the object: after each block's stores a load from it would wait for them.
  void span_values(int first, int n, int span, int end, int panel) const {
    const int panels = columns / kGroup;
    const Weight* const weights = p;
    const Sight* const sights = sight;
    float* const sums = acc + int64_t(first) * columns;
    for (int c = 0; c < panels; c++) {
      const int32_t* const packed = v + (int64_t(c) * kPanel + span - panel) / kKeys * kGroup;
      float* to = sums + c * kBlock * kGroup;
      for (int b = 0; b < n; b += kBlock, to += panels * kBlock * kGroup) {
        const Seen see = seen(sights[b / kBlock], span, end);
        if (see.begin < see.end) values(weights + b * kSpan, packed, see.begin, see.end, to);
      }
    }
  }

  void finish(int first, int n) {
    alignas(64) float row[512 + 64];
    for (int r = first; r < first + n; r++) {
      const float* from = acc + int64_t(r / kBlock) * columns * kBlock + r % kBlock * kGroup;
      for (int c = 0; c < columns; c += kGroup, from += kBlock * kGroup)
#pragma GCC unroll 4
        for (int i = 0; i < kGroup; i += W) store(row + c + i, load<vf>(from + i));
      emit(a, q_begin + token(r), head_of(r), row, top[r], hsum(sum[r]));
    }
  }
};

template <class E, class T>
struct Prefill : Products<E> {
  using Base = Products<E>;
  using Base::a, Base::u, Base::k, Base::v, Base::q_words, Base::columns, Base::kv_len, Base::q_len, Base::rows, Base::up;
  using typename Base::Word;
  static constexpr int kKeys = Base::kKeys, kElements = Base::kElements;
  using Base::Base;

  // -- keys and values of a panel into words; keys past the end are zeros
  const char* row_of(const void* base, int64_t block, int64_t token, int64_t head, int key) const {
    if (key >= kv_len) return nullptr;
    if (!a.block_tables) return (const char*)base + ((a.key_start[u.sequence] + key) * token + u.head * head) * T::size;
    const int32_t* table = a.block_tables + u.sequence * a.table_stride;
    return (const char*)base + (table[key / a.block_size] * block + key % a.block_size * token + u.head * head) * T::size;
  }
  void pack_keys(int first, int keys) {
    for (int key = 0; key < keys; key += W) {
      const char* from[W];
      for (int i = 0; i < W; i++) from[i] = row_of(a.key, a.k_block, a.k_token, a.k_head, first + key + i);
      int32_t* to = k + key / kGroup * kGroup * q_words + key % kGroup;
      for (int e = 0; e < q_words * E::per_word; e += kElements) {
        vi square[W];
        for (int i = 0; i < W; i++) {
          Word w{};
          if (from[i]) natural<T>(from[i] + e * T::size, a.head_size - e, &w);
          square[i] = (vi)w;
        }
        transpose(square);
        for (int i = 0; i < W; i++) store(to + (e / E::per_word + i) * kGroup, square[i]);
      }
    }
  }
  void pack_values(int first, int keys) {
    for (int key = 0; key < keys; key += kKeys) {
      const char* from[kKeys];
      for (int i = 0; i < kKeys; i++) from[i] = row_of(a.value, a.v_block, a.v_token, a.v_head, first + key + i);
      for (int c = 0; c < columns; c += kElements) {
        Word x[kKeys], z[kKeys];
        for (int i = 0; i < kKeys; i++) {
          x[i] = Word{};
          if (from[i]) natural<T>(from[i] + c * T::size, a.head_size_v - c, x + i);
        }
        interleave(x, z);
        for (int i = 0; i < kKeys; i++) {
          const int at = c + i * W;
          store(v + (int64_t(at / kGroup) * (kPanel / kKeys) + key / kKeys) * kGroup + at % kGroup, z[i]);
        }
      }
    }
  }

  void run() {
    const int from = visible(a, kv_len, q_len, u.token_begin).low / kSpan * kSpan;
    const int to = visible(a, kv_len, q_len, u.token_end - 1).high;
    for (int panel = from; panel < to; panel += kPanel) {
      const int end = panel + kPanel < to ? panel + kPanel : to;
      pack_keys(panel, up(end - panel, kGroup));
      pack_values(panel, up(end - panel, kGroup));
      for (int first = 0; first < rows; first += kTileRows) over_panel(first, panel, end, panel == from);
    }
    for (int first = 0; first < rows; first += kTileRows)
      if (Base::high_of(Base::last_of(first)) <= from) Base::clear(first, Base::tile_rows(first)), Base::finish(first, Base::tile_rows(first));
  }
  // A tile is cleared when its first panel comes and written when its last one is done, while it is in the cache.
  void over_panel(int first, int panel, int end, bool first_panel) {
    const int n = Base::tile_rows(first), low = visible(a, kv_len, q_len, Base::token(first)).low;
    const int high = Base::high_of(Base::last_of(first));
    if (high <= panel || low >= end) return;
    if (first_panel || low >= panel) Base::clear(first, n);
    Base::tile_over_panel(first, n, panel, end);
    if (high <= end) Base::finish(first, n);
  }
};

}  // namespace heedful::HEEDFUL_ISA
