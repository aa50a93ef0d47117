// Plans a call as independent units, runs them over the threads, joins the parts of long sequences. The merge of states
// that a caller brings is planned here too.
//
// Where a sequence is cut follows from its own lengths alone: not from its batch mates, nor from the number of threads.
// Threads only decide who computes which unit, and how many KV heads a unit takes, which never meet in one sum.
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "naive.h"
#include "pool.h"
#include "shape.h"

namespace heedful {

#define ISA(name) \
  namespace name { \
  extern const Kernels kernels; \
  }
#include "isas.inc"
#undef ISA

namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool here;
};

#if defined(__x86_64__)
// The kernel gives tile registers only to a process that asks for them; its threads and children have them too.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

bool machine_has(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (!strcmp(name, "avx2")) return avx2;
  if (!strcmp(name, "avx512")) return avx512;
  if (!strcmp(name, "avx512_bf16")) return bf16;
  if (!strcmp(name, "amx"))
    return bf16 && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && may_use_tiles();
#endif
  return !strcmp(name, "portable");
}

std::vector<Isa>& isas() {
  static std::vector<Isa> all = {
#define ISA(name) {#name, &name::kernels, machine_has(#name)},
#include "isas.inc"
#undef ISA
  };
  return all;
}

const Isa* find_isa(const char* name) {
  for (const Isa& isa : isas())
    if (isa.here && (!name || !strcmp(name, isa.name))) return &isa;
  return nullptr;
}

// A group is one stretch of query tokens of a sequence for some KV heads, cut into parts along the keys.
struct Group {
  DecodeUnit whole;
  int first, parts, chunk;  // unit numbers [first, first + parts)
  std::atomic<int> left;
  int slot = -1;
  Group(const DecodeUnit& w, int first, int parts, int chunk) : whole(w), first(first), parts(parts), chunk(chunk), left(parts) {}
  Group(Group&& g) : whole(g.whole), first(g.first), parts(g.parts), chunk(g.chunk), left(g.parts) {}
};

struct Plan {
  const heedful_attention& a;
  const Kernels& k;
  std::vector<PrefillUnit> prefills;
  std::vector<Group> groups;
  int decode_units = 0, most_rows = 1, most_heads = 1;
  int64_t slot_floats = 0;

  int group_size() const { return a.num_heads / a.num_kv_heads; }

  // Few rows read the cache as it lies; many share packed tiles. A sequence's own query length decides.
  void add(int s) {
    const int q_len = a.query_start[s + 1] - a.query_start[s];
    if (!q_len) return;
    if (int64_t(q_len) * group_size() > kRowTile && q_len > 1) return add_prefill(s, q_len);
    add_decode(s, q_len);
  }
  // Later tokens see more keys: they go first, so that the last unit to finish is a short one.
  void add_prefill(int s, int q_len) {
    int tokens = unit_tokens(a);
    while (tokens > 64 && int64_t(a.num_kv_heads) * ((q_len + tokens - 1) / tokens) < 4 * a.threads) tokens /= 2;
    for (int t = (q_len - 1) / tokens * tokens; t >= 0; t -= tokens)
      for (int h = 0; h < a.num_kv_heads; h++) prefills.push_back({s, t, t + tokens < q_len ? t + tokens : q_len, h});
  }
  void add_decode(int s, int q_len) {
    const int kv_len = a.kv_lens[s];
    const int low = visible(a, kv_len, q_len, 0).low & ~3, high = visible(a, kv_len, q_len, q_len - 1).high;
    const int keys = high > low ? high - low : 0;
    int chunk = kChunk;
    while (keys > int64_t(chunk) * kMaxChunks) chunk *= 2;
    const int parts = keys ? (keys + chunk - 1) / chunk : 1;
    const int per_unit = heads_per_unit(parts);
    for (int h = 0; h < a.num_kv_heads; h += per_unit) {
      const int end = h + per_unit < a.num_kv_heads ? h + per_unit : a.num_kv_heads;
      groups.emplace_back(DecodeUnit{s, 0, q_len, h, end, low, high, nullptr}, decode_units, parts, chunk);
      decode_units += parts;
      const int rows = q_len * group_size();
      if (rows > most_rows) most_rows = rows;
      if (end - h > most_heads) most_heads = end - h;
      const int64_t floats = partial_row(a) * rows * (end - h) * parts;
      if (parts > 1 && floats > slot_floats) slot_floats = floats;
    }
  }
  // All heads of a block lie together, so a unit takes all of them unless threads would be idle.
  int heads_per_unit(int parts) const {
    int per_unit = a.num_kv_heads;
    while (per_unit > 1 && int64_t(a.num_seqs) * parts * ((a.num_kv_heads + per_unit - 1) / per_unit) < 4 * a.threads)
      per_unit = (per_unit + 1) / 2;
    return a.threads > 1 ? per_unit : a.num_kv_heads;
  }
};

// Hands out units in order; parts of a group find their slot through it. At most one group a thread, and the one that
// is being handed out, are open at a time: that many slots are enough, however long the batch.
struct Queue {
  Plan& plan;
  std::atomic<int> next_prefill{0};
  std::mutex lock;
  size_t group = 0;
  int part = 0;
  std::vector<int> free_slots;
  float* slots;

  struct Taken {
    Group* group = nullptr;
    int part = 0;
  };
  Taken take() {
    std::lock_guard<std::mutex> hold(lock);
    if (group == plan.groups.size()) return {};
    Group& g = plan.groups[group];
    if (part == 0 && g.parts > 1) {
      g.slot = free_slots.back();
      free_slots.pop_back();
    }
    Taken t{&g, part};
    if (++part == g.parts) part = 0, group++;
    return t;
  }
  float* slot(const Group& g) const { return slots + g.slot * plan.slot_floats; }
  void close(Group& g) {
    std::lock_guard<std::mutex> hold(lock);
    free_slots.push_back(g.slot);
  }
};

DecodeUnit unit_of(const Plan& plan, const Queue& queue, const Group& g, int part) {
  DecodeUnit u = g.whole;
  if (g.parts == 1) return u;
  u.key_begin = g.whole.key_begin + part * g.chunk;
  if (u.key_begin + g.chunk < u.key_end) u.key_end = u.key_begin + g.chunk;
  const int rows = (u.token_end - u.token_begin) * plan.group_size();
  u.partial = queue.slot(g) + int64_t(part) * partial_row(plan.a) * rows * (u.head_end - u.head_begin);
  return u;
}

void work(Plan& plan, Queue& queue, char* scratch) {
  for (int i; (i = queue.next_prefill.fetch_add(1)) < int(plan.prefills.size());)
    plan.k.prefill(plan.a, plan.prefills[i], scratch);
  for (Queue::Taken t; (t = queue.take()).group;) {
    Group& g = *t.group;
    const DecodeUnit u = unit_of(plan, queue, g, t.part);
    plan.k.decode(plan.a, u, scratch);
    if (g.parts > 1 && g.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      plan.k.merge(plan.a, g.whole, g.parts, queue.slot(g));
      queue.close(g);
    }
  }
}

// Scratch memory is kept a thread: one allocation serves every layer of a model.
struct Scratch {
  char* at = nullptr;
  int64_t bytes = 0;
  char* need(int64_t n) {
    if (n > bytes) {
      free(at);
      at = (char*)aligned_alloc(64, (n + 63) / 64 * 64);
      bytes = at ? n : 0;
    }
    return at;
  }
  ~Scratch() { free(at); }
};
thread_local Scratch unit_scratch, slot_scratch;

int attend(const heedful_attention& a, const Kernels& k) {
  Plan plan{a, k, {}, {}};
  for (int s = 0; s < a.num_seqs; s++) plan.add(s);
  const int units = int(plan.prefills.size()) + plan.decode_units;
  const int threads = a.threads < units ? (a.threads > 1 ? a.threads : 1) : (units > 1 ? units : 1);
  int64_t bytes = plan.groups.empty() ? 0 : k.decode_scratch(a, plan.most_rows, plan.most_heads);
  if (!plan.prefills.empty() && k.prefill_scratch(a) > bytes) bytes = k.prefill_scratch(a);
  Queue queue{plan};
  for (int i = 0; i <= threads; i++) queue.free_slots.push_back(i);
  queue.slots = plan.slot_floats ? (float*)slot_scratch.need(plan.slot_floats * (threads + 1) * sizeof(float)) : nullptr;
  if (plan.slot_floats && !queue.slots) return HEEDFUL_NO_MEMORY;
  std::atomic<int> failed{0};
  parallel(threads, [&](int) {
    char* scratch = unit_scratch.need(bytes);
    if (!scratch && bytes) failed = 1;
    else work(plan, queue, scratch);
  });
  return failed && units ? HEEDFUL_NO_MEMORY : HEEDFUL_OK;
}

constexpr int64_t kMergeTaken = 64 << 10;    // bytes of states that a thread takes at once
constexpr int64_t kMergeThread = 256 << 10;  // bytes that are worth one thread more

int merge(const heedful_merge& m, const Kernels& k) {
  const int64_t rows = m.tokens * m.num_heads, row = int64_t(m.num_parts + 1) * (m.head_size * (m.dtype == HEEDFUL_F32 ? 4 : 2) + 4);
  const int64_t taken = (kMergeTaken / row / kLanes + 1) * kLanes, wanted = rows * row / kMergeThread;
  std::atomic<int64_t> next{0};
  std::atomic<int> failed{0};
  parallel(wanted < m.threads ? int(wanted) : m.threads, [&](int) {
    float* shares = (float*)unit_scratch.need(int64_t(m.num_parts) * kLanes * sizeof(float));
    if (!shares) failed = 1;
    else
      for (int64_t begin; (begin = next.fetch_add(taken)) < rows;) k.states(m, begin, begin + taken < rows ? begin + taken : rows, shares);
  });
  return failed ? HEEDFUL_NO_MEMORY : HEEDFUL_OK;
}

}  // namespace
}  // namespace heedful

extern "C" int heedful_attend(const heedful_attention* call, const char* isa) try {
  if (isa && !strcmp(isa, "naive")) return heedful::attend_naive(*call), HEEDFUL_OK;
  const heedful::Isa* chosen = heedful::find_isa(isa);
  if (!chosen) return HEEDFUL_UNKNOWN_ISA;
  while (!chosen->kernels->takes(*call)) chosen++;  // the sets are in order, and the last ones take every call
  return heedful::attend(*call, *chosen->kernels);
} catch (const std::bad_alloc&) {
  return HEEDFUL_NO_MEMORY;
}

extern "C" int heedful_write_cache(const heedful_write* call, const char* isa) {
  const heedful::Isa* chosen = heedful::find_isa(isa && strcmp(isa, "naive") ? isa : nullptr);
  if (!chosen) return HEEDFUL_UNKNOWN_ISA;
  chosen->kernels->write(*call);
  return HEEDFUL_OK;
}

extern "C" int heedful_step(const heedful_form* form, const heedful_operands* o, const char* isa) {
  const auto write = [isa](heedful_write w, const void* source, void* cache, float scale) {
    w.source = source, w.cache = cache, w.scale = scale;
    return w.slots ? heedful_write_cache(&w, isa) : HEEDFUL_OK;
  };
  if (int status = write(form->key, o->key, o->key_cache, o->k_scale)) return status;
  if (int status = write(form->value, o->value, o->value_cache, o->v_scale)) return status;
  heedful_attention a = form->attention;
  a.query = o->query, a.key = o->key_cache, a.value = o->value_cache;
  a.output = o->output, a.lse = o->lse;
  a.alibi_slopes = o->alibi_slopes, a.sinks = o->sinks;
  a.scale = o->scale, a.k_scale = o->k_scale, a.v_scale = o->v_scale, a.threads = o->threads;
  return heedful_attend(&a, isa);
}

extern "C" int heedful_merge_states(const heedful_merge* call, const char* isa) try {
  if (isa && !strcmp(isa, "naive")) return heedful::merge_naive(*call), HEEDFUL_OK;
  const heedful::Isa* chosen = heedful::find_isa(isa);
  if (!chosen) return HEEDFUL_UNKNOWN_ISA;
  return heedful::merge(*call, *chosen->kernels);
} catch (const std::bad_alloc&) {
  return HEEDFUL_NO_MEMORY;
}

extern "C" const char* heedful_isas(void) {
  static const std::string text = [] {
    std::string all;
    for (const auto& isa : heedful::isas()) {
      if (!all.empty()) all += ' ';
      all += isa.name;
      all += isa.here ? ":1" : ":0";
    }
    return all;
  }();
  return text.c_str();
}
