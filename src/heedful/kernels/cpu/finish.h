// What happens to scores between the two multiplications, and to sums at the end.
#pragma once
#include "engine.h"
#include "shape.h"

namespace heedful::HEEDFUL_ISA {

// The next array of a scratch block, on a cache line of its own.
template <class P>
INLINE P* take(char*& at, int64_t count) {
  P* p = (P*)at;
  at += (count * sizeof(P) + 63) / 64 * 64;
  return p;
}

template <int N>
struct Int {
  static constexpr int value = N;
};
struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};

constexpr int kColumns = 4;                          // vectors of columns of one register block
constexpr int kAccumulators = W >= 16 ? 16 : 8;      // vector registers that hold sums

// What a block of kRows rows sees, a lane each: keys [low, high); its rows' own positions and ALiBi slopes.
struct RowBlock {
  vi low, high, position;
  vf slope;
  int lowest, all_low, all_high;  // the smallest low; keys [all_low, all_high) are visible to every row
};

// Raw products of keys `key` to base-2 logits: scale, soft cap, ALiBi, in that order.
template <bool Cap, bool Alibi>
INLINE vf logits(const heedful_attention& a, vf raw, const RowBlock& rows, vi key) {
  const float scale = a.scale * a.k_scale;
  vf x;
  if constexpr (Cap) x = tanhv(raw * (scale / a.soft_cap)) * (a.soft_cap * kLog2e);
  else x = raw * (scale * kLog2e);
  if constexpr (Alibi) x = x - vabs(__builtin_convertvector(key - rows.position, vf)) * (rows.slope * kLog2e);
  return x;
}
template <bool Cap, bool Alibi>
INLINE vf logits_pass(const heedful_attention& a, const RowBlock& rows, int first, int keys, float* s) {
  const bool edge = first < rows.all_low || first + (keys + 3) / 4 * 4 > rows.all_high;
  vf most = splat(-INFINITY);
  vi key = (iota() & 3) + first;
  for (int i = 0; i < keys; i += 4, s += W, key += 4) {
    vf x = logits<Cap, Alibi>(a, load<vf>(s), rows, key);
    if (edge) x = (key >= rows.low) & (key < rows.high) ? x : splat(-INFINITY);
    store(s, x);
    most = vmax(most, x);
  }
  return lane_max(most);
}

// One softmax step of a block of rows: s holds raw products [quad][row][4 keys], p gets their weights in that order.
// top is the running maximum in base 2, sum the running denominator (still spread over a lane's elements). Returns by
// what the rows' accumulators must be multiplied; `moved` says whether that is anything but 1.
template <class E>
INLINE vf softmax_step(const heedful_attention& a, const RowBlock& rows, int first, int keys, float* s,
                       typename E::Weight* p, vf& top, vf& sum, bool& moved) {
  vf now;
  if (a.soft_cap) now = a.alibi_slopes ? logits_pass<true, true>(a, rows, first, keys, s) : logits_pass<true, false>(a, rows, first, keys, s);
  else now = a.alibi_slopes ? logits_pass<false, true>(a, rows, first, keys, s) : logits_pass<false, false>(a, rows, first, keys, s);
  vf factor = splat(1.f);
  moved = any(now > top);
  if (moved) {
    const vf most = vmax(now, top);
    factor = top == splat(-INFINITY) ? vf{} : exp2v(top - most);
    top = most;
    sum = sum * factor;
  }
  const vf reference = top == splat(-INFINITY) ? vf{} : top;
  vf total = sum;
  for (int i = 0; i < keys; i += 4, s += W, p += W) {
    const vf w = E::weights(load<vf>(s) - reference);
    total = total + w;
    E::put(p, w);
  }
  sum = total;
  return factor;
}

template <class O>
INLINE void write_as(char* to, const float* row, int n, float factor) {
  int c = 0;
  for (; c + W <= n; c += W) O::write(to + c * O::size, load<vf>(row + c) * factor);
  if (c == n) return;
  char last[W * 4];
  O::write(last, load<vf>(row + c) * factor);  // rows are padded to whole vectors
  memcpy(to + c * O::size, last, (n - c) * O::size);
}
INLINE void write_row(const heedful_attention& a, void* to, const float* row, float factor) {
  if (a.dtype == HEEDFUL_F32) write_as<F32>((char*)to, row, a.head_size_v, factor);
  else if (a.dtype == HEEDFUL_BF16) write_as<BF16>((char*)to, row, a.head_size_v, factor);
  else write_as<F16>((char*)to, row, a.head_size_v, factor);
}

// A row's maximum and denominator with the sink in it; factor: by what its sum of values then stands too high.
struct Denominator {
  float top, sum, factor;
};
inline Denominator with_sink(const heedful_attention& a, int head, float top, float sum) {
  if (top == -INFINITY && sum == sum) sum = 0;  // no visible key; a NaN stays one
  if (!a.sinks || a.sinks[head] == -INFINITY) return {top, sum, 1.f};
  const float sink = a.sinks[head] * kLog2e, most = top > sink ? top : sink;
  const float factor = top == -INFINITY ? 0.f : exp2f(top - most);
  return {most, sum * factor + exp2f(sink - most), factor};
}

// Closes one row: the sink joins the denominator, the sum is divided, the output is rounded, the LSE is written.
// exact: the denominator before its weights were rounded, which is what the LSE tells.
inline void emit(const heedful_attention& a, int64_t token, int head, float* row, float top, float sum, float exact) {
  const Denominator d = with_sink(a, head, top, sum);
  const int size = a.dtype == HEEDFUL_F32 ? 4 : 2;
  float factor = d.sum > 0 ? d.factor * a.v_scale / d.sum : 0.f;
  if (d.sum != d.sum) factor = d.sum;
  write_row(a, (char*)a.output + (token * a.o_token + head * a.o_head) * size, row, factor);
  if (!a.lse) return;
  const Denominator e = with_sink(a, head, top, exact);
  int exponent = 0;  // kept apart from the fraction: the maximum may stand far above the scores
  const float fraction = 2 * frexpf(e.sum, &exponent);  // in [1, 2): a sum of 1 leaves the maximum as it is
  a.lse[token * a.lse_token + head * a.lse_head] = e.sum == 0 ? -INFINITY : ((e.top + (exponent - 1)) + log2f(fraction)) / kLog2e;
}
inline void emit(const heedful_attention& a, int64_t token, int head, float* row, float top, float sum) {
  emit(a, token, head, row, top, sum, sum);
}

// Joins the parts of one sequence in their order, for every row of the heads of `u`.
inline void merge_parts(const heedful_attention& a, const DecodeUnit& u, int parts, const float* partials) {
  const int group = a.num_heads / a.num_kv_heads, q_begin = a.query_start[u.sequence] + u.token_begin;
  const int rows = (u.token_end - u.token_begin) * group, heads = u.head_end - u.head_begin;
  const int64_t width = partial_row(a), part = width * rows * heads;
  alignas(64) float row[512 + 64];
  for (int i = 0; i < heads * rows; i++) {
    float top = -INFINITY, sum = 0;
    for (int c = 0; c < parts; c++) {
      const float t = partials[c * part + i * width + a.head_size_v];
      if (t > top) top = t;
    }
    memset(row, 0, sizeof row);
    for (int c = 0; c < parts; c++) {
      const float* from = partials + c * part + i * width;
      const float t = from[a.head_size_v], total = from[a.head_size_v + 1], w = t == -INFINITY ? 0.f : exp2f(t - top);
      if (w == 0.f && total == total) continue;
      sum += w * total;
      int d = 0;
      for (; d + W <= a.head_size_v; d += W) store(row + d, load<vf>(row + d) + load<vf>(from + d) * w);
      for (; d < a.head_size_v; d++) row[d] += from[d] * w;
    }
    const int r = i % rows, h = i / rows;
    emit(a, q_begin + r / group, (u.head_begin + h) * group + r % group, row, top, sum);
  }
}

}  // namespace heedful::HEEDFUL_ISA
