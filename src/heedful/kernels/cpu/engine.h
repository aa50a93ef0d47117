// Two ways to multiply: Fma on float lanes (every instruction set, every storage type), and Pairs on bf16 pairs where
// the machine has a bf16 dot product. Both work on 32-bit words, so that one kernel text serves both.
#pragma once
#include "simd.h"

namespace heedful::HEEDFUL_ISA {

struct Fma {
  typedef vf Word;
  typedef float Weight;               // what a probability is stored as
  static constexpr int per_word = 1;  // elements (or keys) of one 32-bit lane
  static INLINE vf dot(vf sum, Word a, Word b) { return a * b + sum; }
  static INLINE Word spread(const Weight* p) { return splat(*p); }
  static INLINE vf weights(vf x) { return exp2v(x); }
  static INLINE void put(Weight* p, vf v) { store(p, v); }
  static INLINE vf get(const Weight* p) { return load<vf>(p); }
};

// Reader<Engine, Type>: `units` words hold `elements` neighbouring elements of a row.
template <class Engine, class Type>
struct Reader;

template <class Type>
struct Reader<Fma, Type> {
  static constexpr int units = 1, elements = W;
  static INLINE void read(const char* p, vf* w) { w[0] = Type::read(p); }
  static INLINE void read_part(const char* p, int n, vf* w) { w[0] = Type::read_part(p, n); }
  // n elements of a query of type Q, as this reader's words `stride` apart
  template <class Q>
  static INLINE void query(const char* p, int n, vf* to, int) {
    to[0] = n >= W ? Q::read(p) : Q::read_part(p, n);
  }
};

#if defined(__AVX512BF16__)
struct Pairs {
  typedef vi Word;
  typedef uint16_t Weight;
  static constexpr int per_word = 2;
  static INLINE vf dot(vf sum, Word a, Word b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
  static INLINE Word spread(const Weight* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return vi{} + pair;
  }
  static INLINE vf weights(vf x) { return exp2v<true>(x); }
  static INLINE void put(Weight* p, vf v) { store(p, (vh)_mm512_cvtneps_pbh(v)); }
  static INLINE vf get(const Weight* p) { return BF16::read(p); }
};

template <>
struct Reader<Pairs, BF16> {
  static constexpr int units = 1, elements = 32;
  static INLINE void read(const char* p, vi* w) { w[0] = load<vi>(p); }
  static INLINE void read_part(const char* p, int n, vi* w) { w[0] = load_part<vi>(p, 2 * n); }
  template <class Q>
  static INLINE void query(const char* p, int n, vi* to, int) {
    to[0] = load_part<vi>(p, n >= 32 ? 64 : 2 * n);
  }
};

// fp8 bytes to bf16 by table: the high and the low byte of each of the 128 magnitudes, the sign put in afterwards.
template <class Type>
struct Table {
  alignas(64) uint8_t high[128], low[128];
  constexpr Table() : high(), low() {
    for (int i = 0; i < 128; i++) {
      const int bits = bf16_of(i);
      high[i] = bits >> 8;
      low[i] = bits & 255;
    }
  }
  static constexpr int bf16_of(int i) {
    constexpr bool e4m3 = __is_same(Type, E4M3);
    constexpr int fraction = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
    int e = i >> fraction, m = i & ((1 << fraction) - 1);
    if (e4m3 ? i == 127 : i > 124) return 0x7fc0;
    if (!e4m3 && i == 124) return 0x7f80;
    if (i == 0) return 0;
    if (e == 0)  // subnormal: shift the fraction up to its leading one
      for (e = 1; !(m >> fraction); e--) m <<= 1;
    return ((e - bias + 127) << 7) | ((m & ((1 << fraction) - 1)) << (7 - fraction));
  }
};
template <class Type>
inline constexpr Table<Type> table{};

template <class Type>
INLINE void widen_pairs(__m512i x, vi* w) {  // 64 bytes -> two vectors, low and high eight bytes of each 128-bit lane
  const Table<Type>& t = table<Type>;
  __m512i h = _mm512_permutex2var_epi8(load<__m512i>(t.high), x, load<__m512i>(t.high + 64));
  __m512i l = _mm512_permutex2var_epi8(load<__m512i>(t.low), x, load<__m512i>(t.low + 64));
  h = _mm512_ternarylogic_epi32(h, x, _mm512_set1_epi8((char)0x80), 0xF8);  // h | (x & 0x80)
  w[0] = (vi)_mm512_unpacklo_epi8(l, h);
  w[1] = (vi)_mm512_unpackhi_epi8(l, h);
}
template <class Type>
struct Reader8 {
  static constexpr int units = 2, elements = 64;
  static INLINE void read(const char* p, vi* w) { widen_pairs<Type>(load<__m512i>(p), w); }
  static INLINE void read_part(const char* p, int n, vi* w) { widen_pairs<Type>(load_part<__m512i>(p, n), w); }
  template <class Q>
  static INLINE void query(const char* p, int n, vi* to, int stride) {  // in the order of widen_pairs
    for (int i = 0; i < 8; i++) {
      const int left = n - 8 * i < 0 ? 0 : n - 8 * i < 8 ? n - 8 * i : 8;
      char eight[16] = {};
      memcpy(eight, p + 16 * i, 2 * left);
      memcpy((char*)(to + i % 2 * stride) + i / 2 * 16, eight, 16);
    }
  }
};
template <>
struct Reader<Pairs, E4M3> : Reader8<E4M3> {};
template <>
struct Reader<Pairs, E5M2> : Reader8<E5M2> {};
#endif

}  // namespace heedful::HEEDFUL_ISA
