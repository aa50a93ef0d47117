// The products of a decode on AMX tiles: 64 keys of one head at a time are copied next to each other, as bf16, once for
// all rows of queries; then scores [16 keys x rows] and sums [rows x 16 columns] are tiles.
//
// Tiles have as many rows of queries as a block holds: R = 4, 8 or 16. A vector of scores holds R rows of 16 / R keys:
// vector j, lane g * R + r is the score of row r and key g * 4R + j of the tile.
#pragma once
#include "decode.h"
#include "tiles.h"

#if defined(__AMX_BF16__)
namespace heedful::HEEDFUL_ISA {

template <class T, int R>
struct DecodeTiles : Cached<T> {
  using Base = Cached<T>;
  using Base::a, Base::heads, Base::k_head, Base::k_row, Base::rows, Base::u, Base::v_head, Base::v_row;
  using K = Reader<Pairs, T>;
  using V = Columns<Pairs, T>;
  static constexpr int kGroups = 16 / R, kVectors = kTile / kGroups;  // of keys in a vector; of scores of a tile
  static constexpr int kSums = R * 16;                                // floats of a tile of sums
  static constexpr int kSteps = kTile / 32;                           // tiles of keys that a product of values runs over

  const int blocks, q_tiles, v_tiles;
  int32_t* q;        // [heads][blocks][q_tiles] tiles: a word of 16 rows each
  int32_t* k;        // [kTile / 16][q_tiles] tiles of 16 keys
  int32_t* v;        // [kSteps][v_tiles] tiles of 16 pairs of keys
  float* acc;        // [heads][blocks][v_tiles][R][16]
  vf *top, *sum;     // [heads][blocks], the same for all groups; spread over the groups
  RowBlock* see;     // [blocks]
  float* s;          // [kVectors] vectors
  int32_t* p;        // [kSteps] tiles of R rows
  TileRegisters registers{R};

  static int q_tiles_of(int size) { return (size + K::elements - 1) / K::elements * K::units; }
  static int v_tiles_of(int size) { return (size + 63) / 64 * 4; }
  static int blocks_of(int rows) { return (rows + R - 1) / R; }
  static int64_t scratch(const heedful_attention& a, int rows, int heads) {
    const int64_t n = int64_t(heads) * blocks_of(rows), q_tiles = q_tiles_of(a.head_size), v_tiles = v_tiles_of(a.head_size_v);
    return ((n + kTile / 16) * q_tiles + kSteps * v_tiles + kSteps) * kTileWords * 4 + n * (v_tiles * kSums * 4 + 2 * sizeof(vf)) +
           blocks_of(rows) * sizeof(RowBlock) + kVectors * sizeof(vf) + 1024;
  }
  DecodeTiles(const heedful_attention& a, const DecodeUnit& u, char* at)
      : Base(a, u), blocks(blocks_of(rows)), q_tiles(q_tiles_of(a.head_size)), v_tiles(v_tiles_of(a.head_size_v)) {
    q = take<int32_t>(at, int64_t(heads) * blocks * q_tiles * kTileWords);
    k = take<int32_t>(at, kTile / 16 * q_tiles * kTileWords);
    v = take<int32_t>(at, kSteps * v_tiles * kTileWords);
    acc = take<float>(at, int64_t(heads) * blocks * v_tiles * kSums);
    top = take<vf>(at, heads * blocks);
    sum = take<vf>(at, heads * blocks);
    see = take<RowBlock>(at, blocks);
    s = take<float>(at, kVectors * W);
    p = take<int32_t>(at, kSteps * kTileWords);
  }
  static auto lanes(int b) {
    return [b](int i) { return b * R + i % R; };
  }

  // -- queries: for each word of a row, that word of all rows of a block side by side
  void read_queries() {
    for (int h = 0; h < heads; h++)
      for (int b = 0; b < blocks; b++)
        for (int t = 0; t < q_tiles; t += K::units) read_block(h, b, t);
  }
  void read_block(int h, int b, int t) {
    vi square[K::units][16] = {};
    const int element = t / K::units * K::elements;
    for (int r = 0; r < R && b * R + r < rows; r++)
      K::template query<BF16>(Base::query_of(h, b * R + r, 2) + element * 2, a.head_size - element, &square[0][r], 16);
    for (int i = 0; i < K::units; i++) {
      transpose(square[i]);
      memcpy(q + ((int64_t(h) * blocks + b) * q_tiles + t + i) * kTileWords, square[i], sizeof square[i]);
    }
  }

  // -- a tile of one head, as tiles; lines of a later one are asked for meanwhile
  struct Lines {
    const char* const* at;
    int64_t head, row;
  };
  const char* key_row(const Tile& t, const Lines& l, int key, bool values) const {
    if (key >= t.keys) return zero_row;
    if (Base::direct) return l.at[key / 4] + l.head + key % 4 * l.row;
    return values ? Base::v_at(t.first + key) + l.head : Base::k_at(t.first + key) + l.head;
  }
  static INLINE void ask(const Lines& l, int key, int bytes) {
    const char* const at = l.at[key / 4] + l.head + key % 4 * l.row;
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
  }
  void copy_keys(const Tile& t, const Lines& l, const Lines& later) {
    for (int key = 0; key < up(t.keys, 32); key++) {
      const char* from = key_row(t, l, key, false);
      int32_t* to = k + key / 16 * q_tiles * kTileWords + key % 16 * 16;
      int left = a.head_size;
      for (; left > 0; left -= K::elements, from += K::elements * T::size, to += K::units * kTileWords) {
        vi w[K::units];
        left >= K::elements ? K::read(from, w) : K::read_part(from, left, w);
        for (int i = 0; i < K::units; i++) store(to + i * kTileWords, w[i]);
      }
      ask(later, key, a.head_size * T::size);
    }
  }
  void copy_values(const Tile& t, const Lines& l, const Lines& later, int begin) {
    for (int key = 0; key < up(t.keys, 32); key += 2) {
      const char* from[2] = {key < begin ? zero_row : key_row(t, l, key, true), key + 1 < begin ? zero_row : key_row(t, l, key + 1, true)};
      int32_t* to = v + key / 32 * v_tiles * kTileWords + key / 2 % 16 * 16;
      for (int left = a.head_size_v; left > 0; left -= 64, to += 4 * kTileWords) {
        vi w[4] = {};
        if (left >= 64) V::template read<4>(from, w);
        else V::template read_part<4>(from, left, w);
        for (int i = 0; i < 4; i++) store(to + i * kTileWords, w[i]);
        for (int i = 0; i < 2; i++) from[i] += 64 * T::size;
      }
      ask(later, key, a.head_size_v * T::size);
      ask(later, key + 1, a.head_size_v * T::size);
    }
  }

  // -- scores: registers 0 and 1 sum 16 keys each, 2 holds words of queries, 3 and 4 keys
  void score(const int32_t* query, int keys) const {
    for (int c = 0; c < up(keys, 32) / 16; c += 2) {
      const int32_t *x = k + c * q_tiles * kTileWords, *y = x + q_tiles * kTileWords;
      TILE_ZERO(0);
      TILE_ZERO(1);
      for (int t = 0; t < q_tiles * kTileWords; t += kTileWords) {
        TILE_LOAD(2, query + t);
        TILE_LOAD(3, x + t);
        TILE_DOT(0, 3, 2);
        TILE_LOAD(4, y + t);
        TILE_DOT(1, 4, 2);
      }
      TILE_STORE(0, scores_of(c));
      TILE_STORE(1, scores_of(c + 1));
    }
  }
  float* scores_of(int sixteen) const {
    const int key = sixteen * 16;
    return s + key % kVectors * 16 + key / kVectors * R;
  }

  // -- softmax
  template <bool Cap, bool Alibi>
  vf settle(const RowBlock& block, int first) {
    const bool edge = first < block.all_low || first + kTile > block.all_high;
    vf most = splat(-INFINITY);
    vi key = iota() / R * kVectors + first;
    for (int j = 0; j < kVectors; j++, key += 1) {
      vf x = logits<Cap, Alibi>(a, load<vf>(s + j * W), block, key);
      if (edge) x = (key >= block.low) & (key < block.high) ? x : splat(-INFINITY);
      store(s + j * W, x);
      most = vmax(most, x);
    }
    return over_groups(most, [](vf x, vf y) FLAT { return vmax(x, y); });
  }
  template <class F>
  static INLINE vf over_groups(vf x, F f) {
    if constexpr (R <= 8) x = f(x, (vf)_mm512_shuffle_f32x4(x, x, 0x4e));
    if constexpr (R <= 4) x = f(x, (vf)_mm512_shuffle_f32x4(x, x, 0xb1));
    return x;
  }
  // Weights as words of two neighbouring keys, turned so that a row's words lie side by side.
  void weights(vf reference, vf& total) {
    const vi pairs = (vi)_mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                                          3, 18, 2, 17, 1, 16, 0);
    for (int j = 0; j < kVectors; j += 32) {
      vi square[16] = {};
      for (int i = 0; i < 32 && i < kVectors; i += 2) {
        const vf x = Pairs::weights(load<vf>(s + (j + i) * W) - reference), y = Pairs::weights(load<vf>(s + (j + i + 1) * W) - reference);
        total = total + (x + y);
        square[i / 2] = (vi)_mm512_permutexvar_epi16((__m512i)pairs, (__m512i)_mm512_cvtne2ps_pbh(y, x));
      }
      transpose(square);
      put_weights(j / 32, square);
    }
  }
  void put_weights(int step, const vi* square) {
    if constexpr (R == 16) memcpy(p + step * kTileWords, square, 16 * 64);
    if constexpr (R == 8) memcpy(p, square, 8 * 64), memcpy(p + kTileWords, square + 8, 8 * 64);
    if constexpr (R == 4)
      for (int i = 0; i < 8; i++) {  // 16 keys of a row in each: two of them are a row of a tile
        const int g = i / 4 * 2;
        const __m512i next = (__m512i)square[(g + 1) * 4 + i % 4];
        store(p + i / 4 * kTileWords + i % 4 * 16, _mm512_inserti64x4((__m512i)square[g * 4 + i % 4], _mm512_castsi512_si256(next), 1));
      }
  }
  void rescale(float* sums, vf factor) const {
    for (int t = 0; t < v_tiles; t++)
      for (int r = 0; r < R; r++, sums += 16) store(sums, load<vf>(sums) * factor[r]);
  }

  // -- weights times values: registers 5 and 6 sum 16 columns each, 7 holds weights, 3 and 4 values
  void weigh(float* sums, int keys) const {
    for (int c = 0; c < v_tiles; c += 2, sums += 2 * kSums) {
      TILE_LOAD(5, sums);
      TILE_LOAD(6, sums + kSums);
      for (int step = 0; step < up(keys, 32) / 32; step++) {
        const int32_t* const x = v + (step * v_tiles + c) * kTileWords;
        TILE_LOAD(7, p + step * kTileWords);
        TILE_LOAD(3, x);
        TILE_DOT(5, 7, 3);
        TILE_LOAD(4, x + kTileWords);
        TILE_DOT(6, 7, 4);
      }
      TILE_STORE(5, sums);
      TILE_STORE(6, sums + kSums);
    }
  }

  void item(const Tile& t, int h, const Tile& later, int later_head) {
    int begin = kTile;
    for (int b = 0; b < blocks; b++)
      if (see[b].lowest - t.first < begin) begin = see[b].lowest - t.first;
    copy_keys(t, {t.k, h * k_head, k_row}, {later.k, later_head * k_head, k_row});
    copy_values(t, {t.v, h * v_head, v_row}, {later.v, later_head * v_head, v_row}, begin);
    for (int b = 0; b < blocks; b++) block_step(t, h, b);
  }
  void block_step(const Tile& t, int h, int b) {
    const int at = h * blocks + b;
    float* const sums = acc + int64_t(at) * v_tiles * kSums;
    if (a.alibi_slopes) Base::read_slopes(see[b], h, lanes(b));
    score(q + int64_t(at) * q_tiles * kTileWords, t.keys);
    const vf now = any_settle(see[b], t.first);
    if (any(now > top[at])) {
      const vf most = vmax(now, top[at]), factor = top[at] == splat(-INFINITY) ? vf{} : exp2v(top[at] - most);
      top[at] = most;
      sum[at] = sum[at] * factor;
      rescale(sums, factor);
    }
    weights(top[at] == splat(-INFINITY) ? vf{} : top[at], sum[at]);
    weigh(sums, t.keys);
  }
  vf any_settle(const RowBlock& block, int first) {
    if (a.soft_cap) return a.alibi_slopes ? settle<true, true>(block, first) : settle<true, false>(block, first);
    return a.alibi_slopes ? settle<false, true>(block, first) : settle<false, false>(block, first);
  }

  void run() {
    read_queries();
    for (int b = 0; b < blocks; b++) see[b] = Base::rules_of(lanes(b));
    memset(acc, 0, int64_t(heads) * blocks * v_tiles * kSums * 4);
    for (int i = 0; i < heads * blocks; i++) top[i] = splat(-INFINITY), sum[i] = vf{};
    Base::each_item([&](const Tile& t, int h, const Tile& later, int later_head) { item(t, h, later, later_head); });
    finish();
  }
  void finish() {
    alignas(64) float row[512 + 64];
    for (int h = 0; h < heads; h++)
      for (int r = 0; r < rows; r++) {
        const int at = h * blocks + r / R, lane = r % R;
        const float* const from = acc + int64_t(at) * v_tiles * kSums + lane * 16;
        for (int c = 0; c < v_tiles * 16; c += 4) store(row + (c & ~63) + V::column(c & 63), load<v4>(from + c / 16 * kSums + c % 16));
        const vf total = over_groups(sum[at], [](vf x, vf y) FLAT { return x + y; });
        Base::close(h, r, row, top[at][lane], total[lane]);
      }
  }
};

}  // namespace heedful::HEEDFUL_ISA
#endif
