// One instruction set's kernels: compiled once per ISA with HEEDFUL_ISA naming its namespace.
#include "decode.h"
#include "decode_tiles.h"
#include "prefill.h"
#include "states.h"
#include "write.h"

namespace heedful::HEEDFUL_ISA {

template <class K>
struct Type {
  using type = K;
};

// Calls f with the engine and storage type of a call. An instruction set with bf16 products is compiled for those alone:
// every other call takes the kernels of the next one down.
#if defined(__AVX512BF16__)
static bool takes(const heedful_attention& a) { return a.dtype == HEEDFUL_BF16; }
template <class F>
static auto dispatch(const heedful_attention& a, F f) {
  if (a.cache_dtype == HEEDFUL_E4M3) return f(Pairs(), E4M3());
  if (a.cache_dtype == HEEDFUL_E5M2) return f(Pairs(), E5M2());
  return f(Pairs(), BF16());
}
#else
static bool takes(const heedful_attention&) { return true; }
template <class F>
static auto dispatch(const heedful_attention& a, F f) {
  switch (a.cache_dtype) {
    case HEEDFUL_BF16: return f(Fma(), BF16());
    case HEEDFUL_F16: return f(Fma(), F16());
    case HEEDFUL_E4M3: return f(Fma(), E4M3());
    case HEEDFUL_E5M2: return f(Fma(), E5M2());
    default: return f(Fma(), F32());
  }
}
#endif

// Calls f with the kernel of a decode with so many rows. One row leaves a tile almost empty: bf16 keys are then better
// multiplied by vectors; fp8 ones must be widened anyway.
template <class E, class T, class F>
static auto few_rows(int rows, F f) {
#if defined(__AMX_BF16__)
  if (rows > 8) return f(Type<DecodeTiles<T, 16>>());
  if (rows > 4) return f(Type<DecodeTiles<T, 8>>());
  if (rows > 1 || T::size == 1) return f(Type<DecodeTiles<T, 4>>());
#endif
  return f(Type<Decode<E, T>>());
}
static void decode(const heedful_attention& a, const DecodeUnit& u, char* scratch) {
  const int rows = (u.token_end - u.token_begin) * (a.num_heads / a.num_kv_heads);
  dispatch(a, [&](auto engine, auto type) {
    few_rows<decltype(engine), decltype(type)>(rows, [&](auto kernel) { typename decltype(kernel)::type(a, u, scratch).run(); });
  });
}
static int64_t decode_scratch(const heedful_attention& a, int rows, int heads) {
  return dispatch(a, [&](auto engine, auto type) {
    int64_t most = 0;
    for (int n = 1; n <= rows; n = n < rows && 2 * n > rows ? rows : 2 * n) {  // fewer rows may take another kernel
      const int64_t bytes = few_rows<decltype(engine), decltype(type)>(n, [&](auto kernel) { return decltype(kernel)::type::scratch(a, n, heads); });
      if (bytes > most) most = bytes;
    }
    return most;
  });
}
// Query tokens that a decode unit takes at a time.
static int few_tokens(const heedful_attention& a) {
  const int tokens = kRowTile / (a.num_heads / a.num_kv_heads);
  return tokens > 1 ? tokens : 1;
}
static void prefill(const heedful_attention& a, const PrefillUnit& u, char* scratch) {
  const auto again = dispatch(a, [&](auto engine, auto type) -> PrefillUnit {
    const auto tokens = Prefill<decltype(engine), decltype(type)>(a, u, scratch).run();
    return {u.sequence, tokens.from, tokens.to, u.head};
  });
  const int kv_len = a.kv_lens[u.sequence], q_len = a.query_start[u.sequence + 1] - a.query_start[u.sequence];
  for (int t = again.token_begin, end; t < again.token_end; t = end) {
    end = t + few_tokens(a) < again.token_end ? t + few_tokens(a) : again.token_end;
    const int low = visible(a, kv_len, q_len, t).low / kTile * kTile, high = visible(a, kv_len, q_len, end - 1).high;
    decode(a, {u.sequence, t, end, u.head, u.head + 1, low, high, nullptr}, scratch);
  }
}
static int64_t prefill_scratch(const heedful_attention& a) {
  const int64_t bytes = dispatch(a, [&](auto engine, auto type) { return Prefill<decltype(engine), decltype(type)>::scratch(a); });
  const int64_t few = decode_scratch(a, few_tokens(a) * (a.num_heads / a.num_kv_heads), 1);
  return bytes > few ? bytes : few;
}
static void merge(const heedful_attention& a, const DecodeUnit& u, int parts, const float* partials) {
  merge_parts(a, u, parts, partials);
}

static void write(const heedful_write& w) { write_rows(w); }
static void states(const heedful_merge& m, int64_t begin, int64_t end, float* shares) { merge_rows(m, begin, end, shares); }

extern const Kernels kernels;
const Kernels kernels = {takes, decode, prefill, merge, decode_scratch, prefill_scratch, write, states};

}  // namespace heedful::HEEDFUL_ISA
