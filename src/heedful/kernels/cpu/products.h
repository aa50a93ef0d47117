// The products of a prefill on vectors: for each tile of rows and each span of 128 keys, scores of 4 rows x 64 keys in
// registers, with the exponentials of the previous four rows woven in between the multiplications (they use other
// ports); then weights times values, 4 rows x 64 columns in registers.
#pragma once
#include "rows.h"

namespace heedful::HEEDFUL_ISA {

constexpr int kWide = W >= 16 ? 4 : 2;  // vectors of a group

template <class E>
struct Products : Rows<E, kWide * W> {
  using Base = Rows<E, kWide * W>;
  using Base::a, Base::columns, Base::factors, Base::head_of, Base::k, Base::q_begin, Base::q_words,
      Base::rows, Base::sum, Base::token, Base::top, Base::v;
  using typename Base::Factors, typename Base::Sight, typename Base::Weight, typename Base::Word;
  static constexpr int kKeys = Base::kKeys, kGroup = Base::kGroup;
  static constexpr int kBlock = 4;      // rows of a register block
  static constexpr int kTileRows = 96;  // rows that pass over a panel together
  static constexpr int kSpan = 128;     // keys between two value steps

  float* acc;       // [row block][columns / kGroup][kBlock][kGroup]
  int32_t* q;       // [kTileRows][q_words] words
  Weight* p;        // [kTileRows][kSpan]
  float* s;         // [2][kBlock][kGroup]
  int *low, *high;  // [kTileRows] visible keys, counted from 0
  Sight* sight;     // [kTileRows / kBlock]
  typename Base::Slope slopes[kTileRows];
  int asked = 0;    // lines of queries to come and of outputs soon to be written

  static int64_t scratch(const heedful_attention& a) {
    return Base::scratch(a, kBlock) + (unit_rows(a) + kBlock) * int64_t(Base::columns_of(a)) * 4 +
           kTileRows * (Base::words_of(a.head_size) * 4 + kSpan * 4 + 8 + sizeof(Sight)) + 2 * kBlock * kGroup * 4 + 512;
  }
  Products(const heedful_attention& a, const PrefillUnit& u, char* at) : Base(a, u, at, kBlock) {
    acc = take<float>(at, int64_t(up(rows, kBlock)) * columns);
    q = take<int32_t>(at, kTileRows * q_words);
    p = take<Weight>(at, kTileRows * kSpan);
    s = take<float>(at, 2 * kBlock * kGroup);
    low = take<int>(at, kTileRows);
    high = take<int>(at, kTileRows);
    sight = take<Sight>(at, kTileRows / kBlock);
  }
  void read_tile(int first, int n) {
    Base::read(first, n, up(n, kBlock), [this](int r, int word) { return r * q_words + word; }, q, low, high);
    Base::read_slopes(first, n, up(n, kBlock), slopes);
    asked = 0;
    for (int b = 0; b < n; b += kBlock) sight[b / kBlock] = Base::sight_of(low + b, high + b, kBlock);
  }

  // -- scores, with the previous block's exponentials woven in
  struct Pending {  // a block of rows whose scores wait for their exponentials
    const float* s;
    Weight* p;
    vf* sum;
    const float* top;
    int vectors;
  };
  template <bool Cap>
  void exponentials(const Pending& w, const Factors& f) const {
    for (int r = 0; r < kBlock; r++)
      for (int c = 0; c < w.vectors; c++) {
        const vf y = Base::template weight<Cap>(load<vf>(w.s + r * kGroup + c * W), f, splat(w.top[r]));
        w.sum[r] = w.sum[r] + y;
        E::put(w.p + r * kSpan + c * W, y);
      }
  }
  template <int C, bool Cap>
  INLINE void products(const int32_t* query, const int32_t* keys, const Pending& w, vf (&x)[kBlock][kWide]) const {
    vf sum[kBlock][C] = {};
    const Factors f = factors();
    const int64_t row = q_words;
    const int steps = q_words / (kBlock * kWide);  // whole: rows are padded to vectors
    const int vectors = w.vectors;
    for (int r = 0; r < kBlock; r++) {
      vf total = w.sum[r];
      const vf reference = splat(w.top[r]);
#pragma GCC unroll 4
      for (int c = 0; c < kWide; c++) {
        if (c < vectors) {
          const vf y = Base::template weight<Cap>(load<vf>(w.s + r * kGroup + c * W), f, reference);
          total = total + y;
          E::put(w.p + r * kSpan + c * W, y);
        }
        for (int d = 0; d < steps; d++, query++, keys += kGroup) {
          Word key[C];
#pragma GCC unroll 4
          for (int i = 0; i < C; i++) key[i] = load<Word>(keys + i * W);
#pragma GCC unroll 4
          for (int j = 0; j < kBlock; j++) {
            const Word y = E::spread((const Weight*)(query + j * row));
#pragma GCC unroll 4
            for (int i = 0; i < C; i++) sum[j][i] = E::dot(sum[j][i], y, key[i]);
          }
        }
      }
      w.sum[r] = total;
    }
#pragma GCC unroll 4
    for (int r = 0; r < kBlock; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) x[r][c] = sum[r][c];
  }

  struct Step {  // one block of rows against one group of keys
    int first_row, local, key, span;  // row of the unit, row of the tile, absolute key, key the span starts at
    Weight* p;
    float* s;
  };
  template <int C, bool Cap, bool Alibi>
  INLINE Pending step(const Step& t, const int32_t* keys, const Pending& previous) const {
    vf x[kBlock][kWide], most[kBlock];
    products<C, Cap && !Alibi>(q + t.local * q_words, keys, previous, x);
    const Sight& see = sight[t.local / kBlock];
    const bool edge = t.key < see.all_low || t.key + C * W > see.all_high;
    const float scale = Alibi && !Base::kApart ? 1.f : a.scale * a.k_scale * kLog2e;  // soft-capped scores are below this
    vi above{};
#pragma GCC unroll 4
    for (int r = 0; r < kBlock; r++) {
      most[r] = splat(-INFINITY);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const vi key = iota() + (t.key + c * W), seen = edge ? (key >= low[t.local + r]) & (key < high[t.local + r]) : vi{} - 1;
        vf score = x[r][c];
        if constexpr (Alibi) score = Base::template biased<Cap>(score, slopes[t.local + r], t.key + c * W);
        if (edge) score = seen ? score : splat(-INFINITY);
        store(t.s + r * kGroup + c * W, score);
        if constexpr (Alibi && Base::kApart) score = seen ? x[r][c] : splat(-INFINITY);
        most[r] = vmax(most[r], score);
      }
      above |= most[r] * scale > top[t.first_row + r] + kLag;
    }
    if (__builtin_expect(any(above), 0)) raise_rows<Cap, Alibi>(t, most);
    return {t.s, t.p, sum + t.first_row, top + t.first_row, C};
  }
  template <bool Cap, bool Alibi>
  __attribute__((noinline)) void raise_rows(const Step& t, const vf* most) const {
    for (int r = 0; r < kBlock; r++) {
      const float factor = Base::template raise<Cap, Alibi>(t.first_row + r, hmax(most[r]));
      if (factor != 1.f) rescale(t, r, factor);
    }
  }
  void rescale(const Step& t, int r, float factor) const {
    const int row = t.first_row + r;
    for (int c = 0; c < columns / kGroup; c++) {
      float* at = acc + ((int64_t(row / kBlock) * (columns / kGroup) + c) * kBlock + row % kBlock) * kGroup;
      for (int i = 0; i < kGroup; i += W) store(at + i, load<vf>(at + i) * factor);
    }
    Weight* weights = p + (t.local + r) * kSpan;  // of this span's earlier groups
    for (int i = 0; i < t.key - t.span; i += W) E::put(weights + i, E::get(weights + i) * factor);
  }

  // -- weights times values: keys [begin, end) of the span, one block of rows, one panel of columns
  static __attribute__((noinline)) void values(const Weight* p, const int32_t* v, int begin, int end, float* acc) {
    vf sum[kBlock][kWide];
#pragma GCC unroll 4
    for (int r = 0; r < kBlock; r++)
#pragma GCC unroll 4
      for (int c = 0; c < kWide; c++) sum[r][c] = load<vf>(acc + r * kGroup + c * W);
#pragma GCC unroll 2
    for (int i = begin / kKeys; i < (end + kKeys - 1) / kKeys; i++) {
      Word z[kWide];
#pragma GCC unroll 4
      for (int c = 0; c < kWide; c++) z[c] = load<Word>(v + i * kGroup + c * W);
#pragma GCC unroll 4
      for (int r = 0; r < kBlock; r++) {
        const Word w = E::spread(p + r * kSpan + i * kKeys);
#pragma GCC unroll 4
        for (int c = 0; c < kWide; c++) sum[r][c] = E::dot(sum[r][c], w, z[c]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kBlock; r++)
#pragma GCC unroll 4
      for (int c = 0; c < kWide; c++) store(acc + r * kGroup + c * W, sum[r][c]);
  }

  // -- one tile of rows over one span of keys
  struct Seen {
    int begin, end;  // of the span, what any of a block's rows sees
  };
  static Seen seen(const Sight& see, int span, int end) {
    const int lo = see.low > span ? see.low - span : 0, hi = (see.high < end ? see.high : end) - span;
    return {lo, hi > lo ? hi : lo};
  }
  template <bool Cap, bool Alibi>
  void span_scores(int first, int n, int span, int end, int panel) {
    for (int g = span; g < end; g += kGroup) {
      Pending waiting{s, p, sum, top, 0};
      int turn = 0;
      for (int b = 0; b < n; b += kBlock) {
        const Seen see = seen(sight[b / kBlock], span, end);
        if (span + see.end <= g || span + see.begin >= g + kGroup || see.begin == see.end) continue;
        const int vectors = span + see.end >= g + kGroup ? kWide : (span + see.end - g + W - 1) / W;
        const Step t{first + b, b, g, span, p + b * kSpan + (g - span), s + turn * kBlock * kGroup};
        const int32_t* keys = k + int64_t(g - panel) / kGroup * kGroup * q_words;
        Base::ask_query(first + kTileRows, asked);
        Base::ask_output(first, asked++);
        const Pending next = any_step<Cap, Alibi>(vectors, t, keys, waiting);
        waiting = next;
        turn ^= 1;
      }
      exponentials<Cap && !Alibi>(waiting, factors());
    }
  }
  // Whole groups are the common case and stand in the loop itself; the others are called.
  template <bool Cap, bool Alibi>
  INLINE Pending any_step(int vectors, const Step& t, const int32_t* keys, const Pending& previous) const {
    if (__builtin_expect(vectors == kWide, 1)) return step<kWide, Cap, Alibi>(t, keys, previous);
    return short_step<Cap, Alibi>(vectors, t, keys, previous);
  }
  template <bool Cap, bool Alibi>
  __attribute__((noinline)) Pending short_step(int vectors, const Step& t, const int32_t* keys, const Pending& previous) const {
    if constexpr (kWide == 4) {
      if (vectors == 3) return step<3, Cap, Alibi>(t, keys, previous);
      if (vectors == 2) return step<2, Cap, Alibi>(t, keys, previous);
    }
    return step<1, Cap, Alibi>(t, keys, previous);
  }
  void clear(int first, int n) {
    memset(acc + int64_t(first) * columns, 0, int64_t(up(n, kBlock)) * columns * 4);
    Base::forget(first, up(n, kBlock));
  }
  __attribute__((noinline)) void tile_over_panel(int first, int n, int panel, int panel_end, bool fresh, bool last) {
    if (fresh) clear(first, n);
    read_tile(first, n);
    for (int span = panel; span < panel_end; span += kSpan) {
      const int end = span + kSpan < panel_end ? span + kSpan : panel_end;
      if (a.soft_cap) a.alibi_slopes ? span_scores<true, true>(first, n, span, end, panel) : span_scores<true, false>(first, n, span, end, panel);
      else a.alibi_slopes ? span_scores<false, true>(first, n, span, end, panel) : span_scores<false, false>(first, n, span, end, panel);
      span_values(first, n, span, end, panel);
    }
    if (last) finish(first, n);
  }
  // What the loops need is copied out of the object: after each block's stores a load from it would wait for them.
  void span_values(int first, int n, int span, int end, int panel) const {
    const int panels = columns / kGroup;
    const Weight* const weights = p;
    const Sight* const sights = sight;
    float* const sums = acc + int64_t(first) * columns;
    for (int c = 0; c < panels; c++) {
      const int32_t* const packed = v + (int64_t(c) * kPanel + span - panel) / kKeys * kGroup;
      float* to = sums + c * kBlock * kGroup;
      for (int b = 0; b < n; b += kBlock, to += panels * kBlock * kGroup) {
        const Seen see = seen(sights[b / kBlock], span, end);
        if (see.begin < see.end) values(weights + b * kSpan, packed, see.begin, see.end, to);
      }
    }
  }

  void end_panel() {}  // nothing is left to do
  void finish_unseen(int first, int n) {  // rows that saw no key
    clear(first, n);
    finish(first, n);
  }
  void finish(int first, int n) {
    alignas(64) float row[512 + 64];
    for (int r = first; r < first + n; r++) {
      const float* from = acc + int64_t(r / kBlock) * columns * kBlock + r % kBlock * kGroup;
      for (int c = 0; c < columns; c += kGroup, from += kBlock * kGroup)
#pragma GCC unroll 4
        for (int i = 0; i < kGroup; i += W) store(row + c + i, load<vf>(from + i));
      emit(a, q_begin + token(r), head_of(r), row, Base::top_of(r), Base::total_of(r));
    }
  }
};

}  // namespace heedful::HEEDFUL_ISA
