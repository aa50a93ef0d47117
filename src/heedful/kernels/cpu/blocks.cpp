// Copies of whole blocks: memory traffic and nothing else, so one text serves every instruction set.
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>

#include "heedful_cpu.h"
#include "pool.h"

namespace heedful {
namespace {

constexpr int64_t kTaken = 64 << 10;    // bytes that a thread takes at once
constexpr int64_t kThread = 512 << 10;  // bytes that are worth one thread more
constexpr int64_t kStream = 16 << 20;   // bytes from which on a call writes past the caches

// A copy that does not read into the caches what it overwrites, a sixth faster where nothing of it was there. The thread
// ends with `written`.
void stream(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
  if (bytes % 64 == 0 && (uintptr_t)to % 16 == 0) {
    for (int64_t i = 0; i < bytes; i += 64) {
      __m128i x[4];
      memcpy(x, from + i, 64);
      for (int j = 0; j < 4; j++) _mm_stream_si128((__m128i*)(to + i) + j, x[j]);
    }
    return;
  }
#endif
  memcpy(to, from, bytes);
}
void written() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// A block as runs of bytes that lie together in both caches, in four nested loops, outermost first. Steps in bytes.
struct Runs {
  int64_t count[4], source[4], target[4], source_block, target_block, bytes;

  explicit Runs(const heedful_cache& c)
      : source_block(c.source_strides[0] * c.item), target_block(c.target_strides[0] * c.item), bytes(c.item) {
    int order[4] = {1, 2, 3, 4};
    std::sort(order, order + 4, [&](int a, int b) { return c.target_strides[a] > c.target_strides[b]; });
    for (int i = 0; i < 4; i++) {
      count[i] = c.shape[order[i]];
      source[i] = c.source_strides[order[i]] * c.item, target[i] = c.target_strides[order[i]] * c.item;
    }
    for (int i = 3; i >= 0 && (count[i] == 1 || (source[i] == bytes && target[i] == bytes)); i--)
      bytes *= count[i], count[i] = 1;
  }
  int64_t all() const { return bytes * count[0] * count[1] * count[2] * count[3]; }
};

template <class Copy>
void each_run(const Runs& r, char* to, const char* from, Copy copy) {
  for (int64_t i = 0; i < r.count[0]; i++)
    for (int64_t j = 0; j < r.count[1]; j++)
      for (int64_t k = 0; k < r.count[2]; k++) {
        char* target = to + i * r.target[0] + j * r.target[1] + k * r.target[2];
        const char* source = from + i * r.source[0] + j * r.source[1] + k * r.source[2];
        for (int64_t l = 0; l < r.count[3]; l++) copy(target + l * r.target[3], source + l * r.source[3]);
      }
}
void copy_block(const Runs& r, char* to, const char* from, bool past_caches) {
  switch (r.bytes) {  // single elements: a size that the compiler knows
    case 1: return each_run(r, to, from, [](char* t, const char* s) { *t = *s; });
    case 2: return each_run(r, to, from, [](char* t, const char* s) { memcpy(t, s, 2); });
    case 4: return each_run(r, to, from, [](char* t, const char* s) { memcpy(t, s, 4); });
  }
  if (past_caches) each_run(r, to, from, [&](char* t, const char* s) { stream(t, s, r.bytes); });
  else each_run(r, to, from, [&](char* t, const char* s) { memcpy(t, s, r.bytes); });
}

// One element after another, one byte after another.
void copy_naive(const heedful_cache& c, const char* from, char* to) {
  int64_t at[5];
  for (at[1] = 0; at[1] < c.shape[1]; at[1]++)
    for (at[2] = 0; at[2] < c.shape[2]; at[2]++)
      for (at[3] = 0; at[3] < c.shape[3]; at[3]++)
        for (at[4] = 0; at[4] < c.shape[4]; at[4]++) {
          int64_t source = 0, target = 0;
          for (int d = 1; d < 5; d++) source += at[d] * c.source_strides[d], target += at[d] * c.target_strides[d];
          for (int64_t i = 0; i < c.item; i++) to[target * c.item + i] = from[source * c.item + i];
        }
}
void copy_naive(const heedful_copy& call) {
  for (int64_t n = 0; n < call.num_caches; n++)
    for (int64_t p = 0; p < call.num_pairs; p++) {
      const heedful_cache& c = call.caches[n];
      const int64_t source = call.pairs[2 * p] * c.source_strides[0], target = call.pairs[2 * p + 1] * c.target_strides[0];
      copy_naive(c, (const char*)c.source + source * c.item, (char*)c.target + target * c.item);
    }
}

void copy_blocks(const heedful_copy& call) {
  int64_t bytes = 0;
  for (int64_t n = 0; n < call.num_caches; n++) bytes += Runs(call.caches[n]).all() * call.num_pairs;
  const int64_t units = call.num_caches * call.num_pairs;
  if (!bytes) return;
  const int64_t taken = std::clamp<int64_t>(kTaken / std::max<int64_t>(bytes / units, 1), 1, units);
  const bool past_caches = bytes >= kStream;
  std::atomic<int64_t> next{0};
  parallel(int(std::clamp<int64_t>(bytes / kThread, 1, call.threads > 1 ? call.threads : 1)), [&](int) {
    for (int64_t begin; (begin = next.fetch_add(taken)) < units;)
      for (int64_t u = begin; u < std::min(begin + taken, units); u++) {
        const heedful_cache& c = call.caches[u / call.num_pairs];
        const int64_t* pair = call.pairs + 2 * (u % call.num_pairs);
        const Runs r(c);
        copy_block(r, (char*)c.target + pair[1] * r.target_block, (const char*)c.source + pair[0] * r.source_block, past_caches);
      }
    written();
  });
}

}  // namespace
}  // namespace heedful

extern "C" int heedful_copy_blocks(const heedful_copy* call, const char* isa) {
  if (isa && !strcmp(isa, "naive")) heedful::copy_naive(*call);
  else heedful::copy_blocks(*call);
  return HEEDFUL_OK;
}
