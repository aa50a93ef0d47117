// The query rows of a prefill unit: row = token * group + head of the group. What they see, how they become words, how
// raw scores become weights, how a row's maximum moves; the same for every way to multiply.
//
// The running maximum of a row moves only when it grew by more than 2^8, and then by a whole power of two: sums are
// rescaled without rounding. What a row computes depends on its own position and on absolute key numbers, never on
// which tokens share its unit.
#pragma once
#include "finish.h"

namespace heedful::HEEDFUL_ISA {

constexpr int kPanel = 2048;  // keys packed at a time
constexpr float kLag = 8.f;   // by how much (base 2) a score may exceed the kept maximum
// A row whose weights sum to less has its largest biased score that far below its largest score without the bias.
constexpr float kFaint = 0x1p-60f;
constexpr float kUnseen = -3e38f;  // the maximum of a row that has seen no key: finite, so that hidden scores stay -inf

inline int up(int n, int to) { return (n + to - 1) / to * to; }

// ---- rows of any storage type as the words of an engine
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

// Group: keys, or columns of values, that packed words keep together. Whole: columns are padded to a multiple of it.
template <class E, int Group, int Whole = Group>
struct Rows {
  static constexpr int kGroup = Group;
  using Word = typename E::Word;
  using Weight = typename E::Weight;
  static constexpr int kKeys = E::per_word;          // keys of a value word
  static constexpr int kElements = W * E::per_word;  // elements of a key vector

  struct Tokens {
    int from, to;
  } faint{INT32_MAX, 0};  // to be computed again
  struct Sight {  // of some rows: keys that any of them sees, keys that all of them see
    int low, high, all_low, all_high;
  };
  struct Factors {  // raw score to base-2 logit: x * scale, or cap * tanh(x * scale)
    float scale, cap;
  };

  const heedful_attention& a;
  const PrefillUnit& u;
  const int group, kv_len, q_begin, q_len, rows, q_words, columns;
  int32_t* k;  // [kPanel / kGroup][q_words][kGroup] words
  int32_t* v;  // [columns / kGroup][kPanel / kKeys][kGroup] words
  float* top;  // [rows]
  vf* sum;     // [rows]

  static int columns_of(const heedful_attention& a) { return up(a.head_size_v, Whole); }
  static int words_of(int size) { return up(up(size, kElements) / E::per_word, 16); }
  static int64_t scratch(const heedful_attention& a, int block) {
    return kPanel * (int64_t(words_of(a.head_size)) + columns_of(a) / kKeys) * 4 +
           (unit_rows(a) + block) * (sizeof(vf) + 4) + 512;
  }
  Rows(const heedful_attention& a, const PrefillUnit& u, char*& at, int block)
      : a(a), u(u), group(a.num_heads / a.num_kv_heads), kv_len(a.kv_lens[u.sequence]),
        q_begin(a.query_start[u.sequence]), q_len(a.query_start[u.sequence + 1] - q_begin),
        rows((u.token_end - u.token_begin) * group), q_words(words_of(a.head_size)), columns(columns_of(a)) {
    k = take<int32_t>(at, kPanel * int64_t(q_words));
    v = take<int32_t>(at, kPanel / kKeys * int64_t(columns));
    top = take<float>(at, up(rows, block));
    sum = take<vf>(at, up(rows, block));
  }
  int token(int r) const { return u.token_begin + r / group; }
  int head_of(int r) const { return u.head * group + r % group; }
  int high_of(int r) const { return visible(a, kv_len, q_len, token(r)).high; }

  // Rows [first, first + n) in order, as words and as what they see, counted from 0; up to `padded` rows see nothing.
  // place(row, word): where 16 words of a row stand in q.
  template <class Place>
  void read(int first, int n, int padded, Place place, int32_t* q, int* low, int* high) const {
    if constexpr (E::per_word == 2) read_as<BF16>(first, n, place, q, low, high);
    else if (a.dtype == HEEDFUL_F32) read_as<F32>(first, n, place, q, low, high);
    else if (a.dtype == HEEDFUL_BF16) read_as<BF16>(first, n, place, q, low, high);
    else read_as<F16>(first, n, place, q, low, high);
    for (int r = n; r < padded; r++) low[r] = high[r] = 0;
  }
  template <class Q, class Place>
  void read_as(int first, int n, Place place, int32_t* q, int* low, int* high) const {
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
        store(q + place(r, e / E::per_word), w);
      }
    }
  }
  // Asks for a line of queries to come, or of outputs soon to be written: each token's heads are a page away from the
  // next's. line: counted over the heads of this unit, token after token from row `first` on.
  INLINE void ask(const void* base, int64_t token_stride, int64_t head_stride, int size, bool to_write, int first, int line) const {
    const int size_of = a.dtype == HEEDFUL_F32 ? 4 : 2, lines = (int(group * size) * size_of + 63) / 64;
    const int t = token(first) + line / lines;
    if (t >= u.token_end) return;
    const char* at = (const char*)base + ((q_begin + t) * token_stride + u.head * group * head_stride) * size_of + line % lines * 64;
    to_write ? __builtin_prefetch(at, 1, 2) : __builtin_prefetch(at, 0, 2);
  }
  INLINE void ask_query(int first, int line) const { ask(a.query, a.q_token, a.q_head, a.head_size, false, first, line); }
  INLINE void ask_output(int first, int line) const { ask(a.output, a.o_token, a.o_head, a.head_size_v, true, first, line); }
  static Sight sight_of(const int* low, const int* high, int n) {
    Sight see{INT32_MAX, 0, 0, INT32_MAX};
    for (int r = 0; r < n; r++) {
      if (low[r] > see.all_low) see.all_low = low[r];
      if (high[r] < see.all_high) see.all_high = high[r];
      if (low[r] == high[r]) continue;
      if (low[r] < see.low) see.low = low[r];
      if (high[r] > see.high) see.high = high[r];
    }
    return see;
  }

  // -- raw scores to weights
  Factors factors() const { return a.alibi_slopes ? Factors{1.f, 0.f} : unbiased(); }  // ALiBi: done before they are stored
  Factors unbiased() const {
    const float scale = a.scale * a.k_scale;
    if (a.soft_cap) return {scale / a.soft_cap, a.soft_cap * kLog2e};
    return {scale * kLog2e, 0.f};
  }
  template <bool Cap>
  static INLINE vf weight(vf raw, const Factors& f, vf reference) {
    if constexpr (!Cap) return E::weights((E::per_word == 2 ? raw * f.scale : rounded(raw * f.scale)) - reference);
    const vf x = tanhv<E::per_word == 2>(raw * f.scale) * f.cap;
    return E::weights((raw == splat(-INFINITY) ? raw : x) - reference);
  }
  struct Slope {  // of a row: its ALiBi slope in base 2, and its own position
    float slope;
    int position;
  };
  void read_slopes(int first, int n, int padded, Slope* to) const {
    if (!a.alibi_slopes) return;
    for (int r = 0; r < n; r++) to[r] = {a.alibi_slopes[head_of(first + r)] * kLog2e, kv_len - q_len + token(first + r)};
    for (int r = n; r < padded; r++) to[r] = {0.f, 0};
  }
  // Of W keys from `key` on. Distances are whole numbers in fp32: exact as far as an int turned into one is.
  template <bool Cap>
  INLINE vf biased(vf raw, const Slope& row, int key) const {
    const vf distance = vabs(splat(float(key - row.position)) + __builtin_convertvector(iota(), vf));
    return logits<Cap, false>(a, raw, RowBlock(), vi{}) - distance * row.slope;
  }

  float top_of(int row) const { return top[row] == kUnseen ? -INFINITY : top[row]; }
  void forget(int first, int n) {
    for (int r = first; r < first + n; r++) top[r] = kUnseen, sum[r] = vf{};
  }

  // -- the maximum of a row, first set to what it is, later moved by a power of two that covers it: nothing is rounded.
  // Gives by what the row's sums must be multiplied. ALiBi lets scores grow all the way to the diagonal, so that their
  // maximum would move at almost every step: where weights become bf16, that of the scores without their bias is taken
  // (kApart). It is no smaller, and far below it an exponent has digits enough for a bf16 weight; in fp32 it has not.
  static constexpr bool kApart = E::per_word == 2;
  template <bool Cap, bool Alibi>
  float raise(int row, float raw) const {
    if (raw == -INFINITY) return 1.f;
    const Factors f = unbiased();
    float now = raw;
    if constexpr (!Alibi || kApart) now = Cap ? (tanhv<E::per_word == 2>(splat(raw * f.scale)) * f.cap)[0] : raw * f.scale;
    const float kept = top[row];
    if (kept == kUnseen) top[row] = now;
    if (kept == kUnseen || !(now > kept + kLag)) return 1.f;
    const float by = ceilf(now - kept), factor = exp2f(-by);
    top[row] = kept + by;
    sum[row] = sum[row] * factor;
    return factor;
  }
  // The sum of a row's weights; a row left with next to nothing must be computed again, by its biased maximum.
  float total_of(int row) {
    const float total = hsum(sum[row]);
    if (kApart && a.alibi_slopes && top[row] != kUnseen && total < kFaint) {
      if (token(row) < faint.from) faint.from = token(row);
      if (token(row) >= faint.to) faint.to = token(row) + 1;
    }
    return total;
  }
};

}  // namespace heedful::HEEDFUL_ISA
