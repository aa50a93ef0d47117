// Holds every instruction set of a built library to its plain loops, without Python: for machines that are emulated.
// Usage: driver [ISA…]     by default all that the machine has. Prints one line an instruction set; exit 1 on a fault.
#include <heedful_cpu.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Bytes = std::vector<char>;
std::mt19937 generator(1);

int size_of(int dtype) { return dtype == HEEDFUL_F32 ? 4 : dtype <= HEEDFUL_F16 ? 2 : 1; }
float normal() { return std::normal_distribution<float>()(generator); }

// Rounding is not what is tested here: any value that a type holds will do.
void put(char* to, int dtype, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (dtype == HEEDFUL_F32) memcpy(to, &bits, 4);
  if (dtype == HEEDFUL_BF16) memcpy(to, (char*)&bits + 2, 2);
  const uint32_t sign = bits >> 31, exponent = (bits >> 23 & 255) - 127, fraction = bits & 0x7fffff;
  const bool small = int(exponent) < -6;  // zero in all the narrow types
  const uint16_t half = sign << 15 | (small ? 0 : (exponent + 15) << 10 | fraction >> 13);
  if (dtype == HEEDFUL_F16) memcpy(to, &half, 2);
  if (dtype == HEEDFUL_E5M2) *to = char(half >> 8);
  if (dtype == HEEDFUL_E4M3) *to = char(sign << 7 | (small ? 0 : (exponent + 7) << 3 | fraction >> 20));
}
float get(const char* from, int dtype) {  // of an output
  if (dtype == HEEDFUL_F16) {
    uint16_t h;
    memcpy(&h, from, 2);
    const int e = h >> 10 & 31, m = h & 1023;
    return (h >> 15 ? -1.f : 1.f) * (e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24));
  }
  uint32_t bits = 0;
  memcpy((char*)&bits + 4 - size_of(dtype), from, size_of(dtype));
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
Bytes normals(int64_t count, int dtype) {
  Bytes all(count * size_of(dtype));
  for (int64_t i = 0; i < count; i++) put(&all[i * size_of(dtype)], dtype, normal());
  return all;
}

struct Case {
  int dtype, cache, heads, kv_heads, size, size_v, block, causal, window;
  bool alibi, sinks;
  float cap;
};
struct Answer {
  Bytes output;
  std::vector<float> lse;
};

// Prefill, chunk and decode in one call, on a shuffled table.
struct Problem {
  static constexpr int seqs = 5, tokens = 70 + 1 + 5 + 1 + 2;
  Case c;
  std::vector<int32_t> starts{0, 70, 71, 76, 77, 79}, lens{70, 34, 90, 601, 2}, tables;
  Bytes query, key, value;
  std::vector<float> slopes, sinks;

  explicit Problem(const Case& c) : c(c) {
    if (!c.causal) lens = {70, 1, 5, 1, 2};
    const int pages = (601 + c.block - 1) / c.block, count = pages * seqs;
    tables.resize(count);
    for (int i = 0; i < count; i++) tables[i] = i;
    std::shuffle(tables.begin(), tables.end(), generator);
    query = normals(int64_t(tokens) * c.heads * c.size, c.dtype);
    key = normals(int64_t(count) * c.kv_heads * c.block * c.size, c.cache);
    value = normals(int64_t(count) * c.kv_heads * c.block * c.size_v, c.cache);
    for (int h = 0; h < c.heads; h++) slopes.push_back(0.5f / (h + 1)), sinks.push_back(h % 3 ? h - 1.f : -INFINITY);
  }
  Answer run(const char* isa, int threads) const {
    Answer found{Bytes(int64_t(tokens) * c.heads * c.size_v * size_of(c.dtype)), std::vector<float>(tokens * c.heads)};
    heedful_attention a{};
    a.query = query.data(), a.q_token = c.heads * c.size, a.q_head = c.size;
    a.key = key.data(), a.k_token = c.size, a.k_head = c.block * c.size, a.k_block = a.k_head * c.kv_heads;
    a.value = value.data(), a.v_token = c.size_v, a.v_head = c.block * c.size_v, a.v_block = a.v_head * c.kv_heads;
    a.output = found.output.data(), a.o_token = c.heads * c.size_v, a.o_head = c.size_v;
    a.lse = found.lse.data(), a.lse_token = c.heads, a.lse_head = 1;
    a.query_start = starts.data(), a.kv_lens = lens.data();
    a.block_tables = tables.data(), a.table_stride = int64_t(tables.size()) / seqs;
    a.alibi_slopes = c.alibi ? slopes.data() : nullptr, a.sinks = c.sinks ? sinks.data() : nullptr;
    a.num_seqs = seqs, a.num_heads = c.heads, a.num_kv_heads = c.kv_heads;
    a.head_size = c.size, a.head_size_v = c.size_v, a.block_size = c.block;
    a.dtype = c.dtype, a.cache_dtype = c.cache, a.causal = c.causal, a.window = c.window;
    a.scale = 1 / sqrtf(c.size), a.soft_cap = c.cap, a.k_scale = a.v_scale = 1, a.threads = threads;
    if (heedful_attend(&a, isa) != HEEDFUL_OK) found.lse[0] = NAN;
    return found;
  }
};

// The largest difference of two answers, as a share of what is allowed; NaN is more than anything.
double share(int dtype, const Answer& one, const Answer& other) {
  const double output = dtype == HEEDFUL_F32 ? 5e-6 : dtype == HEEDFUL_F16 ? 4e-3 : 3.2e-2, lse = 3e-5;
  double most = 0;
  auto note = [&](double x, double y, double limit) {
    const double part = x == y ? 0 : fabs(x - y) / limit;
    if (!(part <= most)) most = part;
  };
  const int size = size_of(dtype);
  for (size_t i = 0; i < one.output.size(); i += size) note(get(&one.output[i], dtype), get(&other.output[i], dtype), output);
  for (size_t i = 0; i < one.lse.size(); i++) note(one.lse[i], other.lse[i], lse);
  return most;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const int sizes[] = {16, 64, 72, 80, 96, 112, 120, 128, 20};
  const int heads[][2] = {{4, 4}, {6, 2}, {8, 1}, {5, 5}};
  const int blocks[] = {1, 3, 8, 16, 24, 64};
  int n = 0;
  for (int dtype : {HEEDFUL_F32, HEEDFUL_BF16, HEEDFUL_F16})
    for (int cache : {dtype, int(HEEDFUL_E4M3), int(HEEDFUL_E5M2)})
      for (int rule = 0; rule < 6; rule++, n++) {
        Case c{dtype, cache, heads[n % 4][0], heads[n % 4][1], sizes[n % 9], sizes[n % 5], blocks[n % 6], 1, 0, false, false, 0};
        if (rule == 1 || rule == 5) c.window = 30;
        if (rule == 2 || rule == 5) c.alibi = true;
        if (rule == 3 || rule == 5) c.cap = 3, c.sinks = true;
        if (rule == 4) c.causal = 0;
        all.push_back(c);
      }
  return all;
}

// Every fp8 value must be stored as itself, from every source type that holds it.
int wrong_writes(const char* isa, int cache) {
  int wrong = 0;
  for (int byte = 0; byte < 256; byte++) {
    const uint16_t half = uint16_t(byte << 8);
    const int e = byte >> 3 & 15, m = byte & 7;
    const float sign = byte >> 7 ? -1.f : 1.f;
    const float x = cache == HEEDFUL_E5M2 ? get((const char*)&half, HEEDFUL_F16) : sign * (e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9));
    if (!isfinite(x) || (cache == HEEDFUL_E4M3 && (byte & 127) == 127)) continue;
    unsigned char stored = 0xAA;
    const int64_t slot = 0;
    heedful_write w{};
    w.source = &x, w.cache = &stored, w.slots = &slot, w.tokens = 1, w.heads = 1, w.size = 1, w.block_size = 1;
    w.dtype = HEEDFUL_F32, w.cache_dtype = cache, w.scale = 1;
    wrong += heedful_write_cache(&w, isa) != HEEDFUL_OK || stored != byte;
  }
  return wrong;
}

// Parts without keys, sizes that fill no vector: as the plain loops have it, in place too.
double merge_share(const char* isa, int dtype, int size, int count) {
  constexpr int tokens = 5, heads = 3;
  std::vector<Bytes> outputs;
  std::vector<std::vector<float>> lses;
  for (int p = 0; p < count; p++) {
    outputs.push_back(normals(tokens * heads * size, dtype));
    lses.emplace_back(tokens * heads);
    for (float& lse : lses.back()) lse = generator() % 4 ? 3 * normal() : generator() % 2 ? -INFINITY : INFINITY;
  }
  auto run = [&](const char* with, bool in_place) {
    auto own_outputs = outputs;
    auto own_lses = lses;
    Answer found{Bytes(outputs[0].size()), std::vector<float>(tokens * heads)};
    std::vector<heedful_state> parts;
    auto state = [&](Bytes& o, std::vector<float>& l) { return heedful_state{o.data(), heads * size, size, l.data(), heads, 1}; };
    for (int p = 0; p < count; p++) parts.push_back(state(own_outputs[p], own_lses[p]));
    heedful_merge m{parts.data(), in_place ? parts.back() : state(found.output, found.lse), tokens, count, heads, size, dtype, 2};
    if (heedful_merge_states(&m, with) != HEEDFUL_OK) own_lses.back()[0] = found.lse[0] = NAN;
    return in_place ? Answer{own_outputs.back(), own_lses.back()} : found;
  };
  const Answer found = run(isa, false), again = run(isa, true);
  const bool moved = found.output != again.output || memcmp(found.lse.data(), again.lse.data(), found.lse.size() * 4);
  return moved ? INFINITY : share(dtype, found, run("naive", false));
}
int wrong_merges(const char* isa) {
  int wrong = 0;
  for (int dtype : {HEEDFUL_F32, HEEDFUL_BF16, HEEDFUL_F16})
    for (int size : {1, 16, 20, 72, 128, 130})
      for (int count : {1, 2, 7}) wrong += !(merge_share(isa, dtype, size, count) <= 1);
  return wrong;
}

// Blocks of [2][3][4][5] elements in several memory orders, from one to another: the bytes that the plain loops move.
int wrong_copies(const char* isa) {
  const int64_t orders[][5] = {{120, 60, 20, 5, 1}, {120, 60, 5, 15, 1}, {240, 120, 40, 10, 2}, {1, 60, 720, 180, 12}};
  const int64_t shape[5] = {6, 2, 3, 4, 5}, pairs[] = {1, 0, 1, 4, 3, 5};
  int wrong = 0;
  for (int64_t item : {1, 2, 4, 8})
    for (const auto& source : orders)
      for (const auto& target : orders) {
        Bytes from(5000 * item), to[2] = {Bytes(5000 * item), Bytes(5000 * item)};
        for (char& byte : from) byte = char(generator());
        for (int i = 0; i < 2; i++) {
          heedful_cache c{from.data(), to[i].data(), {}, {}, {}, item};
          std::copy_n(source, 5, c.source_strides), std::copy_n(target, 5, c.target_strides), std::copy_n(shape, 5, c.shape);
          const heedful_copy call{&c, pairs, 1, 3, 2};
          wrong += heedful_copy_blocks(&call, i ? "naive" : isa) != HEEDFUL_OK;
        }
        wrong += to[0] != to[1] || to[0] == Bytes(5000 * item);
      }
  return wrong;
}

bool holds(const char* isa) {
  double most = 0;
  int faults = 0, done = 0;
  for (const Case& c : cases()) {
    const Problem p(c);
    const Answer right = p.run("naive", 1), found = p.run(isa, 1), again = p.run(isa, 3);
    const double part = share(c.dtype, found, right);
    const bool moved = found.output != again.output || memcmp(found.lse.data(), again.lse.data(), found.lse.size() * 4);
    if (!(part <= 1) || moved) {
      faults++;
      printf("%s: case %d is %.3g of what is allowed%s\n", isa, done, part, moved ? ", and differs with threads" : "");
    }
    if (!(part <= most)) most = part;
    done++;
  }
  const int writes = wrong_writes(isa, HEEDFUL_E4M3) + wrong_writes(isa, HEEDFUL_E5M2);
  const int merges = wrong_merges(isa), copies = wrong_copies(isa);
  printf("%s: %d cases, %d faults, worst %.2f of what is allowed; wrong: %d writes, %d merges, %d copies\n", isa, done,
         faults, most, writes, merges, copies);
  return !faults && !writes && !merges && !copies;
}

}  // namespace

int main(int count, char** words) {
  std::vector<std::string> isas(words + 1, words + count);
  if (isas.empty()) {
    std::istringstream known(heedful_isas());
    for (std::string word; known >> word;)
      if (word.ends_with(":1")) isas.push_back(word.substr(0, word.find(':')));
  }
  bool all = true;
  for (const std::string& isa : isas) all &= holds(isa.c_str());
  return all ? 0 : 1;
}
