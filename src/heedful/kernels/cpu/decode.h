// Attention of few query rows over a paged cache, keys and values read once, as they lie.
//
// For each tile of 64 keys and each KV head: scores of all rows (4 rows x 4 keys in registers), one softmax step per
// row, weighted sum of values (4 rows x 64 columns in registers). While one tile is computed, the lines of a later one
// are asked for, spread between the multiplications: a prefetch issued in a burst is dropped, one not issued at all
// leaves the cores waiting for memory most of the time.
#pragma once
#include "cached.h"

namespace heedful::HEEDFUL_ISA {

// ---- scores: s[quad][row][4 keys] of Quads x 4 keys; q[group of words][row]
template <class E, class T, int Rows, int Quads, bool Asks>
INLINE void score(const char* const* k, int64_t head, int64_t row, int size, const typename E::Word* q, float* s,
                  Ahead& ahead) {
  using R = Reader<E, T>;
  constexpr int bytes = R::elements * T::size;
  vf sum[Quads][Rows][4] = {};
  constexpr int lines = (4 * bytes + 63) / 64;
  const char* at[Quads];
#pragma GCC unroll 2
  for (int i = 0; i < Quads; i++) at[i] = k[i] + head;
  auto multiply = [&](auto read) FLAT {
    typename E::Word x[Quads][4][R::units];
#pragma GCC unroll 2
    for (int i = 0; i < Quads; i++)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) read(at[i] + j * row, x[i][j]);
#pragma GCC unroll 2
    for (int u = 0; u < R::units; u++)
#pragma GCC unroll 4
      for (int r = 0; r < Rows; r++) {
        const typename E::Word y = q[u * kRows + r];
#pragma GCC unroll 2
        for (int i = 0; i < Quads; i++)
#pragma GCC unroll 4
          for (int j = 0; j < 4; j++) sum[i][r][j] = E::dot(sum[i][r][j], x[i][j][u], y);
      }
    q += R::units * kRows;
  };
  int left = size;
  for (; left >= R::elements; left -= R::elements) {
    multiply([](const char* p, typename E::Word* w) FLAT { R::read(p, w); });
#pragma GCC unroll 2
    for (int i = 0; i < Quads; i++) at[i] += bytes;
    if constexpr (Asks) ahead.template ask<Quads * lines>();
  }
  if (left) multiply([&](const char* p, typename E::Word* w) FLAT { R::read_part(p, left, w); });
#pragma GCC unroll 2
  for (int i = 0; i < Quads; i++) store(s + i * W, reduce_rows<Rows>(sum[i]));
}

// ---- values: how `steps` neighbouring keys' columns become words
template <class E, class T>
struct Columns;

template <class T>
struct Columns<Fma, T> {
  static constexpr int step = 1, width = W;  // keys a step; columns a word
  template <int C>
  static INLINE void read(const char* const* x, vf* z) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) z[c] = T::read(x[0] + c * W * T::size);
  }
  template <int C>
  static INLINE void read_part(const char* const* x, int n, vf* z) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      int left = n - c * W;
      z[c] = left <= 0 ? vf{} : T::read_part(x[0] + c * W * T::size, left < W ? left : W);
    }
  }
  static INLINE int column(int i) { return i; }
};

#if defined(__AVX512BF16__)
template <>
struct Columns<Pairs, BF16> {
  static constexpr int step = 2, width = 16;
  static INLINE void mix(vi a, vi b, vi* z) {
    z[0] = (vi)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
    z[1] = (vi)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
  }
  template <int C>
  static INLINE void read(const char* const* x, vi* z) {
#pragma GCC unroll 2
    for (int c = 0; c < C; c += 2) mix(load<vi>(x[0] + c * 32), load<vi>(x[1] + c * 32), z + c);
  }
  template <int C>
  static INLINE void read_part(const char* const* x, int n, vi* z) {
#pragma GCC unroll 2
    for (int c = 0; c < C; c += 2) {
      int bytes = 2 * n - c * 32 < 0 ? 0 : 2 * n - c * 32;
      mix(load_part<vi>(x[0] + c * 32, bytes), load_part<vi>(x[1] + c * 32, bytes), z + c);
    }
  }
  static INLINE int column(int i) {  // of 64: the unpacking goes lane by lane, 32 columns at a time
    return (i & 32) | ((i & 12) << 1) | ((i >> 2) & 4) | (i & 3);
  }
};
template <class T>
struct Columns8 {
  static constexpr int step = 2, width = 16;
  static INLINE void mix(vi a, vi b, vi* z) {
    widen_pairs<T>(_mm512_unpacklo_epi8((__m512i)a, (__m512i)b), z);
    widen_pairs<T>(_mm512_unpackhi_epi8((__m512i)a, (__m512i)b), z + 2);
  }
  template <int C>
  static INLINE void read(const char* const* x, vi* z) {
    mix(load<vi>(x[0]), load<vi>(x[1]), z);
  }
  template <int C>
  static INLINE void read_part(const char* const* x, int n, vi* z) {
    mix(load_part<vi>(x[0], n), load_part<vi>(x[1], n), z);
  }
  static INLINE int column(int i) {  // of 64: the unpacking goes lane by lane
    return ((i & 12) << 2) | ((i >> 4) << 2) | (i & 3);
  }
};
template <>
struct Columns<Pairs, E4M3> : Columns8<E4M3> {};
template <>
struct Columns<Pairs, E5M2> : Columns8<E5M2> {};
#endif

// acc[row][column of the panel] += weight[row][key] * value[key][column], keys [begin, end) of the tile
template <class E, class T, int Rows, int C, bool Part, bool Asks>
INLINE void weigh(const Tile& t, int64_t head, int64_t row, int begin, const typename E::Weight* p, int columns,
                  int64_t offset, float* acc, int acc_row, Ahead& ahead) {
  using V = Columns<E, T>;
  vf sum[Rows][C];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[r][c] = load<vf>(acc + r * acc_row + c * W);
  auto add = [&](const char* const* x, const typename E::Weight* weights) FLAT {  // of the key(s), row after row
    typename E::Word z[C];
    if constexpr (Part) V::template read_part<C>(x, columns, z);
    else V::template read<C>(x, z);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r++) {
      const typename E::Word w = E::spread(weights + r * 4);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = E::dot(sum[r][c], w, z[c]);
    }
  };
  auto at = [&](int key) FLAT { return key < begin || key >= t.keys ? zero_row : t.v[key / 4] + head + (key % 4) * row + offset; };
  auto checked = [&](int key) FLAT {
    const char* x[2] = {at(key), at(key + 1)};
    add(x, p + key / 4 * W + key % 4);
  };
  int key = begin / V::step * V::step;
  for (; key < t.keys && (key % 4 || key < begin); key += V::step) checked(key);
  constexpr int lines = (4 * C * V::width * T::size + 63) / 64;  // of four keys
  for (int four = key / 4; four < t.keys / 4; four++, key += 4) {
    const char* base = t.v[four] + head + offset;
#pragma GCC unroll 4
    for (int j = 0; j < 4; j += V::step) {
      const char* x[2] = {base + j * row, base + (j + 1) * row};
      add(x, p + four * W + j);
      if constexpr (Asks) ahead.template ask<(lines * V::step + 3) / 4>();
    }
  }
  for (; key < t.keys; key += V::step) checked(key);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(acc + r * acc_row + c * W, sum[r][c]);
}

// ---- one unit of work
template <class E, class T>
struct Decode : Cached<T> {
  using Base = Cached<T>;
  using Base::a, Base::direct, Base::head_of, Base::heads, Base::k_head, Base::k_row, Base::kv_len, Base::rows, Base::u,
      Base::v_head, Base::v_row;
  using Word = typename E::Word;
  using Weight = typename E::Weight;
  using R = Reader<E, T>;
  using V = Columns<E, T>;

  const int blocks, q_words, acc_row;
  Word* q;                                     // [heads][blocks][q_words][kRows]
  float* acc;                                  // [heads][blocks][kRows][acc_row]
  vf *top, *sum;                               // [heads][blocks]
  RowBlock* see;                               // [blocks]
  float* s;                                    // [kTile / 4] softmax vectors
  Weight* p;
  char* copy;  // [2][kTile] rows of a head, where keys do not lie in fours

  static int words_of(int size) { return (size + R::elements - 1) / R::elements * R::units; }
  static int padded(int size) { return (size + 63) / 64 * 64; }
  static int blocks_of(int rows) { return (rows + kRows - 1) / kRows; }
  static int64_t scratch(const heedful_attention& a, int rows, int heads) {
    const int64_t blocks = blocks_of(rows), n = heads * blocks * kRows;
    return n * (words_of(a.head_size) * sizeof(Word) + padded(a.head_size_v) * 4) + heads * blocks * 2 * sizeof(vf) +
           blocks * sizeof(RowBlock) + 2 * kTile * kRows * 4 +
           kTile * (int64_t(a.head_size) + a.head_size_v) * T::size + 1024;
  }
  Decode(const heedful_attention& a, const DecodeUnit& u, char* at)
      : Base(a, u), blocks(blocks_of(rows)), q_words(words_of(a.head_size)), acc_row(padded(a.head_size_v)) {
    q = take<Word>(at, int64_t(heads) * blocks * kRows * q_words);
    acc = take<float>(at, int64_t(heads) * blocks * kRows * acc_row);
    top = take<vf>(at, heads * blocks);
    sum = take<vf>(at, heads * blocks);
    see = take<RowBlock>(at, blocks);
    s = take<float>(at, kTile * kRows);
    p = take<Weight>(at, kTile * kRows);
    copy = take<char>(at, kTile * (int64_t(a.head_size) + a.head_size_v) * T::size);
  }
  // -- queries into words: row = token * group + head of the group
  void read_queries() {
    if (a.dtype == HEEDFUL_F32) read_as<F32>();
    else if (a.dtype == HEEDFUL_BF16) read_as<BF16>();
    else read_as<F16>();
  }
  template <class Q>
  void read_as() {
    if (rows % kRows) memset((void*)q, 0, int64_t(heads) * blocks * kRows * q_words * sizeof(Word));
    for (int h = 0; h < heads; h++)
      for (int r = 0; r < rows; r++) {
        Word* to = q + (int64_t(h) * blocks + r / kRows) * kRows * q_words + r % kRows;
        const char* from = Base::query_of(h, r, Q::size);
        for (int i = 0; i < a.head_size; i += R::elements, to += R::units * kRows)
          R::template query<Q>(from + i * Q::size, a.head_size - i, to, kRows);
      }
  }
  static auto lanes(int b) {
    return [b](int i) { return b * kRows + i / 4; };
  }

  Tile copied(const Tile& from, int h) const {
    Tile t = from;
    const int64_t k_bytes = int64_t(a.head_size) * T::size, v_bytes = int64_t(a.head_size_v) * T::size;
    char *k = copy, *v = copy + kTile * k_bytes;
    memset(copy, 0, kTile * (k_bytes + v_bytes));
    for (int j = 0; j < t.keys; j++) {
      memcpy(k + j * k_bytes, Base::k_at(t.first + j) + h * k_head, k_bytes);
      memcpy(v + j * v_bytes, Base::v_at(t.first + j) + h * v_head, v_bytes);
    }
    for (int i = 0; i < kTile / 4; i++) {
      t.k[i] = k + 4 * i * k_bytes;
      t.v[i] = v + 4 * i * v_bytes;
    }
    return t;
  }

  // -- the steps of one item: a tile of one head, a block of rows at a time
  struct Lines {  // a tile's rows of one head, and those to ask for meanwhile
    const Tile& t;
    int64_t k_head, v_head, k_row, v_row;
    Ahead &later_k, &later_v;
  };
  template <int Rows, bool Asks>
  void score_rows(const Lines& l, const Word* q) const {
    constexpr int Quads = Rows * 8 <= kAccumulators ? 2 : 1;
    for (int i = 0; i < (l.t.keys + 3) / 4; i += Quads)
      score<E, T, Rows, Quads, Asks>(l.t.k + i, l.k_head, l.k_row, a.head_size, q, s + i * W, l.later_k);
  }
  template <int Rows, bool Asks>
  void weigh_rows(const Lines& l, int begin, float* acc) const {
    constexpr int C = kColumns;
    auto panel = [&](auto columns, auto part, int c) FLAT {
      weigh<E, T, Rows, columns.value, part.value, Asks>(l.t, l.v_head, l.v_row, begin, p, a.head_size_v - c,
                                                         int64_t(c) * T::size, acc + c, acc_row, l.later_v);
    };
    int c = 0;
    for (; c + C * V::width <= a.head_size_v; c += C * V::width) panel(Int<C>(), False(), c);
    if (const int left = a.head_size_v - c)
      T::size > 1 && left <= 2 * V::width ? panel(Int<2>(), True(), c) : panel(Int<C>(), True(), c);
  }
  template <class F>
  static INLINE void with_rows(int n, F f) {
    if constexpr (kRows == 4) {
      if (n >= 4) return f(Int<4>());
      if (n == 3) return f(Int<3>());
    }
    if constexpr (kRows >= 2)
      if (n >= 2) return f(Int<2>());
    f(Int<1>());
  }
  template <bool Asks>
  void block_step(const Lines& l, int h, int b) {
    const int n = rows - b * kRows, at = h * blocks + b;
    float* rows_acc = acc + int64_t(at) * kRows * acc_row;
    with_rows(n, [&](auto n) FLAT { score_rows<n.value, Asks>(l, q + int64_t(at) * kRows * q_words); });
    if (a.alibi_slopes) Base::read_slopes(see[b], h, lanes(b));
    bool moved;
    const vf factor = softmax_step<E>(a, see[b], l.t.first, l.t.keys, s, p, top[at], sum[at], moved);
    if (moved)
      for (int r = 0; r < kRows; r++)
        for (int c = 0; c < acc_row; c += W)
          store(rows_acc + r * acc_row + c, load<vf>(rows_acc + r * acc_row + c) * factor[4 * r]);
    const int begin = see[b].lowest - l.t.first > 0 ? see[b].lowest - l.t.first : 0;
    if (begin < l.t.keys) with_rows(n, [&](auto n) FLAT { weigh_rows<n.value, Asks>(l, begin, rows_acc); });
  }
  void item(const Tile& t, int h, const Tile& later, int later_head) {
    // keys are read in fours: past the last flat key there may be no memory, where a page would go on
    const bool as_they_lie = direct && (a.block_tables || t.keys % 4 == 0);
    const Tile own = as_they_lie ? Tile() : copied(t, h);
    Ahead later_k(later.k, later_head * k_head, k_row, a.head_size * T::size), later_v(later.v, later_head * v_head, v_row, a.head_size_v * T::size);
    const Lines l = as_they_lie ? Lines{t, h * k_head, h * v_head, k_row, v_row, later_k, later_v}
                                : Lines{own, 0, 0, int64_t(a.head_size) * T::size, int64_t(a.head_size_v) * T::size, later_k, later_v};
    block_step<true>(l, h, 0);  // the first block of rows asks for the later tile's lines
    for (int b = 1; b < blocks; b++) block_step<false>(l, h, b);
  }

  void run() {
    read_queries();
    for (int b = 0; b < blocks; b++) see[b] = Base::rules_of(lanes(b));
    memset(acc, 0, int64_t(heads) * blocks * kRows * acc_row * 4);
    for (int i = 0; i < heads * blocks; i++) top[i] = splat(-INFINITY), sum[i] = vf{};
    Base::each_item([&](const Tile& t, int h, const Tile& later, int later_head) { item(t, h, later, later_head); });
    finish();
  }

  void finish() {
    alignas(64) float row[512 + 64];
    for (int h = 0; h < heads; h++)
      for (int r = 0; r < rows; r++) {
        const int at = h * blocks + r / kRows, lane = r % kRows * 4;
        const float* from = acc + (int64_t(at) * kRows + r % kRows) * acc_row;
        for (int c = 0; c < acc_row; c += 4) store(row + (c & ~63) + V::column(c & 63), load<v4>(from + c));
        Base::close(h, r, row, top[at][lane], lane_sum(sum[at])[lane]);
      }
  }
};

}  // namespace heedful::HEEDFUL_ISA
