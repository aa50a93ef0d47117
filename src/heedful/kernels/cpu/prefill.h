// Attention of many query rows over a paged cache: keys and values are packed once for all rows of a unit, then
// everything is a matrix product on packed words.
//
// A unit is a stretch of query tokens of one sequence for one KV head. Keys are packed a panel at a time, so scratch
// memory does not grow with the context. Then every tile of rows passes over the panel.
#pragma once
#include <type_traits>

#include "products.h"
#include "tiles.h"

namespace heedful::HEEDFUL_ISA {

#if defined(__AMX_BF16__)
template <class E>
using Multiplier = std::conditional_t<E::per_word == 2, Tiles, Products<E>>;
#else
template <class E>
using Multiplier = Products<E>;
#endif

constexpr int kPart = 128;  // panels start at a multiple of it: a row's sums are cut at absolute keys

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

template <class E, class T>
struct Prefill : Multiplier<E> {
  using Base = Multiplier<E>;
  using Base::a, Base::u, Base::k, Base::v, Base::q_words, Base::columns, Base::kv_len, Base::q_len, Base::rows;
  using typename Base::Word;
  static constexpr int kTileRows = Base::kTileRows, kGroup = Base::kGroup;
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

  // Gives the tokens that must be computed again, by another kernel.
  typename Base::Tokens run() {
    const int from = visible(a, kv_len, q_len, u.token_begin).low / kPart * kPart;
    const int to = visible(a, kv_len, q_len, u.token_end - 1).high;
    for (int panel = from; panel < to; panel += kPanel) {
      const int end = panel + kPanel < to ? panel + kPanel : to;
      pack_keys(panel, up(end - panel, 64));
      pack_values(panel, up(end - panel, 64));
      for (int first = 0; first < rows; first += kTileRows) over_panel(first, panel, end, panel == from);
      Base::end_panel();
    }
    for (int first = 0; first < rows; first += kTileRows)
      if (Base::high_of(last_of(first)) <= from) Base::finish_unseen(first, tile_rows(first));
    return Base::faint;
  }
  int tile_rows(int first) const { return rows - first < kTileRows ? rows - first : kTileRows; }
  int last_of(int first) const { return first + tile_rows(first) - 1; }
  // A tile begins with its first panel and is written when its last one is done, while it is in the cache.
  void over_panel(int first, int panel, int end, bool first_panel) {
    const int n = tile_rows(first), low = visible(a, kv_len, q_len, Base::token(first)).low;
    const int high = Base::high_of(last_of(first));
    if (high <= panel || low >= end) return;
    Base::tile_over_panel(first, n, panel, end, first_panel || low >= panel, high <= end);
  }
};

}  // namespace heedful::HEEDFUL_ISA
