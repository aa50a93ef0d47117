// The kernels' meaning in plain loops and double precision: what every instruction set is tested against. One row at a
// time, one key at a time, in the order of the contract: scale, soft cap, ALiBi, mask, sink, softmax, V.
#include "naive.h"

#include <math.h>
#include <string.h>

#include <vector>

#include "shape.h"

namespace heedful {
namespace {

double half(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
  return h >> 15 ? -v : v;
}
double e4m3(uint8_t b) {
  const int e = b >> 3 & 15, m = b & 7;
  const double v = (b & 127) == 127 ? NAN : e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
  return b >> 7 ? -v : v;
}
double element(const void* base, int64_t i, int dtype) {
  if (dtype == HEEDFUL_F32) return ((const float*)base)[i];
  if (dtype == HEEDFUL_E4M3) return e4m3(((const uint8_t*)base)[i]);
  if (dtype == HEEDFUL_E5M2) return half(((const uint8_t*)base)[i] << 8);
  const uint16_t h = ((const uint16_t*)base)[i];
  if (dtype == HEEDFUL_F16) return half(h);
  const uint32_t bits = uint32_t(h) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
// Rounds a double to 16 bits with `fraction` stored bits and the given bias, to nearest, ties to even.
uint16_t rounded(double x, int fraction, int bias) {
  const uint16_t sign = signbit(x) ? 0x8000 : 0, top = (32767 >> fraction) << fraction;
  if (isnan(x)) return sign | top | (1 << (fraction - 1));
  x = fabs(x);
  int e = x > 0 ? ilogb(x) : -bias;
  if (e < 1 - bias) e = 1 - bias;
  const double steps = nearbyint(ldexp(x, fraction - e));  // the leading one included, where there is one
  const double bits = steps + ldexp(e + bias - 1, fraction);
  return sign | (bits >= top ? top : uint16_t(bits));
}
void put(void* base, int64_t i, int dtype, double x) {
  if (dtype == HEEDFUL_F32) ((float*)base)[i] = x;
  else if (dtype == HEEDFUL_F16) ((uint16_t*)base)[i] = rounded(x, 10, 15);
  else ((uint16_t*)base)[i] = rounded(x, 7, 127);
}

int64_t offset_of(const heedful_attention& a, int s, int key, int64_t block, int64_t token) {
  if (!a.block_tables) return (a.key_start[s] + key) * token;
  return a.block_tables[s * a.table_stride + key / a.block_size] * block + key % a.block_size * token;
}

void row(const heedful_attention& a, int s, int i, int h) {
  const int q_begin = a.query_start[s], q_len = a.query_start[s + 1] - q_begin, kv_len = a.kv_lens[s];
  const int kv_head = h / (a.num_heads / a.num_kv_heads);
  const Visible see = visible(a, kv_len, q_len, i);
  const int64_t q = (q_begin + i) * a.q_token + h * a.q_head;
  double most = a.sinks ? a.sinks[h] : -INFINITY;
  std::vector<double> logits(see.high - see.low);
  for (int key = see.low; key < see.high; key++) {
    const int64_t k = offset_of(a, s, key, a.k_block, a.k_token) + kv_head * a.k_head;
    double x = 0;
    for (int d = 0; d < a.head_size; d++) x += element(a.query, q + d, a.dtype) * element(a.key, k + d, a.cache_dtype);
    x *= double(a.scale) * a.k_scale;
    if (a.soft_cap) x = a.soft_cap * tanh(x / a.soft_cap);
    if (a.alibi_slopes) x -= a.alibi_slopes[h] * abs(kv_len - q_len + i - key);
    logits[key - see.low] = x;
    if (x > most) most = x;
  }
  double sum = a.sinks && a.sinks[h] != -INFINITY ? exp(a.sinks[h] - most) : 0;
  std::vector<double> total(a.head_size_v);
  for (int key = see.low; key < see.high; key++) {
    const double weight = exp(logits[key - see.low] - most);
    const int64_t v = offset_of(a, s, key, a.v_block, a.v_token) + kv_head * a.v_head;
    for (int d = 0; d < a.head_size_v; d++) total[d] += weight * element(a.value, v + d, a.cache_dtype);
    sum += weight;
  }
  const int64_t o = (q_begin + i) * a.o_token + h * a.o_head;
  for (int d = 0; d < a.head_size_v; d++) put(a.output, o + d, a.dtype, sum == 0 ? 0 : total[d] / sum * a.v_scale);
  if (a.lse) a.lse[(q_begin + i) * a.lse_token + h * a.lse_head] = sum == 0 ? -INFINITY : most + log(sum);
}

int64_t output_of(const heedful_state& s, int64_t token, int head) { return token * s.o_token + head * s.o_head; }
int64_t lse_of(const heedful_state& s, int64_t token, int head) { return token * s.lse_token + head * s.lse_head; }

void merge_row(const heedful_merge& m, int64_t token, int head) {
  const int size = m.dtype == HEEDFUL_F32 ? 4 : 2;
  const int64_t to = output_of(m.whole, token, head);
  std::vector<const heedful_state*> parts;  // those with keys
  double most = -INFINITY, sum = 0;
  for (int p = 0; p < m.num_parts; p++) {
    const double lse = m.parts[p].lse[lse_of(m.parts[p], token, head)];
    if (isinf(lse)) continue;
    parts.push_back(m.parts + p);
    if (lse > most) most = lse;
  }
  float& lse = m.whole.lse[lse_of(m.whole, token, head)];
  if (parts.size() == 1) {  // bit for bit: the sign of zero and a NaN's bits too
    const char* from = (const char*)parts[0]->output + output_of(*parts[0], token, head) * size;
    memmove((char*)m.whole.output + to * size, from, int64_t(m.head_size) * size);
    lse = parts[0]->lse[lse_of(*parts[0], token, head)];
    return;
  }
  std::vector<double> weights, total(m.head_size);
  for (const heedful_state* part : parts) {
    weights.push_back(exp(part->lse[lse_of(*part, token, head)] - most));
    sum += weights.back();
  }
  for (int d = 0; d < m.head_size; d++)
    for (size_t i = 0; i < parts.size(); i++)
      total[d] += weights[i] / sum * element(parts[i]->output, output_of(*parts[i], token, head) + d, m.dtype);
  for (int d = 0; d < m.head_size; d++) put(m.whole.output, to + d, m.dtype, total[d]);
  lse = parts.empty() ? -INFINITY : most + log(sum);
}

}  // namespace

void attend_naive(const heedful_attention& a) {
  for (int s = 0; s < a.num_seqs; s++)
    for (int i = 0; i < a.query_start[s + 1] - a.query_start[s]; i++)
      for (int h = 0; h < a.num_heads; h++) row(a, s, i, h);
}

void merge_naive(const heedful_merge& m) {
  for (int64_t token = 0; token < m.tokens; token++)
    for (int head = 0; head < m.num_heads; head++) merge_row(m, token, head);
}

}  // namespace heedful
