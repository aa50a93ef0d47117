// Keys and values as a decode unit finds them in the cache: tiles of 64 keys, walked over head by head, and where each
// row of queries stands among them; the same for every way to multiply.
#pragma once
#include "finish.h"

namespace heedful::HEEDFUL_ISA {

constexpr int kAhead = 2;  // items (one tile of one head) between the prefetch and the use

alignas(64) inline const char zero_row[2048] = {};

// Where a tile's keys and values lie: one pointer every four keys, for the first head of the unit.
struct Tile {
  int first, keys;  // keys [first, first + keys) of the sequence
  const char *k[kTile / 4], *v[kTile / 4];
};

// Asks for the lines of a tile's rows of one head, K or V, one at a time in the order of their addresses: out of order
// they come up to a third slower.
struct Ahead {
  const char* const* fours;
  int64_t head, row;
  int bytes;  // of a row
  int next = 0;
  const char *at = nullptr, *end = nullptr;
  Ahead(const char* const* fours, int64_t head, int64_t row, int bytes) : fours(fours), head(head), row(row), bytes(bytes) { turn(); }
  void turn() {  // past the last row it begins again
    at = fours[next / 4 % (kTile / 4)] + head + next % 4 * row;
    end = at + bytes;
    next++;
  }
  template <int N>
  INLINE void ask() {
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
      __builtin_prefetch(at, 0, 2);
      at += 64;
      if (at >= end) turn();
    }
  }
};

template <class T>
struct Cached {
  const heedful_attention& a;
  const DecodeUnit& u;
  const int group, kv_len, q_begin, q_len, rows, heads;
  const int64_t k_row, v_row, k_head, v_head;  // bytes
  const bool direct;                           // four neighbouring keys always lie in one block

  Cached(const heedful_attention& a, const DecodeUnit& u)
      : a(a), u(u), group(a.num_heads / a.num_kv_heads), kv_len(a.kv_lens[u.sequence]),
        q_begin(a.query_start[u.sequence]), q_len(a.query_start[u.sequence + 1] - q_begin),
        rows((u.token_end - u.token_begin) * group), heads(u.head_end - u.head_begin), k_row(a.k_token * T::size),
        v_row(a.v_token * T::size), k_head(a.k_head * T::size), v_head(a.v_head * T::size),
        direct(!a.block_tables || a.block_size % 4 == 0) {}

  // row = token * group + head of the group
  int token(int r) const { return u.token_begin + r / group; }
  int head_of(int h, int r) const { return (u.head_begin + h) * group + r % group; }
  const char* query_of(int h, int r, int size) const {
    return (const char*)a.query + ((q_begin + token(r)) * a.q_token + head_of(h, r) * a.q_head) * size;
  }

  // -- what a block of rows sees; row(i) is the row of lane i
  template <class F>
  RowBlock rules_of(F row) const {
    RowBlock block;
    block.lowest = block.all_high = kv_len;
    block.all_low = 0;
    for (int i = 0; i < W; i++) {
      const int r = row(i) < rows ? row(i) : rows - 1;
      const Visible v = visible(a, kv_len, q_len, token(r));
      block.low[i] = v.low;
      block.high[i] = v.high;
      block.position[i] = kv_len - q_len + token(r);
      block.slope[i] = 0;
      if (v.low < block.lowest) block.lowest = v.low;
      if (v.low > block.all_low) block.all_low = v.low;
      if (v.high < block.all_high) block.all_high = v.high;
    }
    return block;
  }
  template <class F>
  void read_slopes(RowBlock& block, int h, F row) const {
    for (int i = 0; i < W; i++) block.slope[i] = row(i) < rows ? a.alibi_slopes[head_of(h, row(i))] : 0;
  }

  // -- where keys lie
  const char* row_of(const void* base, int64_t block, int64_t token, int64_t head, int key) const {
    if (!a.block_tables) return (const char*)base + (a.key_start[u.sequence] + key) * token + head;
    const int32_t* table = a.block_tables + u.sequence * a.table_stride;
    return (const char*)base + table[key / a.block_size] * block + key % a.block_size * token + head;
  }
  const char* k_at(int key) const { return row_of(a.key, a.k_block * T::size, k_row, u.head_begin * k_head, key); }
  const char* v_at(int key) const { return row_of(a.value, a.v_block * T::size, v_row, u.head_begin * v_head, key); }
  Tile tile(int first, int end) const {
    Tile t;
    t.first = first;
    t.keys = end - first < kTile ? end - first : kTile;
    for (int i = 0; i < kTile / 4; i++) {
      const int key = first + 4 * i < end ? first + 4 * i : first;
      t.k[i] = k_at(key);
      t.v[i] = v_at(key);
    }
    return t;
  }

  // Calls item(tile, head, a later tile, its head) for every tile and head of the unit.
  template <class F>
  void each_item(F item) const {
    Tile tiles[kAhead + 1];
    auto ahead_of = [&](int first) {  // past the end of the unit the sequence goes on; past its end there is nothing
      return first < kv_len ? tile(first, kv_len) : tile(u.key_begin, u.key_end);
    };
    if (u.key_begin < u.key_end)
      for (int i = 0; i <= kAhead; i++) tiles[i] = ahead_of(u.key_begin + i * kTile);
    for (int first = u.key_begin; first < u.key_end; first += kTile) {
      tiles[0].keys = first + kTile < u.key_end ? kTile : u.key_end - first;
      for (int h = 0; h < heads; h++) {
        const int later = h + kAhead;
        item(tiles[0], h, tiles[later / heads < kAhead ? later / heads : kAhead], later % heads);
      }
      for (int i = 0; i < kAhead; i++) tiles[i] = tiles[i + 1];
      tiles[kAhead] = ahead_of(first + (kAhead + 1) * kTile);
    }
  }

  // The end of a row: its output, or its part of it.
  void close(int h, int r, float* row, float most, float total) const {
    if (!u.partial) return emit(a, q_begin + token(r), head_of(h, r), row, most, total);
    float* to = u.partial + (int64_t(h) * rows + r) * partial_row(a);
    memcpy(to, row, a.head_size_v * 4);
    to[a.head_size_v] = most;
    to[a.head_size_v + 1] = total;
  }
};

}  // namespace heedful::HEEDFUL_ISA
