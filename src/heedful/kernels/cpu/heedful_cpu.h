// The C interface of heedful's CPU kernels: plain pointers and strides, so that one library serves every torch and
// every Python. All strides are in elements; the last dimension of every tensor is contiguous.
#pragma once
#include <stdint.h>

#define HEEDFUL_API __attribute__((visibility("default")))

extern "C" {

enum heedful_dtype { HEEDFUL_F32 = 0, HEEDFUL_BF16 = 1, HEEDFUL_F16 = 2, HEEDFUL_E4M3 = 3, HEEDFUL_E5M2 = 4 };

// One call of paged varlen attention: any mix of prefill, chunk and decode.
// Sequence s owns queries query_start[s] … query_start[s+1]-1 and sees kv_lens[s] keys, bottom-right aligned.
struct heedful_attention {
  const void* query;  // [tokens, num_heads, head_size]
  int64_t q_token, q_head;
  const void* key;  // paged: [num_blocks, num_kv_heads, block_size, head_size] in any stride order; flat: [keys, …]
  int64_t k_block, k_head, k_token;
  const void* value;
  int64_t v_block, v_head, v_token;
  void* output;  // [tokens, num_heads, head_size_v], dtype of query
  int64_t o_token, o_head;
  float* lse;  // [tokens, num_heads] or null
  int64_t lse_token, lse_head;
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* kv_lens;       // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, table_stride], or null for flat keys
  int64_t table_stride;
  const int32_t* key_start;  // [num_seqs + 1], flat keys only
  const float* alibi_slopes;  // [num_heads] or null
  const float* sinks;         // [num_heads] or null
  int32_t num_seqs, num_heads, num_kv_heads, head_size, head_size_v, block_size;
  int32_t dtype;        // of query and output
  int32_t cache_dtype;  // of key and value
  int32_t causal;
  int32_t window;  // visible keys, the token itself included; 0 is off
  float scale, soft_cap;  // soft_cap 0 is off
  float k_scale, v_scale;
  int32_t threads;
};

// Runs it; 0, or a code of heedful_status. isa: a word of heedful_isas, or null for the best of this machine.
HEEDFUL_API int heedful_attend(const struct heedful_attention* call, const char* isa);

// Writes one step's keys or values: row t goes to slot slots[t]; a negative slot is not written.
struct heedful_write {
  const void* source;  // [tokens, heads, size]
  int64_t s_token, s_head;
  void* cache;
  int64_t c_block, c_head, c_token;
  const int64_t* slots;
  int64_t tokens;
  int32_t heads, size, block_size, dtype, cache_dtype;
  float scale;  // stored = round_even(clamp(x / scale)) in a cache of another dtype than the source's
};
HEEDFUL_API int heedful_write_cache(const struct heedful_write* call, const char* isa);

// A layer's step: its keys and values go to their slots, then it attends. What a whole step and all layers alike share
// stands in the form, its addresses, scales and threads left out: the operands have those.
struct heedful_form {
  struct heedful_attention attention;
  struct heedful_write key, value;  // no slots: nothing is written
};
struct heedful_operands {
  const void *query, *key, *value;  // key, value: rows to write
  void *key_cache, *value_cache;    // flat keys and values where the form has no block tables
  void* output;
  float* lse;
  const float *alibi_slopes, *sinks;
  float scale, k_scale, v_scale;
  int32_t threads;
};
HEEDFUL_API int heedful_step(const struct heedful_form* form, const struct heedful_operands* operands, const char* isa);
// One layer's keys, values or both, of which blocks are copied: [num_blocks, 1 or 2, …three dimensions] in any stride
// order, the last one included.
struct heedful_cache {
  const void* source;
  void* target;
  int64_t source_strides[5], target_strides[5], shape[5];  // shape[0] is not looked at
  int64_t item;  // bytes of an element
};
// Copies block pairs[2 * i] of every source to block pairs[2 * i + 1] of its target, bit for bit. What is written may
// neither be read nor written a second time. isa "naive": one byte after another; else all are the same.
struct heedful_copy {
  const struct heedful_cache* caches;
  const int64_t* pairs;  // [num_pairs, 2]
  int64_t num_caches, num_pairs;
  int32_t threads;
};
HEEDFUL_API int heedful_copy_blocks(const struct heedful_copy* call, const char* isa);

// Attention over some of the keys: its output and its natural-log LSE, the sink included where it holds it.
struct heedful_state {
  void* output;  // [tokens, num_heads, head_size]
  int64_t o_token, o_head;
  float* lse;  // [tokens, num_heads]
  int64_t lse_token, lse_head;
};
// Joins the states of parts that share no key and of which at most one holds the sink. An LSE of -inf or +inf is a part
// without keys; one that alone has some comes back bit for bit, none at all is 0 and -inf. `whole` may be one of them.
struct heedful_merge {
  const struct heedful_state* parts;  // [num_parts], only read
  struct heedful_state whole;
  int64_t tokens;
  int32_t num_parts, num_heads, head_size, dtype, threads;
};
HEEDFUL_API int heedful_merge_states(const struct heedful_merge* call, const char* isa);

enum heedful_status { HEEDFUL_OK = 0, HEEDFUL_UNKNOWN_ISA = 1, HEEDFUL_NO_MEMORY = 2 };

// The instruction sets that were compiled in, best first, and whether this machine has each: "name:0 name:1 …". Beside
// them heedful_attend knows "naive", the plain loops in double precision.
HEEDFUL_API const char* heedful_isas(void);
}
