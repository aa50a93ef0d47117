// The merge of states: outputs and LSEs of attention over parts of the keys become those of all of them.
//
// W rows are weighed together, a lane each, and then added up one after another.
#pragma once
#include "shape.h"
#include "simd.h"

namespace heedful::HEEDFUL_ISA {

// Up to W neighbouring rows [token][head], and what they take from each part: shares [parts][W], negative where a part
// has no key for the row. count, only: how many parts have some, and the last of them.
struct StateRows {
  const heedful_merge& m;
  int64_t first, token[W];
  int head[W], rows;
  float* shares;
  vi count, only;
  vf top, total;

  StateRows(const heedful_merge& m, int64_t begin, int64_t end, float* shares)
      : m(m), first(begin), rows(end - begin < W ? int(end - begin) : W), shares(shares) {
    for (int i = 0; i < rows; i++) token[i] = (begin + i) / m.num_heads, head[i] = int((begin + i) % m.num_heads);
  }
  char* output(const heedful_state& s, int i) const {
    return (char*)s.output + (token[i] * s.o_token + head[i] * s.o_head) * (m.dtype == HEEDFUL_F32 ? 4 : 2);
  }
  float* lse(const heedful_state& s, int i) const { return s.lse + token[i] * s.lse_token + head[i] * s.lse_head; }

  vf read_lses(const heedful_state& s) const {
    if (s.lse_head == 1 && s.lse_token == m.num_heads) return load_part<vf>(s.lse + first, rows * 4);
    vf x{};
    for (int i = 0; i < rows; i++) x[i] = *lse(s, i);
    return x;
  }
  void weigh() {  // of a row without any key only the count is right, and that is all it takes
    top = splat(-INFINITY), total = vf{}, count = vi{}, only = vi{};
    for (int p = 0; p < m.num_parts; p++) {
      vf x = read_lses(m.parts[p]);
      x = vabs(x) == INFINITY ? splat(-INFINITY) : x;
      const vi filled = x != -INFINITY;  // NaN is: it must not be hidden
      count -= filled;
      only = filled ? vi{} + p : only;
      top = vmax(x, top);
      store(shares + p * W, x);
    }
    for (int p = 0; p < m.num_parts; p++) {
      const vf x = load<vf>(shares + p * W), weight = exp2v((x - top) * kLog2e);
      total += weight;
      store(shares + p * W, x == -INFINITY ? splat(-1.f) : weight);
    }
    for (int p = 0; p < m.num_parts; p++) {
      const vf weight = load<vf>(shares + p * W);
      store(shares + p * W, weight < 0.f ? weight : weight / total);
    }
  }
  template <class Type, int N>
  INLINE void add(int i, int column) const {  // N vectors of the row
    vf sum[N] = {};
    for (int p = 0; p < m.num_parts; p++) {
      const float share = shares[p * W + i];
      const char* from = output(m.parts[p], i) + column * Type::size;
      if (!(share < 0))
        for (int v = 0; v < N; v++) sum[v] += Type::read(from + v * W * Type::size) * share;
    }
    for (int v = 0; v < N; v++) Type::write(output(m.whole, i) + (column + v * W) * Type::size, sum[v]);
  }
  template <class Type>
  INLINE void add_rest(int i, int column) const {  // what is left is less than a vector
    const int left = m.head_size - column;
    vf sum{};
    for (int p = 0; p < m.num_parts; p++)
      if (const float share = shares[p * W + i]; !(share < 0))
        sum += Type::read_part(output(m.parts[p], i) + column * Type::size, left) * share;
    char last[W * 4];
    Type::write(last, sum);
    memcpy(output(m.whole, i) + column * Type::size, last, left * Type::size);
  }
  template <class Type>
  INLINE void row(int i) const {
    int c = 0;
    for (; c + 4 * W <= m.head_size; c += 4 * W) add<Type, 4>(i, c);
    for (; c + W <= m.head_size; c += W) add<Type, 1>(i, c);
    if (c < m.head_size) add_rest<Type>(i, c);
    *lse(m.whole, i) = top[i] + logf(total[i]);
  }
  void row_of_one(int i) const {  // bit for bit; the part may be the whole itself
    const heedful_state& part = m.parts[only[i]];
    memmove(output(m.whole, i), output(part, i), int64_t(m.head_size) * (m.dtype == HEEDFUL_F32 ? 4 : 2));
    *lse(m.whole, i) = *lse(part, i);
  }
  void row_of_none(int i) const {
    memset(output(m.whole, i), 0, int64_t(m.head_size) * (m.dtype == HEEDFUL_F32 ? 4 : 2));
    *lse(m.whole, i) = -INFINITY;
  }
  template <class Type>
  INLINE void run() {
    weigh();
    for (int i = 0; i < rows; i++)
      if (count[i] > 1) row<Type>(i);
      else if (count[i]) row_of_one(i);
      else row_of_none(i);
  }
};

inline void merge_rows(const heedful_merge& m, int64_t begin, int64_t end, float* shares) {
  for (int64_t r = begin; r < end; r += W) {
    StateRows rows(m, r, end, shares);
    if (m.dtype == HEEDFUL_F32) rows.run<F32>();
    else if (m.dtype == HEEDFUL_BF16) rows.run<BF16>();
    else rows.run<F16>();
  }
}

}  // namespace heedful::HEEDFUL_ISA
