// What a unit of work is: shared by the planner, the drivers and the kernels; plain data, the same for every ISA.
#pragma once
#include "heedful_cpu.h"

namespace heedful {

constexpr int kTile = 64;         // keys that one softmax step takes
constexpr int kRowTile = 64;      // query rows (tokens x heads of a group) up to which keys are read as they lie
constexpr int kUnitRows = 4096;   // query rows for which a prefill packs keys once
constexpr int kChunk = 512;       // keys of one independent part of a long sequence
constexpr int kMaxChunks = 32;    // parts of one sequence at most: a longer one gets longer parts
constexpr int kLanes = 16;        // floats of the longest vector: rows whose states are merged together
constexpr float kLog2e = 1.44269504088896341f;

// One piece of a decode: keys [key_begin, key_end) seen by the query tokens [token_begin, token_end) of a sequence, for
// the KV heads [head_begin, head_end). partial null: the piece is all these tokens see, write the output; else leave
// (weighted V, maximum, denominator) per row there.
struct DecodeUnit {
  int sequence, token_begin, token_end, head_begin, head_end, key_begin, key_end;
  float* partial;
};
// One piece of a prefill: the query tokens [token_begin, token_end) of a sequence for one KV head.
struct PrefillUnit {
  int sequence, token_begin, token_end, head;
};

struct Kernels {
  bool (*takes)(const heedful_attention&);  // whether these kernels were compiled for such a call
  void (*decode)(const heedful_attention&, const DecodeUnit&, char* scratch);
  void (*prefill)(const heedful_attention&, const PrefillUnit&, char* scratch);
  void (*merge)(const heedful_attention&, const DecodeUnit&, int parts, const float* partials);
  int64_t (*decode_scratch)(const heedful_attention&, int rows, int heads);
  int64_t (*prefill_scratch)(const heedful_attention&);
  void (*write)(const heedful_write&);
  void (*states)(const heedful_merge&, int64_t row_begin, int64_t row_end, float* shares);
};

// Query rows of a prefill unit at most: whole tokens.
inline int unit_tokens(const heedful_attention& a) {
  const int group = a.num_heads / a.num_kv_heads, tokens = kUnitRows / group;
  return tokens > 1 ? tokens : 1;
}
inline int64_t unit_rows(const heedful_attention& a) {
  return (int64_t(unit_tokens(a)) * (a.num_heads / a.num_kv_heads) + 3) / 4 * 4;
}

inline int64_t partial_row(const heedful_attention& a) { return a.head_size_v + 2; }

// Visible keys of query token i of a sequence: [low, high).
struct Visible {
  int low, high;
};
inline Visible visible(const heedful_attention& a, int kv_len, int q_len, int i) {
  const int position = kv_len - q_len + i;
  int high = a.causal ? position + 1 : kv_len;
  int low = 0;
  if (a.window) {
    low = position - a.window + 1 > 0 ? position - a.window + 1 : 0;
    if (!a.causal && int64_t(position) + a.window < high) high = position + a.window;
  }
  if (high > kv_len) high = kv_len;
  if (high < 0) high = 0;  // more queries than keys: the first ones see nothing
  if (low > high) low = high;
  return {low, high};
}

}  // namespace heedful
