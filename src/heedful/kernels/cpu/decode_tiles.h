// The products of a decode on AMX tiles, with bf16 keys and values as they lie in the cache: a tile register takes 64
// bytes of 16 of their rows. What does not lie so (fp8, odd sizes, a sequence's last tile) is copied as such rows first.
//
// Scores [16 keys x R rows] are keys times queries. A value row is 32 columns, to the tile unit 16 pairs: weights (w, 0)
// sum the even columns and (0, w) the odd ones, so values need not be interleaved. A NaN or infinity among the values
// therefore reaches the other column of its pair too.
//
// Tiles have as many rows of queries as a block holds: R = 4, 8 or 16. Vector j, lane g * R + r of the scores is row r and
// key j * 16 / R + g.
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
  static constexpr int kKeys = 16, kSixteens = kTile / kKeys;  // of a tile register; of an item
  static constexpr int kVectors = kTile * R / W;               // of scores of an item
  static constexpr int kSums = R * W, kQuery = kKeys * R;      // words of a tile of sums, of queries
  static constexpr int kWeights = kSixteens * 2 * kSums;       // words of the weights of an item

  struct Rows {  // of K or V: where each sixteen begins, and bytes between neighbours
    const char* at[kSixteens];
    int64_t row;
  };

  const int blocks, q_tiles, v_tiles;  // tiles of 32 elements
  int32_t* q;        // [heads][blocks][q_tiles][16 pairs][R]
  char* copy;        // [kTile] rows of tiles: keys, later values, so that they stay in the nearest cache
  float* acc;        // [heads][blocks][v_tiles][even, odd][R][16]
  vf *top, *sum;     // [heads][blocks], the same for all groups of lanes; spread over them
  RowBlock* see;     // [blocks]
  float* s;          // [kVectors] vectors
  int32_t* p;        // [blocks][kSixteens][low, high][R][16 keys]
  TileRegisters registers{R};

  static int tiles_of(int size) { return (size + K::elements - 1) / K::elements * K::units; }
  static int blocks_of(int rows) { return (rows + R - 1) / R; }
  static int64_t scratch(const heedful_attention& a, int rows, int heads) {
    const int64_t n = int64_t(heads) * blocks_of(rows), q_tiles = tiles_of(a.head_size), v_tiles = tiles_of(a.head_size_v);
    return n * (q_tiles * kQuery * 4 + v_tiles * 2 * kSums * 4 + 2 * sizeof(vf)) + kTile * (q_tiles > v_tiles ? q_tiles : v_tiles) * 64 +
           blocks_of(rows) * (sizeof(RowBlock) + kWeights * 4) + kVectors * sizeof(vf) + 1024;
  }
  DecodeTiles(const heedful_attention& a, const DecodeUnit& u, char* at)
      : Base(a, u), blocks(blocks_of(rows)), q_tiles(tiles_of(a.head_size)), v_tiles(tiles_of(a.head_size_v)) {
    q = take<int32_t>(at, int64_t(heads) * blocks * q_tiles * kQuery);
    copy = take<char>(at, kTile * (q_tiles > v_tiles ? q_tiles : v_tiles) * 64);
    acc = take<float>(at, int64_t(heads) * blocks * v_tiles * 2 * kSums);
    top = take<vf>(at, heads * blocks);
    sum = take<vf>(at, heads * blocks);
    see = take<RowBlock>(at, blocks);
    s = take<float>(at, kVectors * W);
    p = take<int32_t>(at, blocks * kWeights);
  }
  static auto lanes(int b) {
    return [b](int i) { return b * R + i % R; };
  }

  // -- queries: for each pair of elements, that pair of all rows of a block side by side
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
    int32_t* to = q + ((int64_t(h) * blocks + b) * q_tiles + t) * kQuery;
    for (int i = 0; i < K::units; i++) {
      transpose(square[i]);
      for (int pair = 0; pair < 16; pair++, to += R) memcpy(to, &square[i][pair], R * 4);
    }
  }

  // -- a tile of one head as rows of tiles
  bool as_they_lie(const Tile& t, int lowest) const {
    return T::size == 2 && a.block_tables && a.block_size % kKeys == 0 && t.first % kKeys == 0 && t.keys == kTile &&
           lowest <= t.first && a.head_size % 32 == 0 && a.head_size_v % 32 == 0;
  }
  static Rows lying(const char* const* fours, int64_t head, int64_t row) {
    Rows found{{}, row};
    for (int g = 0; g < kSixteens; g++) found.at[g] = fours[g * 4] + head;
    return found;
  }
  static Rows in_order(const char* from, int64_t row) {
    Rows found{{}, row};
    for (int g = 0; g < kSixteens; g++) found.at[g] = from + g * kKeys * row;
    return found;
  }
  // Rows [begin, end) of the tile, zeros elsewhere; row_of(key) is a row of `size` elements.
  template <class F>
  static Rows copied(char* to, int tiles, int size, int begin, int end, F row_of) {
    const Rows found = in_order(to, tiles * 64);
    for (int key = 0; key < up(end, 32); key++) {
      const char* from = key < begin || key >= end ? zero_row : row_of(key);
      for (int left = size; left > 0; left -= K::elements, from += K::elements * T::size, to += K::units * 64) {
        vi w[K::units];
        left >= K::elements ? K::read(from, w) : K::read_part(from, left, w);
        for (int i = 0; i < K::units; i++) store(to + i * 64, w[i]);
      }
    }
    return found;
  }
  Rows keys_of(const Tile& t, int h, bool lie) const {
    if (lie) return lying(t.k, h * k_head, k_row);
    return copied(copy, q_tiles, a.head_size, 0, t.keys, [&](int key) FLAT {
      return h * k_head + (Base::direct ? t.k[key / 4] + key % 4 * k_row : Base::k_at(t.first + key));
    });
  }
  Rows values_of(const Tile& t, int h, bool lie, int begin) const {
    if (lie) return lying(t.v, h * v_head, v_row);
    return copied(copy, v_tiles, a.head_size_v, begin, t.keys, [&](int key) FLAT {
      return h * v_head + (Base::direct ? t.v[key / 4] + key % 4 * v_row : Base::v_at(t.first + key));
    });
  }
  // Lines of a later tile, in the order of their addresses, as many as are due after one of `tiles` products of a sixteen:
  // asked for out of order, they come a third slower. Not by Ahead: what that remembers would be written to memory at
  // every tile instruction, which took a fifth longer.
  struct Later {
    const char* const* fours;
    int64_t head, row;
    INLINE void ask(int g, int t, int tiles) const {
      for (int key = g * kKeys + kKeys * t / tiles; key < g * kKeys + kKeys * (t + 1) / tiles; key++)
        for (int at = 0; at < tiles * 32 * T::size; at += 64)
          __builtin_prefetch(fours[key / 4] + head + key % 4 * row + at, 0, 2);
    }
  };

  // -- scores: registers 0 and 1 sum 16 keys each, 2 holds queries, 3 and 4 keys
  template <bool Ahead>
  void score(const int32_t* query, int keys, const Rows& x, const Later& later) const {
    for (int g = 0; g < up(keys, 32) / kKeys; g += 2) {
      TILE_ZERO(0);
      TILE_ZERO(1);
      for (int t = 0; t < q_tiles; t++) {
        TILE_LOAD_ROWS(2, query + t * kQuery, R * 4);
        TILE_LOAD_ROWS(3, x.at[g] + t * 64, x.row);
        TILE_DOT(0, 3, 2);
        if (Ahead) later.ask(g, t, q_tiles);
        TILE_LOAD_ROWS(4, x.at[g + 1] + t * 64, x.row);
        TILE_DOT(1, 4, 2);
        if (Ahead) later.ask(g + 1, t, q_tiles);
      }
      TILE_STORE_ROWS(0, s + g * kQuery, R * 4);
      TILE_STORE_ROWS(1, s + (g + 1) * kQuery, R * 4);
    }
  }

  // -- softmax
  template <bool Cap, bool Alibi>
  vf settle(const RowBlock& block, int first) {
    const bool edge = first < block.all_low || first + kTile > block.all_high;
    vf most = splat(-INFINITY);
    vi key = iota() / R + first;
    for (int j = 0; j < kVectors; j++, key += W / R) {
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
  // R vectors of 16 / R keys x R rows to a vector of 16 keys a row: each pass trades a bit of the row's number in the
  // lane for one of the key's in the vector.
  static INLINE void turn(vf* x) {
    const vi even = iota() * 2, odd = even + 1;
    for (int bit = 1; bit < R; bit *= 2)
#pragma GCC unroll 16
      for (int i = 0; i < R; i++)
        if (!(i & bit)) {
          const __m512 lower = (__m512)x[i], upper = (__m512)x[i + bit];
          x[i] = (vf)_mm512_permutex2var_ps(lower, (__m512i)even, upper);
          x[i + bit] = (vf)_mm512_permutex2var_ps(lower, (__m512i)odd, upper);
        }
  }
  template <bool Ahead>
  void weights(vf reference, vf& total, int32_t* p, const Later& later) const {
    for (int g = 0; g < kSixteens; g++) {
      if (Ahead) later.ask(g, 0, v_tiles);
      vf x[R];
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        x[i] = Pairs::weights(load<vf>(s + (g * R + i) * W) - reference);
        total = total + x[i];
      }
      turn(x);
      int32_t* const low = p + g * 2 * kSums;
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        const __m512i w = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x[i]));
        store(low + i * W, (vi)w);
        store(low + kSums + i * W, (vi)_mm512_slli_epi32(w, 16));
      }
    }
  }
  void rescale(float* sums, vf factor) const {
    for (int t = 0; t < 2 * v_tiles; t++)
      for (int r = 0; r < R; r++, sums += W) store(sums, load<vf>(sums) * factor[r]);
  }

  // -- weights times values: registers 5 and 6 sum even and odd columns, 7 holds weights, 3 values
  template <bool Ahead>
  void weigh(float* sums, const int32_t* p, int keys, const Rows& x, const Later& later) const {
    for (int t = 0; t < v_tiles; t++, sums += 2 * kSums) {
      TILE_LOAD(5, sums);
      TILE_LOAD(6, sums + kSums);
      for (int g = 0; g < up(keys, kKeys) / kKeys; g++) {
        TILE_LOAD_ROWS(3, x.at[g] + t * 64, x.row);
        TILE_LOAD(7, p + g * 2 * kSums);
        TILE_DOT(5, 7, 3);
        TILE_LOAD(7, p + g * 2 * kSums + kSums);
        TILE_DOT(6, 7, 3);
        if (Ahead && t) later.ask(g, t, v_tiles);  // `weights` asked for the first
      }
      TILE_STORE(5, sums);
      TILE_STORE(6, sums + kSums);
    }
  }

  void item(const Tile& t, int h, const Tile& later, int later_head) {
    int lowest = t.first + kTile;
    for (int b = 0; b < blocks; b++) lowest = see[b].lowest < lowest ? see[b].lowest : lowest;
    const bool lie = as_they_lie(t, lowest);
    const Later later_keys{later.k, later_head * k_head, k_row}, later_values{later.v, later_head * v_head, v_row};
    const Rows keys = keys_of(t, h, lie);
    score_block<true>(t, h, 0, keys, later_keys, later_values);  // the first block of rows asks for the later tile's lines
    for (int b = 1; b < blocks; b++) score_block<false>(t, h, b, keys, later_keys, later_values);
    const Rows values = values_of(t, h, lie, lowest - t.first);
    weigh<true>(sums_of(h, 0), p, t.keys, values, later_values);
    for (int b = 1; b < blocks; b++) weigh<false>(sums_of(h, b), p + b * kWeights, t.keys, values, later_values);
  }
  float* sums_of(int h, int b) const { return acc + (int64_t(h) * blocks + b) * v_tiles * 2 * kSums; }
  template <bool Ahead>
  void score_block(const Tile& t, int h, int b, const Rows& keys, const Later& later_keys, const Later& later_values) {
    const int at = h * blocks + b;
    if (a.alibi_slopes) Base::read_slopes(see[b], h, lanes(b));
    score<Ahead>(q + int64_t(at) * q_tiles * kQuery, t.keys, keys, later_keys);
    const vf now = any_settle(see[b], t.first);
    if (any(now > top[at])) {
      const vf most = vmax(now, top[at]), factor = top[at] == splat(-INFINITY) ? vf{} : exp2v(top[at] - most);
      top[at] = most;
      sum[at] = sum[at] * factor;
      rescale(sums_of(h, b), factor);
    }
    weights<Ahead>(top[at] == splat(-INFINITY) ? vf{} : top[at], sum[at], p + b * kWeights, later_values);
  }
  vf any_settle(const RowBlock& block, int first) {
    if (a.soft_cap) return a.alibi_slopes ? settle<true, true>(block, first) : settle<true, false>(block, first);
    return a.alibi_slopes ? settle<false, true>(block, first) : settle<false, false>(block, first);
  }

  void run() {
    read_queries();
    for (int b = 0; b < blocks; b++) see[b] = Base::rules_of(lanes(b));
    memset(acc, 0, int64_t(heads) * blocks * v_tiles * 2 * kSums * 4);
    for (int i = 0; i < heads * blocks; i++) top[i] = splat(-INFINITY), sum[i] = vf{};
    Base::each_item([&](const Tile& t, int h, const Tile& later, int later_head) { item(t, h, later, later_head); });
    finish();
  }
  void finish() {
    alignas(64) float row[512 + 64];
    for (int h = 0; h < heads; h++)
      for (int b = 0; b < blocks; b++) {
        const int at = h * blocks + b;
        const vf total = over_groups(sum[at], [](vf x, vf y) FLAT { return x + y; });
        for (int r = 0; r < R && b * R + r < rows; r++) {
          gather(sums_of(h, b) + r * W, row);
          Base::close(h, b * R + r, row, top[at][r], total[r]);
        }
      }
  }
  // A row's even and odd columns in order. Words of fp8 hold eight columns of each sixteen in turn.
  void gather(const float* from, float* row) const {
    const vi low = iota() / 2 + (iota() & 1) * W, high = low + W / 2;
    for (int t = 0; t < v_tiles; t++, from += 2 * kSums) {
      const __m512 even = (__m512)load<vf>(from), odd = (__m512)load<vf>(from + kSums);
      alignas(64) float word[32];
      store(word, (vf)_mm512_permutex2var_ps(even, (__m512i)low, odd));
      store(word + W, (vf)_mm512_permutex2var_ps(even, (__m512i)high, odd));
      for (int i = 0; i < 4; i++) memcpy(row + (T::size == 2 ? t * 32 + i * 8 : t / 2 * 64 + i * 16 + t % 2 * 8), word + i * 8, 32);
    }
  }
};

}  // namespace heedful::HEEDFUL_ISA
#endif
