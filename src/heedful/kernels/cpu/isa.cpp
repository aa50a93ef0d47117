// One instruction set's kernels: compiled once per ISA with HEEDFUL_ISA naming its namespace.
#include "decode.h"
#include "prefill.h"
#include "states.h"
#include "write.h"

namespace heedful::HEEDFUL_ISA {

// Calls f with the engine and storage type of a call: bf16 queries multiply in pairs where the machine can.
template <class F>
static auto dispatch(const heedful_attention& a, F f) {
#if defined(__AVX512BF16__)
  if (a.dtype == HEEDFUL_BF16 && a.cache_dtype == HEEDFUL_BF16) return f(Pairs(), BF16());
  if (a.dtype == HEEDFUL_BF16 && a.cache_dtype == HEEDFUL_E4M3) return f(Pairs(), E4M3());
  if (a.dtype == HEEDFUL_BF16 && a.cache_dtype == HEEDFUL_E5M2) return f(Pairs(), E5M2());
#endif
  switch (a.cache_dtype) {
    case HEEDFUL_BF16: return f(Fma(), BF16());
    case HEEDFUL_F16: return f(Fma(), F16());
    case HEEDFUL_E4M3: return f(Fma(), E4M3());
    case HEEDFUL_E5M2: return f(Fma(), E5M2());
    default: return f(Fma(), F32());
  }
}

static void decode(const heedful_attention& a, const DecodeUnit& u, char* scratch) {
  dispatch(a, [&](auto engine, auto type) { Decode<decltype(engine), decltype(type)>(a, u, scratch).run(); });
}
static int64_t decode_scratch(const heedful_attention& a, int rows, int heads) {
  return dispatch(a, [&](auto engine, auto type) { return Decode<decltype(engine), decltype(type)>::scratch(a, rows, heads); });
}
static void prefill(const heedful_attention& a, const PrefillUnit& u, char* scratch) {
  dispatch(a, [&](auto engine, auto type) { Prefill<decltype(engine), decltype(type)>(a, u, scratch).run(); });
}
static int64_t prefill_scratch(const heedful_attention& a) {
  return dispatch(a, [&](auto engine, auto type) { return Prefill<decltype(engine), decltype(type)>::scratch(a); });
}
static void merge(const heedful_attention& a, const DecodeUnit& u, int parts, const float* partials) {
  merge_parts(a, u, parts, partials);
}

static void write(const heedful_write& w) { write_rows(w); }
static void states(const heedful_merge& m, int64_t begin, int64_t end, float* shares) { merge_rows(m, begin, end, shares); }

extern const Kernels kernels;
const Kernels kernels = {decode, prefill, merge, decode_scratch, prefill_scratch, write, states};

}  // namespace heedful::HEEDFUL_ISA
