// The products of a prefill on AMX tiles: 32 rows x 32 keys of scores, or 32 rows x 32 columns of values, are four tiles
// of sums. The tile unit works beside the vector units, so each step gives both something to do: it multiplies scores of
// its keys and a piece of the values of an earlier span, and after each multiplication takes the exponentials of some
// rows of the step before. The steps of all tiles of rows over a panel are one such pipeline.
//
// Everything that a tile register of a prefill loads or stores is 16 x 64 bytes that lie together.
#pragma once
#include "rows.h"

#if defined(__AMX_BF16__)
namespace heedful::HEEDFUL_ISA {

// Tile registers by number. A load must see what the program stored before it, hence "memory" there too.
#define TILE_LOAD_ROWS(t, p, row) asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"(int64_t(row)) : "memory")
#define TILE_STORE_ROWS(t, p, row) asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"(int64_t(row)) : "memory")
#define TILE_LOAD(t, p) TILE_LOAD_ROWS(t, p, 64)
#define TILE_STORE(t, p) TILE_STORE_ROWS(t, p, 64)
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_DOT(sum, x, y) asm volatile("tdpbf16ps %%tmm" #y ", %%tmm" #x ", %%tmm" #sum ::)
constexpr int kTileWords = 256;  // 32-bit words of a tile

// Eight tiles of 16 rows x 64 bytes, for as long as it lives: a thread that holds tiles is slower to switch. With fewer
// rows of queries, 0 to 2 have only so many columns, 5 to 7 only so many rows.
struct TileRegisters {
  struct __attribute__((packed)) Shape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  explicit TileRegisters(int rows = 16) {
    Shape shape;
    for (int i = 0; i < 8; i++) {
      shape.row_bytes[i] = i <= 2 ? rows * 4 : 64;
      shape.rows[i] = i >= 5 ? rows : 16;
    }
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
};

struct Tiles : Rows<Pairs, 16, 32> {
  static constexpr int kTileRows = 32, kStep = 32;  // rows and keys of a step: 2 x 2 tiles
  static constexpr int kSpan = 128;                 // keys between two value steps
  static constexpr int kSpans = 4;                  // whose weights are kept: written, waiting, being read
  static constexpr int kPieces = 64;                // 32 columns of one span each
  static constexpr int kScores = kTileRows * kStep, kWeights = kTileRows * kSpan;

  struct Step {  // scores of a step that wait for their exponentials
    const float* s = nullptr;  // [2][2] tiles of rows, of keys; null: nothing waits
    Weight* p;                 // [2] tiles of rows
    int first, slot;           // row of the unit, slot of the span
    int begin, end;            // keys of the span, if this is its last step for these rows; else end is 0
    bool fresh, finishes;      // nothing came before the span, nothing comes after it, for these rows
    const int32_t* values;     // of the span
  };
  struct Piece {  // weights of a span times 32 columns; or, with no steps, the end of a tile of rows
    const Weight* p;
    const int32_t* v;
    float* acc;
    int steps, first;
    bool fresh;
    int done;  // the slot whose weights nothing needs after this piece, or -1
  };

  const int column_tiles;
  const bool one_panel;  // then sums live only while their tile of rows is in the pipeline
  float* acc;            // [tile of rows][columns / 32][2][2] tiles of rows, of columns
  int32_t* q;            // [2][q_words / 16] tiles of rows
  Weight* p;             // [kSpans][kSpan / kStep][2] tiles of rows
  float* s;              // [2][kScores]
  vf* exact;             // [rows], if the LSE is asked for: sums of weights that were not rounded to bf16, as `sum` holds
  int low[kTileRows], high[kTileRows];   // visible keys, counted from 0
  Slope slopes[kTileRows];
  int owner[kSpans] = {-1, -1, -1, -1};  // whose weights a slot holds, by the first row; -1: nobody's
  Piece pieces[kPieces];
  int head = 0, tail = 0, spans = 0, turn = 0;
  Step waiting;
  TileRegisters registers;

  static int64_t scratch(const heedful_attention& a) {
    return Rows::scratch(a, kTileRows) + (unit_rows(a) + kTileRows) * int64_t(columns_of(a)) * 4 +
           kTileRows * words_of(a.head_size) * 4 + kSpans * kWeights * 2 + 2 * kScores * 4 + (a.lse ? (unit_rows(a) + kTileRows) * sizeof(vf) : 0) + 512;
  }
  Tiles(const heedful_attention& a, const PrefillUnit& u, char* at)
      : Rows(a, u, at, kTileRows), column_tiles(columns / 32), one_panel(kv_len <= kPanel) {
    acc = take<float>(at, int64_t(up(rows, kTileRows)) * columns);
    q = take<int32_t>(at, kTileRows * q_words);
    p = take<Weight>(at, kSpans * kWeights);
    s = take<float>(at, 2 * kScores);
    exact = a.lse ? take<vf>(at, up(rows, kTileRows)) : nullptr;
  }
  float* acc_of(int first) const {
    const int tile = first / kTileRows;
    return acc + int64_t(one_panel ? tile % kSpans : tile) * kTileRows * columns;
  }

  // -- exponentials, some rows at a time
  struct Weave {
    const float* s;
    Weight* p;
    vf *sum, *exact;
    const float* top;
    Factors f;
    int row, rate;
  };
  Weave weave_of(const Step& step, int products) const {
    const int row = step.s ? 0 : kTileRows;
    return {step.s, step.p, sum + step.first, exact ? exact + step.first : nullptr, top + step.first, factors(), row, (kTileRows + products - 1) / products};
  }
  template <bool Cap>
  static INLINE void weave(Weave& w, int count) {
    const int end = w.row + count < kTileRows ? w.row + count : kTileRows;
    for (; w.row < end; w.row++) {
      const vf reference = splat(w.top[w.row]);
      const float* from = w.s + w.row * 16 + (w.row & 16) * 16;
      const vf x = weight<Cap>(load<vf>(from), w.f, reference), y = weight<Cap>(load<vf>(from + kTileWords), w.f, reference);
      const __m512bh both = _mm512_cvtne2ps_pbh(y, x);
      w.sum[w.row] = _mm512_dpbf16_ps(w.sum[w.row], both, (__m512bh)(vi{} + 0x3f803f80));
      if (w.exact) w.exact[w.row] = w.exact[w.row] + (x + y);
      store(w.p + w.row * kStep, both);
    }
  }

  // -- the two products
  // Sums of 2 x 2 tiles: x[rows], x_next apart, times y[columns], y_next apart, `steps` times.
  template <bool Cap>
  static INLINE void multiply(const int32_t* x, int x_rows, int x_next, const int32_t* y, int64_t y_columns, int y_next, int steps, Weave& w) {
    for (; steps; steps--, x += x_next, y += y_next) {
      TILE_LOAD(6, y);
      TILE_LOAD(4, x);
      TILE_DOT(0, 4, 6);
      weave<Cap>(w, w.rate);
      TILE_LOAD(7, y + y_columns);
      TILE_DOT(1, 4, 7);
      weave<Cap>(w, w.rate);
      TILE_LOAD(5, x + x_rows);
      TILE_DOT(2, 5, 6);
      weave<Cap>(w, w.rate);
      TILE_DOT(3, 5, 7);
      weave<Cap>(w, w.rate);
    }
  }
  static INLINE void zero() {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  static INLINE void put(float* to) {
    TILE_STORE(0, to);
    TILE_STORE(1, to + kTileWords);
    TILE_STORE(2, to + 2 * kTileWords);
    TILE_STORE(3, to + 3 * kTileWords);
  }
  template <bool Cap>
  INLINE void score(const int32_t* keys, float* to, Weave& w) const {
    zero();
    multiply<Cap>(q, 16 * q_words, kTileWords, keys, kGroup * q_words, kTileWords, q_words / 16, w);
    put(to);
  }
  template <bool Cap>
  INLINE void values(const Piece& piece, Weave& w) const {
    float* const to = piece.acc;
    if (piece.fresh) {
      zero();
    } else {
      TILE_LOAD(0, to);
      TILE_LOAD(1, to + kTileWords);
      TILE_LOAD(2, to + 2 * kTileWords);
      TILE_LOAD(3, to + 3 * kTileWords);
    }
    multiply<Cap>((const int32_t*)piece.p, kTileWords, 2 * kTileWords, piece.v, kPanel / kKeys * kGroup, kTileWords, piece.steps, w);
    put(to);
  }

  // -- the pipeline
  template <bool Cap>
  INLINE void one_piece(Weave& w) {
    const Piece& piece = pieces[head++ % kPieces];
    if (piece.steps) values<Cap>(piece, w);
    else finish(piece.first);
    if (piece.done >= 0) owner[piece.done] = -1;
  }
  // Scores of a step (none: keys null), pieces of earlier spans, the exponentials of the step before.
  template <bool Cap>
  void advance(const int32_t* keys, float* to) {
    const int count = (tail - head + 3) / 4;
    int products = keys ? q_words / 4 : 1;
    for (int i = head; i < head + count; i++) products += 4 * pieces[i % kPieces].steps;
    Weave w = weave_of(waiting, products);
    if (keys) score<Cap>(keys, to, w);
    for (int i = 0; i < count; i++) one_piece<Cap>(w);
    weave<Cap>(w, kTileRows);
    if (waiting.s) close(waiting);
    waiting.s = nullptr;
  }
  void close(const Step& step) {
    const Weight* weights = p + step.slot * kWeights + step.begin * kTileRows;
    const int32_t* values = step.values + step.begin / kKeys * kGroup;
    const int steps = (step.end - step.begin + kStep - 1) / kStep;
    if (step.end)
      for (int c = 0; c < column_tiles; c++)
        push({weights, values + int64_t(c) * 2 * (kPanel / kKeys) * kGroup, acc_of(step.first) + c * 4 * kTileWords, steps, step.first,
              step.fresh, c + 1 == column_tiles ? step.slot : -1});
    if (step.finishes) push({nullptr, nullptr, nullptr, 0, step.first, false, -1});
  }
  void push(const Piece& piece) { pieces[tail++ % kPieces] = piece; }
  template <bool Cap>
  void drain(int pending) {
    Weave none = weave_of({}, 1);
    while (tail - head > pending) one_piece<Cap>(none);
  }

  // Masks and biases raw scores, and raises the maxima that they exceed by too much.
  template <bool Cap, bool Alibi, bool Hides>
  INLINE vf settle_half(float* at, int r, int key) const {
    vf raw = load<vf>(at);
    const vi keys = iota() + key, seen = (keys >= low[r]) & (keys < high[r]);
    if constexpr (Hides) raw = seen ? raw : splat(-INFINITY);
    vf score = raw;
    if constexpr (Alibi) score = biased<Cap>(score, slopes[r], key);
    if constexpr (Alibi && Hides) score = seen ? score : raw;
    if constexpr (Alibi || Hides) store(at, score);
    return raw;
  }
  template <bool Cap, bool Alibi>
  void settle(const Sight& see, int first, int key, float* x) {
    const bool edge = key < see.all_low || key + kStep > see.all_high;
    const float scale = a.scale * a.k_scale * kLog2e;  // soft-capped scores are below this
    vf most[kTileRows];
    __mmask16 above = 0;
    auto settle_rows = [&](auto hides) FLAT {
      for (int r = 0; r < kTileRows; r++) {
        float* const at = x + r * 16 + (r & 16) * 16;
        most[r] = vmax(settle_half<Cap, Alibi, hides.value>(at, r, key), settle_half<Cap, Alibi, hides.value>(at + kTileWords, r, key + W));
        above |= _mm512_cmp_ps_mask(most[r] * scale - top[first + r], splat(kLag), _CMP_GT_OQ);
      }
    };
    edge ? settle_rows(True()) : settle_rows(False());
    if (__builtin_expect(above, 0)) raise_rows<Cap, Alibi>(first, most);
  }
  template <bool Cap, bool Alibi>
  __attribute__((noinline)) void raise_rows(int first, const vf* most) {
    for (int r = 0; r < kTileRows; r++) {
      const float factor = raise<Cap, Alibi>(first + r, hmax(most[r]));
      if (factor != 1.f) rescale(first, r, factor);
    }
  }
  void rescale(int first, int r, float factor) {
    if (exact) exact[first + r] = exact[first + r] * factor;
    float* const at = acc_of(first) + r % 16 * 16 + r / 16 * 2 * kTileWords;
    for (int c = 0; c < column_tiles * 2; c++) {
      float* const sixteen = at + c / 2 * 4 * kTileWords + c % 2 * kTileWords;
      store(sixteen, load<vf>(sixteen) * factor);
    }
    for (int i = 0; i < kSpans; i++) {
      if (owner[i] != first) continue;
      Weight* weights = p + i * kWeights + r * kStep;
      for (int c = 0; c < kWeights; c += kScores)
        for (int half = 0; half < kStep; half += W) Pairs::put(weights + c + half, Pairs::get(weights + c + half) * factor);
    }
  }

  struct Range {  // keys of a panel, and where in its life a tile of rows stands
    int panel, end;
    bool fresh, last;
  };
  template <bool Cap, bool Alibi>
  void pass(const Sight& see, int first, const Range& range) {
    const int from = (see.low > range.panel ? see.low : range.panel) / kStep * kStep, to = see.high < range.end ? see.high : range.end;
    int slot = 0, begin = 0, asked = 0;
    bool fresh = range.fresh;
    for (int key = from; key < to; key += kStep) {
      const int span = key / kSpan * kSpan, at = key - range.panel;
      if (key == from || key == span) {
        drain<Cap && !Alibi>(2 * column_tiles);
        slot = spans++ % kSpans;
        owner[slot] = first;
        begin = key - span;
      }
      float* const scores = s + turn * kScores;
      turn ^= 1;
      for (int i = 0; i < 4; i++) ask_query(first + kTileRows, asked), ask_output(first, asked++);
      advance<Cap && !Alibi>(k + int64_t(at) * q_words, scores);
      settle<Cap, Alibi>(see, first, key, scores);
      const bool done = key + kStep >= to, ends = done || key + kStep == span + kSpan;
      waiting = {scores, p + slot * kWeights + (key - span) * kTileRows, first, slot, begin, ends ? key + kStep - span : 0, fresh,
                 range.last && done, v + int64_t(span - range.panel) / kKeys * kGroup};
      if (ends) fresh = false;
    }
  }
  __attribute__((noinline)) void tile_over_panel(int first, int n, int panel, int end, bool fresh, bool last) {
    const auto place = [this](int r, int word) { return r / 16 * 16 * q_words + word * 16 + r % 16 * 16; };
    read(first, n, kTileRows, place, q, low, high);
    read_slopes(first, n, kTileRows, slopes);
    if (fresh) forget(first, kTileRows);
    if (fresh && exact) memset((void*)(exact + first), 0, kTileRows * sizeof(vf));
    const Sight see = sight_of(low, high, kTileRows);
    const Range range{panel, end, fresh, last};
    if (a.soft_cap) a.alibi_slopes ? pass<true, true>(see, first, range) : pass<true, false>(see, first, range);
    else a.alibi_slopes ? pass<false, true>(see, first, range) : pass<false, false>(see, first, range);
  }
  void end_panel() { a.soft_cap && !a.alibi_slopes ? drain_all<true>() : drain_all<false>(); }
  template <bool Cap>
  void drain_all() {
    advance<Cap>(nullptr, nullptr);
    drain<Cap>(0);
  }

  void finish(int first) {
    alignas(64) float row[512 + 64];
    for (int r = 0; r < kTileRows && first + r < rows; r++) {
      const float* const from = acc_of(first) + r % 16 * 16 + r / 16 * 2 * kTileWords;
      for (int c = 0; c < columns; c += 16) store(row + c, load<vf>(from + c / 32 * 4 * kTileWords + c % 32 * 16));
      const float total = total_of(first + r);
      emit(a, q_begin + token(first + r), head_of(first + r), row, top_of(first + r), total, exact ? hsum(exact[first + r]) : total);
    }
  }
  void finish_unseen(int first, int n) const {
    alignas(64) float zeros[512 + 64] = {};
    for (int r = first; r < first + n; r++) emit(a, q_begin + token(r), head_of(r), zeros, -INFINITY, 0.f);
  }
};

}  // namespace heedful::HEEDFUL_ISA
#endif
