// The cache write: rows of keys or values into their slots, converted as the contract says.
#pragma once
#include "finish.h"

namespace heedful::HEEDFUL_ISA {

// A float as an fp8 with `fraction` stored bits, to nearest, ties to even; |x| is within `most`, or NaN. Numbers below
// the smallest normal are rounded by an addition that leaves their steps in the low bits.
template <int Fraction, int Bias>
INLINE vb narrow8(vf x) {
  const vu bits = (vu)x, magnitude = bits & 0x7fffffff;
  constexpr int drop = 23 - Fraction;
  constexpr uint32_t step = uint32_t(127 + 23 - (Bias - 1 + Fraction)) << 23;  // 2^23 steps of a subnormal
  const vu normal = ((magnitude + ((1u << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop) - ((127 - Bias) << Fraction);
  const vu small = (vu)((vf)magnitude + (vf)(vu{} + step)) - step;
  vu r = magnitude < (uint32_t(127 - Bias + 1) << 23) ? small : normal;
  r = magnitude > 0x7f800000 ? vu{} + 0x7f : r;
  return bytes(r | ((bits >> 24) & 0x80));
}
template <class Source>
INLINE void convert(const char* from, char* to, int n, const heedful_write& w) {
  const bool e4m3 = w.cache_dtype == HEEDFUL_E4M3;
  const vf most = splat(e4m3 ? 448.f : 57344.f);
  for (int i = 0; i < n; i += W) {
    const int left = n - i < W ? n - i : W;
    vf x = (left == W ? Source::read(from + i * Source::size) : Source::read_part(from + i * Source::size, left)) / w.scale;
    x = x > most ? most : x < -most ? -most : x;  // NaN stays
    const vb bytes = e4m3 ? narrow8<3, 7>(x) : narrow8<2, 15>(x);
    memcpy(to + i, &bytes, left);
  }
}
inline void write_rows(const heedful_write& w) {
  const int from = w.dtype == HEEDFUL_F32 ? 4 : 2, to = w.cache_dtype >= HEEDFUL_E4M3 ? 1 : from;
  for (int64_t t = 0; t < w.tokens; t++) {
    if (w.slots[t] < 0) continue;
    const int64_t at = w.slots[t] / w.block_size * w.c_block + w.slots[t] % w.block_size * w.c_token;
    for (int h = 0; h < w.heads; h++) {
      const char* source = (const char*)w.source + (t * w.s_token + h * w.s_head) * from;
      char* cache = (char*)w.cache + (at + h * w.c_head) * to;
      if (to == from) memcpy(cache, source, int64_t(w.size) * to);
      else if (w.dtype == HEEDFUL_F32) convert<F32>(source, cache, w.size, w);
      else if (w.dtype == HEEDFUL_BF16) convert<BF16>(source, cache, w.size, w);
      else convert<F16>(source, cache, w.size, w);
    }
  }
}

}  // namespace heedful::HEEDFUL_ISA
